"""The order in which a kernel reads a tensor's memory."""

from torch import Tensor


def without_gaps(x: Tensor, *, in_order: bool) -> tuple[Tensor, list[int]]:
    """Return `x` or a copy of it without gaps, and the order of its dimensions in memory.

    in_order: keep the dimensions in order, because the position of a value matters (random bits,
        square blocks).
    """
    order = list(range(x.ndim))
    if in_order or x.is_contiguous():
        return x.contiguous(), order
    order.sort(key=lambda dim: x.stride(dim), reverse=True)
    if x.permute(order).is_contiguous():
        return x, order
    return x.contiguous(), list(range(x.ndim))
