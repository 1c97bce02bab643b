"""Formats whose result does not follow from a value and the scale of its block: stochastic and
hybrid rounding, and HiFloat4 with its three levels of scales. The code that trains computes them,
and values and results are compared pair by pair: slower, by ten times or more.

The random numbers of stochastic rounding come from one seed, so that a second call gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats.errors import Errors, headroom_bins
from megatron.analysis.stats.format_groups import axes_of
from megatron.analysis.stats.kernels.error_sums import account_pairs, disagree_pairs
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant import dequantize, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.code_points import encode, pack_nibbles, unpack_nibbles
from megatron.fake_quant.formats import (
    Cast,
    ElementFormat,
    Format,
    GroupScaling,
    HiFloat8,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.hifloat8 import LARGEST_EXPONENT
from megatron.fake_quant.inspect.format_properties import positive_values
from megatron.fake_quant.packing import QuantizedTensor

SEED = 20240916  #: of stochastic rounding
PIECE = 1 << 20  #: values at a time; the reference needs some fifty bytes for each
_NIBBLE = 4


def measure_sampled(
    tensor: Tensor, layout: MatrixView, fmt: Format, found: dict[tuple[str, str], Errors]
) -> None:
    """Add what a format does to a tensor that is not empty."""
    axes = axes_of(fmt)
    for piece in _pieces(tensor, layout, fmt):
        results = {}
        for axis in axes:
            view, dim = _view(piece, layout, axis, square=fmt.square)
            packed, clipped = _quantized(view, fmt, dim)
            result = dequantize(packed)
            _add_values(found[fmt.name, axis], view, result, packed, clipped)
            if fmt.block_size is not None:
                _add_blocks(found[fmt.name, axis], view, packed)
            results[axis] = _bits(result)
        if len(axes) > 1:
            errors = found[fmt.name, "row"]
            counts, totals = errors.disagreement, errors.disagreement_sum
            disagree_pairs(results["row"], results["column"], _bits(piece), counts, totals)
    for axis in axes if len(axes) > 1 else ():
        errors, row = found[fmt.name, axis], found[fmt.name, "row"]
        errors.disagreement[:] = row.disagreement[0], errors.counts.sum()
        errors.disagreement_sum[:] = row.disagreement_sum


def _pieces(tensor: Tensor, layout: MatrixView, fmt: Format) -> Iterator[Tensor]:
    """[outer, rows, columns], whole where a scale belongs to the whole tensor."""
    whole = tensor.reshape(layout.outer, layout.rows, layout.columns)
    if isinstance(fmt.scaling, (TensorScaling, TwoLevelScaling)) or whole.numel() <= PIECE:
        yield whole
        return
    size = fmt.block_size or 1
    step = max(PIECE // layout.columns // size, 1) * size
    for outer in range(layout.outer):
        for first in range(0, layout.rows, step):
            yield whole[outer : outer + 1, first : first + step]


def _view(piece: Tensor, layout: MatrixView, axis: str, *, square: bool) -> tuple[Tensor, int]:
    """The piece as the format shall see it, and the axis of its blocks. Each run of a row is on its
    own; for square blocks it is a matrix with the other rows.
    """
    if axis == "column":
        return piece, 1
    runs = piece.reshape(piece.shape[0], piece.shape[1], -1, layout.run)
    return (runs.transpose(1, 2) if square else runs), -1


def _bits(x: Tensor) -> NDArray[np.int32]:
    bits: NDArray[np.int32] = x.float().contiguous().view(torch.int32).reshape(-1).numpy()
    return bits


def _add_values(
    errors: Errors, view: Tensor, result: Tensor, packed: QuantizedTensor, clipped: Tensor
) -> None:
    """Values, what they became, with which codes, and whether they were clipped."""
    codes = packed.codes
    if packed.format.element.bits <= _NIBBLE:
        codes = unpack_nibbles(codes, packed.shape[packed.axis])
    codes = BlockLayout.of(packed.shape, packed.format, packed.axis).from_rows(codes)
    account_pairs(
        _bits(view),
        _bits(result),
        clipped.reshape(-1).numpy(),
        errors.sums,
        codes.reshape(-1).numpy(),
        errors.codes,
    )


def _quantized(view: Tensor, fmt: Format, dim: int) -> tuple[QuantizedTensor, Tensor]:
    """Return the result of `quantize`, and which values are clipped: those that would round to a
    number above the format's largest if one existed.

    Values are rounded once, to an element type that has larger numbers, and are then clipped to the
    largest number. The same random numbers therefore decide about both results.
    """
    layout, element = BlockLayout.of(tuple(view.shape), fmt, dim), fmt.element
    blocks, scales = reference.scale_down(view, fmt, layout)
    if isinstance(element, HiFloat8):
        largest, wider = math.ldexp(1, LARGEST_EXPONENT), replace(element, overflow="inf")
        bound = largest if element.overflow == "saturate" else math.inf
    else:
        assert isinstance(element, ElementFormat)
        largest, wider = element.max, replace(element, max=2 * element.max)  # type: ignore[assignment]
        bound = largest
    seed = SEED if fmt.rounding == "stochastic" else None
    rounded = reference.round_blocks(blocks, view, replace(fmt, element=wider), layout, seed)
    clipped = rounded.abs() > largest
    codes = encode(layout.from_blocks(rounded.clamp_(-bound, bound)), element)
    codes = pack_nibbles(codes) if element.bits <= _NIBBLE else codes
    packed = QuantizedTensor(codes, scales, fmt, layout.shape, layout.axis, view.dtype)
    return packed, layout.from_rows(layout.from_blocks(clipped))


def _limits(packed: QuantizedTensor) -> Tensor:
    """The largest number of the format at the place of each value, by its code and the scales."""
    element = packed.format.element
    assert not isinstance(element, Cast)
    code = encode(positive_values(element)[-1:], element)
    shape = list(packed.codes.shape)
    if element.bits <= _NIBBLE:
        code, shape[-1] = pack_nibbles(code.repeat(2)), packed.codes.shape[-1]
    return dequantize(replace(packed, codes=code.expand(shape), dtype=torch.float32))


def _add_blocks(errors: Errors, view: Tensor, packed: QuantizedTensor) -> None:
    """Scales, and the magnitudes of each block."""
    layout = BlockLayout.of(packed.shape, packed.format, packed.axis)
    stored = packed.scales.block()
    if isinstance(packed.format.scaling, GroupScaling):
        stored = stored[..., 0]
    errors.scales += np.bincount(stored.reshape(-1).numpy(), minlength=256)
    blocks = layout.to_blocks(view.float()).abs().double()
    amax = blocks.amax(-1)
    smallest = blocks.masked_fill(blocks == 0, torch.inf).amin(-1)
    limit = layout.to_blocks(_limits(packed)).amax(-1).double()
    unusual, zero = ~amax.isfinite(), amax == 0
    errors.blocks += (amax.numel(), int(zero.sum()), int(unusual.sum()))
    usual = ~unusual & ~zero
    exponents = [torch.frexp(x[usual]).exponent for x in (amax, smallest)]
    errors.block_range += np.bincount(
        (exponents[0] - exponents[1]).numpy(), minlength=len(errors.block_range)
    )
    room = torch.log2(limit[usual] / amax[usual]).numpy()
    headroom_bins(errors, room, np.ones(len(room), np.int64))
