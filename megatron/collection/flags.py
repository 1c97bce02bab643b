"""Table of all command-line flags of the tensor collection.

An entry has the name, type, default and help of a flag, and names the function that reads it.

The parser of `pretrain_gpt.py`, the drivers, `settings.read_settings`, the size estimate of a
collection, docs/collection.md and the tests use this table. To add a flag, add an entry here and a
parameter to the function that reads it, then run `python -m megatron.collection.flag_tables` to
update the documentation. This module imports only the standard library, because the drivers use it
without torch.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Reader(Enum):
    """Functions in `megatron.collection` that read flags; each value is a dotted function name."""

    SESSION = "session.configure"
    SELECTION = "selection.Selection.parse"
    LIMITS = "limits.Limits.parse"
    RING = "ring_buffer.RingSettings.parse"
    STATISTICS = "statistics.history.StatisticsSettings.parse"
    FLAG_FILE = "flag_file.FlagFile.parse"


class Topic(Enum):
    """Sections of the manual in run_tensor_collection.sh; each section describes some flags."""

    WHAT = "What to collect"
    WHEN = "When"
    HOW_MUCH = "How much"
    #: topic of the flags that the manual omits, because run_tensor_collection.sh sets them itself
    NONE = ""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag of the collection."""

    name: str  #: name with underscores and without the leading hyphens
    type: type  #: type of one value; bool for a flag without a value
    default: Any = None
    many: bool = False  #: True if the flag accepts several values
    metavar: str = ""  #: placeholder for the value in `--help`; empty for a flag without a value
    help: str  #: description in `pretrain_gpt.py --help` and docs/collection.md
    brief: str = ""  #: description in the manual of run_tensor_collection.sh
    topic: Topic = Topic.NONE
    reader: Reader

    @property
    def option(self) -> str:
        """Spelling of the flag on the command line."""
        return "--" + self.name.replace("_", "-")


