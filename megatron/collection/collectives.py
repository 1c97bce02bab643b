"""Exchange small values between the ranks, so that all ranks make the same decisions.

If torch.distributed is initialized, every public function must be called on all ranks.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def together(action: Callable[[], _Result]) -> _Result:
    """Run `action` and return its result; if it fails on any rank, raise the error on all ranks.

    Otherwise the ranks without an error would hang in their next collective operation.

    Raises:
        ValueError: if `action` raises a ValueError or OSError on any rank; the message is that of
            the lowest rank with an error.
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
    """Gather `value` from all ranks, and return the list of values on every rank."""
    values = [value]
    if _distributed():
        values = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: str) -> str:
    """Return rank 0's value on every rank."""
    values = [value]
    if _distributed():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def first_rank_says(look: Callable[[], bool]) -> bool:
    """Run `look` on rank 0 only and return its result on every rank.

    The cost is one broadcast of an integer, so it can be called in every iteration.
    """
    if not _distributed():
        return look()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    first = torch.distributed.get_rank() == 0
    answer = torch.tensor([look() if first else False], dtype=torch.int32, device=device)
    torch.distributed.broadcast(answer, src=0)
    return bool(answer.item())
