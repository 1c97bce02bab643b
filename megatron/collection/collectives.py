"""Make all ranks agree; every function is collective if torch.distributed is initialized."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def together(action: Callable[[], _Result]) -> _Result:
    """Run `action` on every rank; if it fails on any rank, raise the error on every rank.

    A rank that continued alone would hang in its next collective operation.

    Raises:
        ValueError: with the message of the first rank that raised a ValueError or an OSError.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = str(error)
    if first := next((error for error in from_all_ranks(failure) if error is not None), None):
        raise ValueError(first)
    return result  # type: ignore[return-value]  # None only if the action returned it


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values = [value]
    if _distributed():
        values = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: str) -> str:
    """Return the first rank's value, on every rank."""
    values = [value]
    if _distributed():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def first_rank_says(look: Callable[[], bool]) -> bool:
    """Run `look` on the first rank and return its result on every rank.

    The call is cheap enough for every iteration.
    """
    if not _distributed():
        return look()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    first = torch.distributed.get_rank() == 0
    answer = torch.tensor([look() if first else False], dtype=torch.int32, device=device)
    torch.distributed.broadcast(answer, src=0)
    return bool(answer.item())
