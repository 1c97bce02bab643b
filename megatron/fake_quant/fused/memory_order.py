"""The order in which a kernel goes through a tensor's memory."""

from torch import Tensor


def without_gaps(x: Tensor, *, in_order: bool) -> tuple[Tensor, list[int]]:
    """`x`, or a copy without gaps, and the order of its dimensions in memory.

    in_order: the first to the last, because the place of a value counts (random bits, tiles).
    """
    order = list(range(x.ndim))
    if in_order or x.is_contiguous():
        return x.contiguous(), order
    order.sort(key=lambda dim: x.stride(dim), reverse=True)
    if x.permute(order).is_contiguous():
        return x, order
    return x.contiguous(), list(range(x.ndim))
