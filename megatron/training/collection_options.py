"""Flags of the tensor collection. What they accept is with those who read them, see
`megatron.collection.settings`.
"""

# ruff: noqa: RUF009  (`option` is a dataclass field)

from dataclasses import dataclass

from megatron.training.arguments.option_fields import option


@dataclass(kw_only=True)
class CollectionOptions:
    """Tensor collection (not in Megatron-LM)"""

    save_tensors: bool = option(False, "write the tensors that enter and leave the matmuls")
    tensor_save_dir: str | None = option(
        None, "folder to write them to (default: enhanced_tensor_logs/<quant type>)", metavar="DIR"
    )
    control_iter: int | None = option(
        None,
        "with --save-tensors: iterations to collect before training stops; 0: never (default: 1, "
        "or all that --collect-iterations names; 0 with --collect-ring and --collect-flag-file)",
        type=int,
    )
    collect_start: int | None = option(
        None, "first iteration to collect, as the log counts them (default: 1)", type=int
    )
    collect_every: int | None = option(
        None, "collect every N-th iteration from the first on (default: 1)", type=int
    )
    collect_iterations: str | None = option(
        None,
        "in place of the two above, iterations and windows, both ends included: 7, 1-3,100- or "
        "100-200:10 (every 10th)",
        metavar="SPEC",
    )
    collect_micro_batches: int = option(
        1, "micro-batches to collect of each iteration; 0: all", type=int
    )
    collect_layers: str = option(
        "all", 'layers to collect: "all", "first,last", "0,2-4"', metavar="SPEC"
    )
    collect_modules: list[str] | None = option(
        None,
        "modules to collect (default: all), each a glob for the whole dotted name or for its end: "
        "linear_fc*, mlp.*, core_attention",
        nargs="+",
        metavar="GLOB",
    )
    collect_tensors: list[str] | None = option(
        None,
        "tensors to collect, by the names that records have: input weight output query ...; "
        "attention_scores, attention_probs and `codes`, what each matmul multiplied as the format "
        "stores it, come on request only: `all attention_probs codes` adds them (default: all)",
        nargs="+",
        metavar="NAME",
    )
    collect_operations: list[str] | None = option(
        None, "forward, backward or both (default: both)", nargs="+", metavar="OPERATION"
    )
    collect_ranks: str = option(
        "all", 'world ranks that write: "all", "first,last", "0,2-4"', metavar="SPEC"
    )
    collect_slice: list[str] | None = option(
        None,
        "a part of each tensor, DIM=START:STOP or DIM=START:STOP:STEP with the letters of the "
        "records' dims: s=0:128 h=0:256:2. The numbers are those of a rank's own tensor, one that "
        "ends before START is left out, and the record says what its file is a part of",
        nargs="+",
        metavar="PART",
    )
    collect_plan: bool = option(
        False,
        "print tensors and bytes of what is selected, by layer, tensor, iteration and rank, and "
        "whether limits and disk hold; then stop, before training. Takes the time of one iteration",
    )
    collect_max_gib: float | None = option(
        None,
        "GiB of .pt files that the run may write (default: no limit). Each rank that collects has "
        "an equal share; at its end it stops collecting and training goes on",
        type=float,
    )
    collect_max_files: int | None = option(
        None, "the same for the number of .pt files (default: no limit)", type=int
    )
    collect_keep_free_gib: float | None = option(
        None,
        "GiB of the disk that stay free, 0: the disk may fill up (default: 1, or 5% of a disk "
        "smaller than 20 GiB)",
        type=float,
    )
    collect_max_host_gib: float | None = option(
        None,
        "GiB of a machine's memory for tensors that wait to be written, or in a ring; where they "
        "are used up training waits for the disk (default: a tenth of the memory). Each of the "
        "machine's ranks has an equal share",
        type=float,
    )
    collect_flag_file: str | None = option(
        None,
        "collect while this file is there, looked for at the beginning of every iteration; "
        "`touch` and `rm` switch a running job",
        metavar="FILE",
    )
    collect_ring: int | None = option(
        None,
        "hold the last K iterations in memory, and write them only when the loss or the gradient "
        "norm is not finite or jumps, or training ends with an error (not by Ctrl-C or SIGTERM); "
        "with K of 2 or more the iteration before the jump is kept too",
        type=int,
        metavar="K",
    )
    collect_ring_events: int | None = option(
        None,
        "with --collect-ring: times that it is written, then collecting ends (default: 3)",
        type=int,
    )
    collect_loss_jump: float | None = option(
        None,
        "with --collect-ring: a loss jumps if it is above this multiple of the median of recent "
        "usual losses; the first 8 iterations need more; 0 switches it off (default: 1.25)",
        type=float,
    )
    collect_grad_norm_jump: float | None = option(
        None,
        "the same for the gradient norm; use about 4 with large batches (default: 100)",
        type=float,
    )
