"""Save and load the amax histories of delayed scaling, which are part of a checkpoint.

The histories of each operation (linear, qk or pv) of a module form one tensor of the checkpoint.
The tensor is named after the module in the whole model, so that runs with different parallel sizes
can load it. Each row holds the amax in use, followed by the history with the newest amax first. All
ranks of a pipeline stage have equal histories, and one of these ranks writes the tensor.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.low_precision.delayed_scaling import DelayedScaling, Operation, of_chunk
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.fake_quant.special_scalings import LONGEST_HISTORY
from megatron.training.checkpointing.index import read_index
from megatron.training.printing import print_rank_0

PREFIX = "delayed_scaling."


def sharded(chunks: Sequence[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """Return the amax histories of this rank for saving, by their names in the checkpoint."""
    return {
        _name(operation): _shard(operation, scaling.state_of(operation))
        for scaling in _scalings(chunks)
        for operation in scaling.operations
    }


def sharded_to_load(chunks: Sequence[torch.nn.Module], folder: Path) -> dict[str, ShardedTensor]:
    """Return empty tensors for those amax histories of this rank that a checkpoint contains.

    Print how many histories the checkpoint lacks. Must be called on all ranks.
    """
    operations = [op for scaling in _scalings(chunks) for op in scaling.operations]
    counts = torch.tensor([len(operations), 0])
    shards = {}
    if operations:
        stored = read_index(folder).state_dict_metadata
        for operation in operations:
            size = getattr(stored.get(_name(operation)), "size", ())
            if len(size) == 2 and size[0] == len(SLOTS) and 1 < size[1] <= 1 + LONGEST_HISTORY:
                shards[_name(operation)] = _shard(operation, torch.zeros(size))
        counts[1] = len(operations) - len(shards)
    _print_missing(*_sums(counts))
    return shards


def restore(chunks: Sequence[torch.nn.Module], loaded: Mapping[str, Tensor]) -> None:
    """Set the amax histories of this rank to those loaded from a checkpoint.

    Raises:
        ValueError: if a stored number is not an amax.
    """
    for scaling in _scalings(chunks):
        for operation in scaling.operations:
            if (state := loaded.get(_name(operation))) is not None:
                if not (state >= 0).all() or not state[:, 0].isfinite().all():
                    raise ValueError(
                        f"{_name(operation)} holds a number that is not the largest magnitude of "
                        "a tensor"
                    )
                scaling.restore(operation, state)


def _scalings(chunks: Sequence[torch.nn.Module]) -> list[DelayedScaling]:
    scalings = map(of_chunk, chunks)
    return [scaling for scaling in scalings if scaling is not None]


def _name(operation: Operation) -> str:
    return f"{PREFIX}{operation.module}.{operation.name}"


def _shard(operation: Operation, state: Tensor) -> ShardedTensor:
    """Wrap the histories of an operation for the checkpoint, as one replica per rank."""
    if operation.is_expert:
        replica = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    else:
        replica = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    return ShardedTensor.from_rank_offsets(_name(operation), state, replica_id=(0, *replica))


def _sums(counts: Tensor) -> list[int]:
    """Return the sum of each count over all ranks."""
    parts = [torch.zeros_like(counts) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(parts, counts)
    sums: list[int] = torch.stack(parts).sum(0).tolist()
    return sums


def _print_missing(wanted: int, missing: int) -> None:
    if not missing:
        return
    some = "no" if missing == wanted else "not all"
    print_rank_0(
        f"> the checkpoint has {some} amax histories of delayed scaling: missing "
        "histories start empty, with scales of 1"
    )
