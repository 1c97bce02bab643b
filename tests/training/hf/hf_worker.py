"""Load Hugging Face checkpoints in one or several layouts, save logits, and write weights back.

    hf_worker.py CASES.json     a list of {"options": [...], "folder": DIR}

Each DIR receives logits.pt with the logits of `hf_models.sample()`, and reads_<rank>.json with the
number of elements that the rank read of each tensor. Weights are written back in files of 100 kB.

The options are those of pretrain_gpt.py. Every layout uses all of torchrun's ranks.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron.training import device

device.prepare()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    gather_from_tensor_model_parallel_region,
)
from megatron.training import initialize, model  # noqa: E402
from megatron.training.arguments.parse_args import parse_args  # noqa: E402
from megatron.training.arguments.validation import RunConfig  # noqa: E402
from megatron.training.hf import reading, writing  # noqa: E402
from megatron.training.hf.loading import check_weights, load_weights  # noqa: E402
from megatron.training.hf.writing import save_weights  # noqa: E402
from tests.training.hf.hf_models import TOKENS, sample  # noqa: E402


def forward_step(_, chunk):
    tokens = sample()
    positions = torch.arange(TOKENS).expand_as(tokens)
    return chunk(tokens, positions, None), lambda output, non_loss_data: output


def logits_of(run, chunks) -> torch.Tensor | None:
    """Return the whole logits on one rank of the last pipeline stage, None on the others."""
    stages = run.args.virtual_pipeline_model_parallel_size
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if stages else None,
        model=chunks if stages else chunks[0],
        num_microbatches=run.args.pipeline_model_parallel_size,
        seq_length=TOKENS,
        micro_batch_size=2,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not outputs:
        return None
    whole = gather_from_tensor_model_parallel_region(outputs[0])
    mine = parallel_state.get_data_parallel_rank() == 0
    return whole if mine and parallel_state.get_tensor_model_parallel_rank() == 0 else None


class Counted:
    """An open safetensors file that counts the elements read from it."""

    def __init__(self, path, reads, **options):
        self._opened, self._reads = safe_open(path, **options), reads

    def __enter__(self):
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *reason):
        return self._opened.__exit__(*reason)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        return CountedSlice(self._file.get_slice(name), name, self._reads)


class CountedSlice:
    """A tensor in a `Counted` file."""

    def __init__(self, stored, name, reads):
        self._stored, self._name, self._reads = stored, name, reads
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index):
        part = self._stored[index]
        self._reads[self._name] += part.numel()
        return part


def loaded(options: list[str]) -> tuple[RunConfig, list[torch.nn.Module]]:
    """Return the run of a command line and its model with the checkpoint's weights."""
    run = parse_args(options)
    model.check_buildable(run.args)
    initialize.initialize(run.args)
    check_weights(run)
    run.transformer.timers = None
    padded = model.padded_vocab_size(run.args, run.hf.config["vocab_size"])
    chunks = model.build_chunks(run, padded)
    load_weights(chunks, run.hf, run.args.load_hf)
    for chunk in chunks:
        chunk.eval()
    return run, chunks


def leave() -> None:
    """Destroy megatron-core's process groups, including gloo's threads for each."""
    parallel_state.destroy_model_parallel()
    unset_num_microbatches_calculator()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def start_once() -> None:
    """Let later command lines reuse the process group that the first one initializes."""
    start = initialize._start_processes

    def start_processes(args):
        if not dist.is_initialized():
            start(args)

    initialize._start_processes = start_processes


def run_case(options: list[str], folder: Path) -> None:
    reads = Counter()
    reading.safe_open = lambda path, **options: Counted(path, reads, **options)
    run, chunks = loaded(options)
    with torch.no_grad():
        logits = logits_of(run, chunks)
    if logits is not None:
        torch.save(logits, folder / "logits.pt")
    (folder / f"reads_{dist.get_rank()}.json").write_text(json.dumps(reads))
    if run.args.save_hf:
        save_weights(run, chunks)
    leave()


def main(cases: Path) -> None:
    start_once()
    writing.FILE_BYTES = 100_000
    for case in json.loads(cases.read_text()):
        run_case(case["options"], Path(case["folder"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
