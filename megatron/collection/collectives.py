"""What all ranks must agree on; each function is collective where torch.distributed is set up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def together(action: Callable[[], _Result]) -> _Result:
    """Do `action` on every rank, and raise on every rank what failed on any.

    A rank that went on alone would hang in its next collective.

    Raises:
        ValueError: the first rank's failure; only ValueError and OSError count as one.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = str(error)
    if first := next((found for found in from_all_ranks(failure) if found is not None), None):
        raise ValueError(first)
    return result  # type: ignore[return-value]  # None only where the action gave it


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def from_all_ranks(value: Any) -> list[Any]:
    """The value of each rank, on every rank."""
    values = [value]
    if _distributed():
        values = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: str) -> str:
    """The first rank's value, on every rank."""
    values = [value]
    if _distributed():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def first_rank_says(look: Callable[[], bool]) -> bool:
    """What `look` finds on the first rank, on every rank; cheap enough for every iteration."""
    if not _distributed():
        return look()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    first = torch.distributed.get_rank() == 0
    answer = torch.tensor([look() if first else False], dtype=torch.int32, device=device)
    torch.distributed.broadcast(answer, src=0)
    return bool(answer.item())
