"""Multiply operands as a matrix unit does: it reads elements, and applies some of their scales.

An operand of a GEMM with an accumulator (see `accumulate`) is taken apart into three factors:

    elements   numbers of the format's element type; without a format, of the tensor's dtype
    scales     block scales that the unit applies while it sums
    after      scales that are common to a whole row or to the tensor; they multiply the sums

The sums are in float32. They are multiplied by the factors `after` of both operands and by alpha,
and are rounded to the dtype of the tensors once. Attention in tiles continues a sum in the next
tile; it applies the factors after the last tile (see `tiled_matmul.py`).

Not every format fits every unit. `check_operands` refuses a combination that no unit computes, for
example blocks of 32 values in a unit that knows no block scales.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant import operators, reference, scalings
from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.element_types import check_accepted, smallest_exponent
from megatron.fake_quant.accumulate.matmul import multiply
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.code_points import decode, unpack_nibbles
from megatron.fake_quant.elements import HiFloat8
from megatron.fake_quant.format_text import from_text, to_text
from megatron.fake_quant.formats import Format
from megatron.fake_quant.operand import Operand
from megatron.fake_quant.packing import QuantizedTensor
from megatron.fake_quant.quantize import checked, seed_for, seeds_for
from megatron.fake_quant.scales import Scales
from megatron.fake_quant.special_scalings import (
    AbsmaxScaling,
    ChoiceScaling,
    GroupScaling,
    MacroScaling,
    PairScaling,
    TensorScaling,
)
from megatron.fake_quant.unrounded import values_and_scale

#: Element type that stands for high-precision tensors in checks that do not know their dtype.
ANY_HALF = "bfloat16"
_NIBBLE = 4


class UnitMatrix(NamedTuple):
    """Operand of a GEMM as a matrix unit reads it, with the reduction axis last."""

    elements: Tensor  #: float32 `[..., rows, K]`
    scales: Tensor | None  #: float32 `[..., rows, blocks]` that the unit applies; None if all are 1
    after: Tensor | None  #: float32 factor of the sums: a number or `[..., rows, 1]`; None for 1
    element: str  #: name of the element type

    def rows(self, index: slice) -> "UnitMatrix":
        """Return some rows of the operand."""
        after = self.after
        return self._replace(
            elements=self.elements[..., index, :],
            scales=None if self.scales is None else self.scales[..., index, :],
            after=after[..., index, :] if after is not None and after.dim() else after,
        )

    def columns(self, index: slice, block: int | None) -> "UnitMatrix":
        """Return a part of the reduction axis, which begins with a whole block of `block` values.

        `block` is the number of elements per scale; it is not used if there are no scales.
        """
        scales = self.scales
        if scales is not None:
            assert block is not None
            assert index.start % block == 0, (index, block)
            stop = None if index.stop is None else -(-index.stop // block)
            scales = scales[..., index.start // block : stop]
        return self._replace(elements=self.elements[..., index], scales=scales)


# Which formats a unit multiplies


def check_operands(accumulator: Accumulator, a: Operand, b: Operand) -> None:
    """Refuse an accumulator for a GEMM with these operands if no unit computes it so.

    A high-precision operand passes if the unit multiplies any 16-bit type; see `check_dtypes`.

    Raises:
        ValueError: if it is refused; the message gives the reason.
    """
    if not accumulator.simulated:
        return
    for operand in (a, b):
        if operand.split != "none":
            raise ValueError(
                f"the accumulator {accumulator.name} is for one product, and an operand with the "
                f"split {operand.split} makes two; remove the split or the accumulator"
            )
        if operand.format is not None and (reason := _misfit(operand.format, accumulator)):
            raise ValueError(
                f"the accumulator {accumulator.name} does not go with {operand.format.name}, "
                f"{reason}"
            )
    check_accepted(accumulator, (element_name(a.format), element_name(b.format)))


def element_name(fmt: Format | None, dtype: torch.dtype | None = None) -> str:
    """Return the name of a format's element type, or of the dtype of tensors without a format."""
    if fmt is not None:
        return fmt.element.name
    return ANY_HALF if dtype is None else str(dtype).removeprefix("torch.")


