"""Functions that get, wrap and restore the random states of a rank for a checkpoint."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def current() -> dict[str, Any]:
    """Return the states of all random number generators of this rank."""
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def sharded(values: dict[str, Any] | None) -> ShardedObject:
    """Wrap the random states of this rank as one shard of a checkpoint object.

    The object has one shard per rank.

    Args:
        values: random states; None if they are to be loaded.
    """
    return ShardedObject("rng_state", values, (dist.get_world_size(),), (dist.get_rank(),))


def restore(values: dict[str, Any]) -> None:
    """Restore the random states of this rank.

    Raises:
        ValueError: if `values` does not have the form that `current` returns.
    """
    try:
        _restore(values)
    except Exception as error:  # the generators raise exceptions of different types
        why = str(error) or type(error).__name__
        raise ValueError(
            f"its random states do not have the form that this program writes ({why})"
        ) from error


def _restore(values: dict[str, Any]) -> None:
    random.setstate(values["random"])
    np.random.set_state(values["numpy"])
    torch.set_rng_state(values["torch"])
    torch.cuda.set_rng_state(values["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(values["tracker"])
