"""Refuse a run whose ranks have different formats.

An environment variable may be missing on one of several machines.
"""

import contextlib

import torch
from torch.distributed.distributed_c10d import _get_default_store

from megatron.collection.collectives import from_all_ranks
from megatron.fake_quant import policy

_ADVICE = "set the same flags and environment variables on every machine"
_KEY = "megatron_quantization_type"  #: key of the first rank's entry in the store of the ranks
_compared = False  #: whether this process has compared its formats


def check_same_formats() -> None:
    """Raise ValueError on all ranks if their formats differ. Must be called on all ranks."""
    types = from_all_ranks(policy.current().quant_type)
    if len(set(types)) > 1:
        ranks = "; ".join(
            f"{kind} on rank(s) {', '.join(str(n) for n, of in enumerate(types) if of == kind)}"
            for kind in dict.fromkeys(types)
        )
        raise ValueError(f"the ranks have different formats: {ranks}; {_ADVICE}")


def compare_without_waiting() -> None:
    """Compare this rank's formats with those of the rank that called this function first.

    No rank waits for another one, so ranks of a loop without schedules may run different models.
    The ranks exchange their formats through the store in which they have found each other.

    Raises:
        ValueError: if the formats differ.
    """
    global _compared
    if _compared or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    _compared = True
    mine, rank = policy.current().quant_type, torch.distributed.get_rank()
    found = b""
    with contextlib.suppress(RuntimeError):  # not every store has this operation
        found = _get_default_store().compare_set(_KEY, "", f"{rank} {mine}")
    first_rank, _, first = found.decode().partition(" ")
    if first and first != mine:
        raise ValueError(
            f"the ranks have different formats: {first} on rank {first_rank}; {mine} on rank "
            f"{rank}; {_ADVICE}"
        )