def _misfit(fmt: Format, accumulator: Accumulator) -> str | None:
    """Return the reason why a unit cannot apply the scales of a format, or None if it can."""
    scaling = fmt.scaling
    if isinstance(fmt.element, HiFloat8) and accumulator.elements:
        return "because no unit that multiplies HiFloat8 is described in public; leave it at fp32"
    if scaling is None or isinstance(scaling, TensorScaling):
        return None
    if isinstance(scaling, ChoiceScaling):
        return "whose blocks choose between two element types; no unit of this kind is described"
    if isinstance(scaling, PairScaling | GroupScaling | MacroScaling):
        return "whose blocks have finer scales inside, which no described unit applies"
    if fmt.outer_size not in (None, WHOLE_AXIS):
        return (
            "whose outer scales differ along the reduction axis; choose outer-tensor or outer-row"
        )
    if scaling.size == WHOLE_AXIS:
        return None
    size, own = accumulator.scale_block, accumulator.scale_type
    if size is None:
        return (
            "which has block scales: this unit applies none; choose a unit that does (blackwell_mx "
            "for E8M0 scales, blackwell_nvfp4 for E4M3 scales, hopper_fp8_promote128 for blocks "
            "of 128), or a format with one scale per tensor or row"
        )
    if scaling.size % size:
        return f"which has one scale per {scaling.size} values: this unit takes one per {size}"
    if own not in ("fp32", _block_scale(fmt)):
        return f"which has {fmt.block_scale} block scales: this unit applies {str(own).upper()}"
    return None


def _block_scale(fmt: Format) -> str:
    """Return the type of a format's block scales; a headroom is applied to the sums instead."""
    return str(fmt.block_scale).lower()


# Taking operands apart


def unit_matrix(
    x: Tensor,
    fmt: Format | None,
    axis: int,
    accumulator: Accumulator,
    *,
    seed: int | Tensor | None = None,
    amax: Tensor | None = None,
) -> UnitMatrix:
    """Quantize an operand of a GEMM, and return it as the unit of an accumulator reads it.

    Args:
        x: the operand, which is not empty.
        fmt: its format; None for high precision.
        axis: reduction axis, -1 or -2.
        accumulator: accumulator that `check_operands` has accepted for the format.
        seed: see `fake_quantize`.
        amax: see `fake_quantize`.
    """
    if fmt is None:
        rows = x.detach().movedim(axis, -1).float().contiguous()
        return UnitMatrix(rows, None, None, element_name(None, x.dtype))
    fmt, layout = checked(x, fmt, axis, amax)
    x = x.detach()
    if operators.is_direct(x):
        parts = _taken_apart(x, fmt, layout, accumulator, seed_for(fmt, None, seed), amax)
    else:
        seeds = seeds_for(fmt, None, seed)
        parts = _take_apart(x, to_text(fmt), accumulator.name, axis, seeds, 0, amax)
    has_scales, has_after = _factors_of(fmt)
    elements, scales, after = parts
    return UnitMatrix(
        elements, scales if has_scales else None, after if has_after else None, fmt.element.name
    )


def unit_matrix_of_codes(quantized: QuantizedTensor, accumulator: Accumulator) -> UnitMatrix:
    """Return the operand that codes and scales stand for, as `unit_matrix` returns it."""
    fmt, codes = quantized.format, quantized.codes
    layout = BlockLayout.of(quantized.shape, fmt, quantized.axis)
    if fmt.element.is_cast:
        elements = codes.float()
    else:
        if fmt.element.bits <= _NIBBLE:
            codes = unpack_nibbles(codes, layout.rows_shape[-1]).reshape(layout.rows_shape)
        elements = decode(codes, fmt.element)
    scales, after = _factors(quantized.scales, fmt, layout, accumulator)
    return UnitMatrix(elements, scales, after, fmt.element.name)


def _factors_of(fmt: Format) -> tuple[bool, bool]:
    """Return whether a format has scales that a unit applies, and factors of the sums."""
    scaling = fmt.scaling
    blocks = isinstance(scaling, BlockScaling | AbsmaxScaling)
    in_unit = blocks and fmt.block_size != WHOLE_AXIS
    return in_unit, fmt.has_outer_scale or (blocks and not in_unit) or _has_headroom(fmt)


def scales_follow_values(fmt: Format) -> bool:
    """Return whether the factor `after` of an operand depends on the operand's values."""
    whole_rows = isinstance(fmt.scaling, BlockScaling | AbsmaxScaling)
    return fmt.has_outer_scale or (whole_rows and fmt.block_size == WHOLE_AXIS)


def _has_headroom(fmt: Format) -> bool:
    """Return whether all values of a format have a common factor, its headroom's inverse."""
    scaling = fmt.scaling
    return isinstance(scaling, BlockScaling) and scaling.scale == "e8m0" and scaling.headroom != "1"


