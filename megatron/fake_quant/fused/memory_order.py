"""Determine the order of a tensor's dimensions in memory; kernels read tensors in this order."""

from torch import Tensor


def without_gaps(x: Tensor, *, in_order: bool) -> tuple[Tensor, list[int]]:
    """Return `x` or a copy without gaps in memory, and the order of its dimensions in memory.

    The dimensions are listed from the outermost to the innermost. `x` is copied if its memory has
    gaps, or if `in_order` is True and the dimensions are in a different order.

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