#: All flags, in the order in which `--help` lists them. script/driver.sh searches this file for the
#: lines `name="collect_..."`.
FLAGS = (
    Flag(
        name="save_tensors",
        type=bool,
        default=False,
        help="write the tensors that enter and leave the matmuls",
        reader=Reader.SESSION,
    ),
    Flag(
        name="tensor_save_dir",
        type=str,
        metavar="DIR",
        help="folder to write the tensors to (default: enhanced_tensor_logs/<quant type>)",
        reader=Reader.SESSION,
    ),
    Flag(
        name="control_iter",
        type=int,
        metavar="N",
        help="with --save-tensors: iterations to collect before training stops; 0: it does not "
        "stop early (default: 1, or all that --collect-iterations names; 0 with --collect-ring "
        "and --collect-flag-file)",
        brief="iterations to collect before training stops; 0: never stop (default: 1, or all "
        "of --collect-iterations; 0 with a ring or a flag file)",
        topic=Topic.WHAT,
        reader=Reader.SESSION,
    ),
    Flag(
        name="collect_start",
        type=int,
        metavar="N",
        help="first iteration to collect, numbered as in the log (default: 1)",
        brief="first iteration to collect, numbered as in the log (default: 1)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_every",
        type=int,
        metavar="N",
        help="collect every N-th iteration from the first on (default: 1)",
        brief="collect every N-th iteration from the first on (default: 1)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_iterations",
        type=str,
        metavar="SPEC",
        help="in place of the two above, iterations and windows, both ends included: 7, 1-3,100- "
        "or 100-200:10 (every 10th)",
        brief="instead of the two above: 7, 1-3,100- or 100-200:10 (every 10th)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_micro_batches",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches to collect of each iteration; 0: all (default: 1)",
        brief="number of micro-batches per iteration; 0: all (default: 1)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_layers",
        type=str,
        default="all",
        metavar="SPEC",
        help='layers to collect: "all", "first,last", "0,2-4" (default: all)',
        brief="all, or numbers: first,last or 0,2-4 (default: all; quick: first,last)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_modules",
        type=str,
        many=True,
        metavar="GLOB",
        help="modules to collect (default: all), each a glob for the whole dotted name or for its "
        "end: linear_fc*, mlp.*, core_attention",
        brief="module names or their ends: linear_fc*,mlp.*,core_attention (default: all)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_tensors",
        type=str,
        many=True,
        metavar="NAME",
        help="tensors to collect, by the names that records have: input weight output query ...; "
        "attention_scores, attention_probs and `codes` (the operands of each matmul as the format "
        "stores them) are collected on request only, such as with `all attention_probs codes` "
        "(default: all)",
        brief="input,grad_output,...; attention_scores, attention_probs and codes are collected"
        " on request only, all,codes adds codes (default: all others)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_operations",
        type=str,
        many=True,
        metavar="OPERATION",
        help="forward, backward or both (default: both)",
        brief="forward, backward or both (default: forward,backward)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_ranks",
        type=str,
        default="all",
        metavar="SPEC",
        help='world ranks that write: "all", "first,last", "0,2-4" (default: all)',
        brief="world ranks that write: all, first,last or 0,2-4 (default: all)",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_slice",
        type=str,
        many=True,
        metavar="PART",
        help="a part of each tensor, DIM=START:STOP or DIM=START:STOP:STEP with the letters of the "
        "records' dims: s=0:128 h=0:256:2. The numbers count positions in a rank's own tensor. A "
        "tensor that ends before START is left out, and the record names the part that its file "
        "holds",
        brief="a part of each tensor, by the letters of its dims: s=0:128,h=0:256:2",
        topic=Topic.WHAT,
        reader=Reader.SELECTION,
    ),
    Flag(
        name="collect_plan",
        type=bool,
        default=False,
        help="print tensors and bytes of the selection, by layer, tensor, iteration and rank, and "
        "whether limits and disk suffice; then stop, before training. Takes the time of the "
        "selected micro-batches of one iteration",
        brief="print the tensors and bytes of the selection, and stop before training",
        topic=Topic.HOW_MUCH,
        reader=Reader.SESSION,
    ),
    Flag(
        name="collect_max_gib",
        type=float,
        metavar="X",
        help="GiB of .pt files that the run may write (default: no limit). Each rank that collects "
        "has an equal share; a rank that has used its share up stops collecting, and training "
        "goes on",
        brief="GiB that all ranks together may write (default: no limit)",
        topic=Topic.HOW_MUCH,
        reader=Reader.LIMITS,
    ),
    Flag(
        name="collect_max_files",
        type=int,
        metavar="N",
        help="the same for the number of .pt files (default: no limit)",
        brief="number of .pt files that all ranks together may write (default: no limit)",
        topic=Topic.HOW_MUCH,
        reader=Reader.LIMITS,
    ),
    Flag(
        name="collect_keep_free_gib",
        type=float,
        metavar="X",
        help="GiB of disk space to keep free; with 0, the disk may fill up (default: 1, or 5% of a "
        "disk smaller than 20 GiB)",
        brief="GiB of the disk to keep free (default: 1, or 5% of a disk below 20 GiB)",
        topic=Topic.HOW_MUCH,
        reader=Reader.LIMITS,
    ),
    Flag(
        name="collect_max_host_gib",
        type=float,
        metavar="X",
        help="GiB of a machine's memory for tensors that wait to be written, or in a ring; if "
        "they are used up, training waits for the disk (default: a tenth of the memory). Each of "
        "the machine's ranks has an equal share",
        brief="GiB of memory for tensors that wait to be written, or in a ring (default: a "
        "tenth of the machine's memory)",
        topic=Topic.HOW_MUCH,
        reader=Reader.LIMITS,
    ),
    Flag(
        name="collect_flag_file",
        type=str,
        metavar="FILE",
        help="collect while this file exists; every iteration checks it at its beginning, so that "
        "`touch` and `rm` switch a running job",
        brief="collect while this file exists: touch and rm switch a running job",
        topic=Topic.WHEN,
        reader=Reader.FLAG_FILE,
    ),
    Flag(
        name="collect_ring",
        type=int,
        metavar="K",
        help="hold the last K iterations in memory, and write them only when the loss or the "
        "gradient norm is not finite or jumps, or training ends with an error (not by Ctrl-C or "
        "SIGTERM); with K of 2 or more the iteration before the jump is kept too",
        brief="keep the last K iterations in memory; write them if the loss or the gradient "
        "norm is not finite or jumps, or if training ends with an error",
        topic=Topic.WHEN,
        reader=Reader.RING,
    ),
    Flag(
        name="collect_ring_events",
        type=int,
        metavar="N",
        help="with --collect-ring: how often the ring is written before collecting ends (default: "
        "3)",
        brief="with a ring: number of times it is written before collecting ends (default: 3)",
        topic=Topic.WHEN,
        reader=Reader.RING,
    ),
    Flag(
        name="collect_loss_jump",
        type=float,
        metavar="X",
        help="with --collect-ring: a loss jumps if it is above this multiple of the median of "
        "recent normal losses; the first 8 iterations need a larger factor; 0: no loss is a jump "
        "(default: 1.25)",
        brief="a loss above X times the median of recent normal losses is a jump; the first 8 "
        "iterations need a larger factor; 0: no loss is a jump (default: 1.25)",
        topic=Topic.WHEN,
        reader=Reader.RING,
    ),
    Flag(
        name="collect_grad_norm_jump",
        type=float,
        metavar="X",
        help="the same for the gradient norm; use about 4 with large batches (default: 100)",
        brief="the same for the gradient norm; use about 4 with large batches (default: 100)",
        topic=Topic.WHEN,
        reader=Reader.RING,
    ),
    Flag(
        name="tensor_statistics",
        type=int,
        metavar="EVERY",
        help="measure all operands of the matmuls in every EVERY-th iteration (amax, rms, SQNR, "
        "underflow), and write them and the losses to Parquet files in the folder `statistics` of "
        "--tensor-save-dir, and to TensorBoard, Weights & Biases and MLflow if these are on; needs "
        "no --save-tensors",
        reader=Reader.STATISTICS,
    ),
)


def read_by(reader: Reader) -> tuple[Flag, ...]:
    """Return the flags whose values `reader` reads."""
    return tuple(flag for flag in FLAGS if flag.reader is reader)


def by_reader(values: dict[str, Any]) -> dict[Reader, dict[str, Any]]:
    """Group flag values by the function that reads them.

    Args:
        values: values of flags, by the names of the flags.

    Returns:
        One dictionary per reader, which may be empty.

    Raises:
        ValueError: if a name is not a flag of the collection.
    """
    readers = {flag.name: flag.reader for flag in FLAGS}
    if unknown := sorted(values.keys() - readers.keys()):
        raise ValueError(
            f"unknown flag(s) of the collection: {', '.join(unknown)}; see the "
            "flags in megatron/collection/flags.py"
        )
    sorted_values: dict[Reader, dict[str, Any]] = {reader: {} for reader in Reader}
    for name, value in values.items():
        sorted_values[readers[name]][name] = value
    return sorted_values
