"""Determine the order in which a kernel reads a tensor's memory."""

from torch import Tensor


def without_gaps(x: Tensor, *, in_order: bool) -> tuple[Tensor, list[int]]:
    """Return `x` without gaps in memory, and its dimensions in memory order, outermost first.

    `x` itself is returned if its memory has no gaps; otherwise, a contiguous copy is returned.

    in_order: True to keep the dimensions in order, because the position of a value matters (for
        random bits and square blocks).
    """
    order = list(range(x.ndim))
    if in_order or x.is_contiguous():
        return x.contiguous(), order
    order.sort(key=lambda dim: x.stride(dim), reverse=True)
    if x.permute(order).is_contiguous():
        return x, order
    return x.contiguous(), list(range(x.ndim))