def _taken_apart(
    x: Tensor,
    fmt: Format,
    layout: BlockLayout,
    accumulator: Accumulator,
    seed: int | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return elements, scales and the factor of the sums; see `UnitMatrix`."""
    if fmt.element.is_cast:
        return layout.to_rows(x.to(fmt.element.dtype)).float().contiguous(), None, None
    if isinstance(fmt.scaling, TensorScaling):
        values, after = values_and_scale(x, fmt, layout, seed, amax)
        return layout.to_rows(values).float().contiguous(), None, after
    blocks, scales = reference.split(x, fmt, layout, seed, amax=amax)
    elements = layout.from_blocks(blocks).contiguous()
    return elements, *_factors(scales, fmt, layout, accumulator)


def _factors(
    stored: Scales, fmt: Format, layout: BlockLayout, accumulator: Accumulator
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales that a unit applies, and the factor of its sums."""
    after = stored.tensor if fmt.has_outer_scale else None
    scaling = fmt.scaling
    if not isinstance(scaling, BlockScaling | AbsmaxScaling):
        return None, after
    if _has_headroom(fmt):
        assert isinstance(scaling, BlockScaling)
        after = torch.tensor(1 / scaling.share, device=stored.block().device)
        scaling = replace(scaling, headroom="1")
    factors = _block_factors(stored, scaling)
    if fmt.height > 1:
        rows = layout.rows_shape[-2]
        factors = factors.repeat_interleave(fmt.height, -2)[..., :rows, :]
    if fmt.block_size == WHOLE_AXIS:
        return None, factors if after is None else factors * after
    assert fmt.block_size is not None
    assert accumulator.scale_block is not None
    size = accumulator.scale_block
    count = -(-layout.rows_shape[-1] // size)
    return factors.repeat_interleave(fmt.block_size // size, -1)[..., :count].contiguous(), after


def _block_factors(stored: Scales, scaling: BlockScaling | AbsmaxScaling) -> Tensor:
    """Return the float32 numbers by which the elements of each block are multiplied."""
    codes = stored.block()
    ones = torch.ones((*codes.shape, 1), device=codes.device)
    outer = None if stored.tensor is None else torch.ones_like(stored.tensor)
    module = scalings.module_of(scaling)
    return module.scale_up(ones, Scales(codes, outer), scaling)[..., 0]


@torch.library.custom_op(f"{operators.NAMESPACE}::take_apart", mutates_args=())
def _take_apart(
    x: Tensor,
    fmt: str,
    accumulator: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements, scales and factors of the sums for each sample; see `operators.py`."""
    known, unit = from_text(fmt), get_accumulator(accumulator)
    layout = BlockLayout.of(tuple(x.shape[batch:]), known, axis)
    none = x.new_empty(0, dtype=torch.float32)
    results = [
        [
            none.clone() if part is None else part
            for part in _taken_apart(sample, known, layout, unit, seed, of_sample)
        ]
        for sample, seed, of_sample in operators.samples(x, seeds, batch, amax)
    ]
    elements, scales, after = (operators.stacked(p, x, batch) for p in zip(*results, strict=True))
    return elements, scales, after


@_take_apart.register_fake
def _(
    x: Tensor,
    fmt: str,
    accumulator: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    known, unit = from_text(fmt), get_accumulator(accumulator)
    front = tuple(x.shape[:batch])
    layout = BlockLayout.of(tuple(x.shape[batch:]), known, axis)
    rows = layout.rows_shape
    in_unit, has_after = _factors_of(known)
    blocks: tuple[int, ...] = (0,)
    if in_unit:
        assert unit.scale_block is not None
        blocks = (*rows[:-1], -(-rows[-1] // unit.scale_block))
    after: tuple[int, ...] = (0,)
    if has_after:
        of_rows = known.block_size == WHOLE_AXIS or known.outer_size == WHOLE_AXIS
        after = (*rows[:-1], 1) if of_rows else ()
    shapes = (rows, blocks, after)
    elements, scales, factor = (
        x.new_empty((*front, *shape), dtype=torch.float32) for shape in shapes
    )
    return elements, scales, factor


@_take_apart.register_vmap
def _(
    info: Any,
    in_dims: Any,
    x: Tensor,
    fmt: str,
    accumulator: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    x = operators.with_batch(x, in_dims[0], info.batch_size)
    if seeds is not None:
        seeds = operators.with_batch(seeds, in_dims[4], info.batch_size)
    if amax is not None:
        amax = operators.with_batch(amax, in_dims[6], info.batch_size)
    return _take_apart(x, fmt, accumulator, axis, seeds, batch + 1, amax), (0, 0, 0)


_take_apart.register_autograd(lambda ctx, *grads: (None,) * 7, setup_context=operators.constant)


# Products


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
    """Return the float32 sums of a product before the factors `after` are applied.

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
    if operators.is_direct(a.elements) and operators.is_direct(b.elements):
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
    """Return the scales of an operand, which are ones if it has none."""
    if matrix.scales is not None:
        return matrix.scales
    *rows, length = matrix.elements.shape
    return matrix.elements.new_ones((*rows, -(-length // block)))


@torch.library.custom_op(f"{operators.NAMESPACE}::accumulate", mutates_args=())
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
    parts = [
        None if part is None else operators.with_batch(part, dim, info.batch_size)
        for part, dim in zip((a, b, scales_a, scales_b), in_dims, strict=False)
    ]
    return _accumulate(*parts, smallest_a, smallest_b, accumulator), 0


_accumulate.register_autograd(lambda ctx, grad: (None,) * 7, setup_context=operators.constant)
