"""Multiply two operands of a GEMM that has an accumulator.

The unit sums the products in float32. The sums are multiplied by the factors `after` of both
operands (see `unit_matrix.py`) and by alpha. The caller rounds them to the dtype of the tensors.
Attention in tiles continues a sum in the next tile; it applies the factors after the last tile (see
`tiles/matmul.py`).
"""

from typing import Any

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.element_types import check_accepted, smallest_exponent
from megatron.fake_quant.accumulate.matmul import multiply
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.accumulate.unit_matrix import UnitMatrix
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.operator_rules import NAMESPACE, batch_first, is_direct, without_gradient


def accumulated_product(
    a: UnitMatrix, b: UnitMatrix, accumulator: Accumulator, alpha: float
) -> Tensor:
    """Return `alpha * A @ B^T` in float32, with the products summed by `accumulator`.

    Raises:
        ValueError: if the unit does not multiply the element types of the operands.
    """
    return scaled_sums(accumulated_sums(a, b, accumulator), a, b, alpha)


def accumulated_sums(
    a: UnitMatrix, b: UnitMatrix, accumulator: Accumulator, *, start: Tensor | None = None
) -> Tensor:
    """Return the float32 sums of a product before the factors `UnitMatrix.after` are applied.

    Args:
        a: operand A.
        b: operand B.
        accumulator: accumulator that sums the products.
        start: numbers with which the sums begin, as from an earlier tile; None for zeros.

    Raises:
        ValueError: if the unit does not multiply the element types of the operands.
    """
    check_accepted(accumulator, (a.element, b.element))
    scales_a, scales_b = a.scales, b.scales
    if (scales_a is None) != (scales_b is None):  # an operand without scales has scales of 1
        assert accumulator.scale_block is not None
        scales_a, scales_b = (_scales(x, accumulator.scale_block) for x in (a, b))
    least_a, least_b = smallest_exponent(a.element), smallest_exponent(b.element)
    if is_direct(a.elements) and is_direct(b.elements):
        left = UnitOperand(a.elements, least_a, scales_a)
        right = UnitOperand(b.elements, least_b, scales_b)
        return multiply(left, right, accumulator, start=start)
    assert start is None, "attention in tiles is not traced"
    scales = (scales_a, scales_b)
    sums: Tensor = _accumulate(a.elements, b.elements, *scales, least_a, least_b, accumulator.name)
    return sums


def scaled_sums(sums: Tensor, a: UnitMatrix, b: UnitMatrix, alpha: float) -> Tensor:
    """Return the sums of `accumulated_sums`, times the factors of both operands and `alpha`."""
    if a.after is not None:
        sums = sums * a.after
    if b.after is not None:
        sums = sums * (b.after.transpose(-2, -1) if b.after.dim() else b.after)
    return sums if alpha == 1.0 else sums * alpha


def _scales(matrix: UnitMatrix, block: int) -> Tensor:
    """Return the scales of an operand, or ones if the operand has no scales."""
    if matrix.scales is not None:
        return matrix.scales
    *rows, length = matrix.elements.shape
    return matrix.elements.new_ones((*rows, -(-length // block)))


@torch.library.custom_op(f"{NAMESPACE}::accumulate", mutates_args=())
def _accumulate(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor | None,
    scales_b: Tensor | None,
    smallest_a: int,
    smallest_b: int,
    accumulator: str,
) -> Tensor:
    """Return A B^T, summed by the named accumulator, for code that torch traces or transforms."""
    operands = UnitOperand(a, smallest_a, scales_a), UnitOperand(b, smallest_b, scales_b)
    return multiply(*operands, get_accumulator(accumulator))


@_accumulate.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor | None,
    scales_b: Tensor | None,
    smallest_a: int,
    smallest_b: int,
    accumulator: str,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]))


@_accumulate.register_vmap
def _(
    info: Any,
    in_dims: Any,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor | None,
    scales_b: Tensor | None,
    smallest_a: int,
    smallest_b: int,
    accumulator: str,
) -> tuple[Tensor, int]:
    parts = batch_first(info, in_dims, {0: a, 1: b, 2: scales_a, 3: scales_b})
    return _accumulate(*parts, smallest_a, smallest_b, accumulator), 0


without_gradient(_accumulate)
