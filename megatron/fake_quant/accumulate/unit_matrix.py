"""Take the operand of a GEMM apart into the factors that a matrix unit reads.

There are three factors:

    elements   numbers of the format's element type; without a format, of the tensor's dtype
    scales     block scales that the unit applies while it sums
    after      scales that are common to a whole row or to the tensor; they multiply the sums

`format_checks.py` refuses formats that do not have such factors, and `product.py` multiplies two
operands.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant import reference, scalings
from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.format_checks import element_name
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.code_points import decode, unpack_nibbles
from megatron.fake_quant.format_text import from_text, to_text
from megatron.fake_quant.formats import Format, Scaling
from megatron.fake_quant.matmul.unrounded import values_and_scale
from megatron.fake_quant.operator_rules import (
    NAMESPACE,
    batch_first,
    is_direct,
    samples,
    stacked,
    without_gradient,
)
from megatron.fake_quant.packing import QuantizedTensor
from megatron.fake_quant.quantize import checked, seed_for, seeds_for
from megatron.fake_quant.scales import Scales

_NIBBLE = 4


class UnitMatrix(NamedTuple):
    """Operand of a GEMM as a matrix unit reads it, with the reduction axis last."""

    elements: Tensor  #: float32 `[..., rows, K]`
    scales: Tensor | None  #: float32 `[..., rows, blocks]` that the unit applies; None if all are 1
    after: Tensor | None  #: float32 factor of the sums: a number or `[..., rows, 1]`; None for 1
    element: str  #: name of the element type

    def rows(self, index: slice) -> "UnitMatrix":
        """Return the rows of the operand that the slice `index` selects."""
        after = self.after
        return self._replace(
            elements=self.elements[..., index, :],
            scales=None if self.scales is None else self.scales[..., index, :],
            after=after[..., index, :] if after is not None and after.dim() else after,
        )

    def columns(self, index: slice, block: int | None) -> "UnitMatrix":
        """Return a slice along the reduction axis, which must begin where a block begins.

        `block` is the number of elements per scale; it is not used if there are no scales.
        """
        scales = self.scales
        if scales is not None:
            assert block is not None
            assert index.start % block == 0, (index, block)
            stop = None if index.stop is None else -(-index.stop // block)
            scales = scales[..., index.start // block : stop]
        return self._replace(elements=self.elements[..., index], scales=scales)


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
        x: the operand; it must not be empty.
        fmt: format of the operand; None for high precision.
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
    if is_direct(x):
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
    """Return whether a unit applies a format's scales, and whether the sums are scaled later."""
    blocks = fmt.block_size is not None
    in_unit = blocks and fmt.block_size != WHOLE_AXIS
    return in_unit, fmt.has_outer_scale or (blocks and not in_unit) or _has_headroom(fmt)


def scales_follow_values(fmt: Format) -> bool:
    """Return whether `UnitMatrix.after` depends on the values of the operand."""
    return fmt.has_outer_scale or fmt.block_size == WHOLE_AXIS


def _has_headroom(fmt: Format) -> bool:
    """Return whether a format's E8M0 scales have a headroom, by which sums must be divided."""
    scaling = fmt.scaling
    return scaling is not None and scaling.block_scale == "E8M0" and scaling.headroom != "1"


def _taken_apart(
    x: Tensor,
    fmt: Format,
    layout: BlockLayout,
    accumulator: Accumulator,
    seed: int | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return an operand's elements and scales, and the factor of the sums; see `UnitMatrix`."""
    if fmt.element.is_cast:
        return layout.to_rows(x.to(fmt.element.dtype)).float().contiguous(), None, None
    if fmt.has_tensor_scale and fmt.block_size is None:
        values, after = values_and_scale(x, fmt, layout, seed, amax)
        return layout.to_rows(values).float().contiguous(), None, after
    blocks, scales = reference.split(x, fmt, layout, seed, amax=amax)
    elements = layout.from_blocks(blocks).contiguous()
    return elements, *_factors(scales, fmt, layout, accumulator)


def _factors(
    stored: Scales, fmt: Format, layout: BlockLayout, accumulator: Accumulator
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales that a unit applies, and the factor by which its sums are multiplied."""
    after = stored.tensor if fmt.has_outer_scale else None
    scaling = fmt.scaling
    if scaling is None or scaling.size is None:
        return None, after
    if _has_headroom(fmt):
        assert isinstance(scaling, BlockScaling)
        after = torch.tensor(1 / scaling.share, dtype=torch.float32, device=stored.block().device)
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


def _block_factors(stored: Scales, scaling: Scaling) -> Tensor:
    """Return the float32 numbers by which the elements of each block are multiplied."""
    codes = stored.block()
    ones = torch.ones((*codes.shape, 1), dtype=torch.float32, device=codes.device)
    outer = None if stored.tensor is None else torch.ones_like(stored.tensor)
    module = scalings.module_of(scaling)
    return module.scale_up(ones, Scales(codes, outer), scaling)[..., 0]


@torch.library.custom_op(f"{NAMESPACE}::take_apart", mutates_args=())
def _take_apart(
    x: Tensor,
    fmt: str,
    accumulator: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements, scales and factors of the sums for each sample; see `operator_rules.py`."""
    known, unit = from_text(fmt), get_accumulator(accumulator)
    layout = BlockLayout.of(tuple(x.shape[batch:]), known, axis)
    none = x.new_empty(0, dtype=torch.float32)
    results = [
        [
            none.clone() if part is None else part
            for part in _taken_apart(sample, known, layout, unit, seed, of_sample)
        ]
        for sample, seed, of_sample in samples(x, seeds, batch, amax)
    ]
    elements, scales, after = (stacked(p, x, batch) for p in zip(*results, strict=True))
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
    x, seeds, amax = batch_first(info, in_dims, {0: x, 4: seeds, 6: amax})
    return _take_apart(x, fmt, accumulator, axis, seeds, batch + 1, amax), (0, 0, 0)


without_gradient(_take_apart)
