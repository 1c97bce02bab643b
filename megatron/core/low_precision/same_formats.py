"""Refuse a run whose ranks have different formats.

An environment variable may be missing on one of several machines, or the recipe file may differ.
"""

import contextlib

import torch
from torch.distributed.distributed_c10d import _get_default_store

from megatron.collection.collectives import from_all_ranks
from megatron.fake_quant import policy

_ADVICE = "set the same flags and environment variables on every machine"
_KEY = "megatron_quantization_type"  #: key of the first rank's entry in the store of the ranks
_compared: list[policy.Policy] = []  #: formats that this process has compared


def check_same_formats() -> None:
    """Raise ValueError on all ranks if their formats differ. Must be called on all ranks."""
    types = from_all_ranks(policy.current().common)
    if len(set(types)) > 1:
        ranks = "; ".join(
            f"{kind} on rank(s) {', '.join(str(n) for n, of in enumerate(types) if of == kind)}"
            for kind in dict.fromkeys(types)
        )
        raise ValueError(f"the ranks have different formats: {ranks}; {_ADVICE}")


def compare_without_waiting() -> None:
    """Compare this rank's formats with those of the rank that called this function first.

    No rank waits for another one, so ranks of a loop without schedules may run different models.
    The ranks exchange their formats through the default store of torch.distributed. If the program
    configures its formats again, they are compared again.

    Raises:
        ValueError: if the formats differ.
    """
    current = policy.current()
    if _compared and _compared[-1] is current:
        return
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine, rank, found = current.common, torch.distributed.get_rank(), b""
    with contextlib.suppress(RuntimeError):  # not every store has this operation
        key = f"{_KEY}_{len(_compared)}"
        found = _get_default_store().compare_set(key, "", f"{rank} {mine}")
    first_rank, _, first = found.decode().partition(" ")
    if first and first != mine:
        raise ValueError(
            f"the ranks have different formats: {first} on rank {first_rank}; {mine} on rank "
            f"{rank}; {_ADVICE}"
        )
    _compared.append(current)
