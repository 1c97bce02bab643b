"""Measure errors value by value, for formats whose values cannot be counted by scale class.

In these formats, the result for a value depends on more than the value and one scale code: rounding
is random, each row has a scale of its own, or there are three levels of scales (HiFloat4).
`fake_quant.reference` quantizes the values, and each value is compared with its result. This is at
least ten times slower than counting values. Stochastic rounding uses a fixed seed, so that the
results are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats.errors import Errors, FormatErrors, headroom_bins
from megatron.analysis.stats.format_groups import axes_of
from megatron.analysis.stats.kernels.error_sums import account_pairs, compare_pairs
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant import dequantize, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.code_points import encode, pack_nibbles, unpack_nibbles
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_properties import positive_values
from megatron.fake_quant.packing import QuantizedTensor
from megatron.fake_quant.scalings import histogram_bytes

SEED = 20240916  #: seed of stochastic rounding
#: Number of values per chunk; `fake_quant.reference` needs about 50 bytes per value.
PIECE = 1 << 20
_NIBBLE = 4  #: number of bits in a nibble


def measure_sampled(
    tensor: Tensor, matrix: MatrixView, fmt: Format, all_errors: FormatErrors
) -> None:
    """Quantize a nonempty tensor, and add the errors to `all_errors`."""
    axes = axes_of(fmt)
    for piece in _pieces(tensor, matrix, fmt):
        results = {}
        for axis in axes:
            operand, dim = _operand(piece, matrix, axis, tall=fmt.height > 1)
            packed, clipped = _quantized(operand, fmt, dim)
            result = dequantize(packed)
            _add_values(all_errors[fmt.name, axis], operand, result, packed, clipped)
            if fmt.block_size is not None:
                _add_blocks(all_errors[fmt.name, axis], operand, packed)
            results[axis] = _bits(result)
        if len(axes) > 1:
            errors = all_errors[fmt.name, "row"]
            counts, totals = errors.disagreement, errors.disagreement_sum
            compare_pairs(results["row"], results["column"], _bits(piece), counts, totals)
    for axis in axes if len(axes) > 1 else ():
        errors, row = all_errors[fmt.name, axis], all_errors[fmt.name, "row"]
        errors.disagreement[:] = row.disagreement[0], errors.counts.sum()
        errors.disagreement_sum[:] = row.disagreement_sum


def _pieces(tensor: Tensor, matrix: MatrixView, fmt: Format) -> Iterator[Tensor]:
    """Yield chunks of a tensor; blocks, and sets of blocks with a common outer scale, stay whole.

    Each chunk has the shape [outer, rows, columns]. If a scale applies to the tensor or to a whole
    axis, the only chunk is the tensor.
    """
    whole = tensor.reshape(matrix.outer, matrix.rows, matrix.columns)
    size = math.lcm(fmt.block_size or 1, fmt.outer_size or 1, fmt.height)
    if fmt.has_tensor_scale or size >= WHOLE_AXIS or whole.numel() <= PIECE:
        yield whole
        return
    step = max(PIECE // matrix.columns // size, 1) * size
    for outer in range(matrix.outer):
        for first in range(0, matrix.rows, step):
            yield whole[outer : outer + 1, first : first + step]


def _operand(piece: Tensor, matrix: MatrixView, axis: str, *, tall: bool) -> tuple[Tensor, int]:
    """Return a chunk, reshaped for quantization, and the dimension along which its blocks run.

    For blocks along rows, the last dimension of the view is a run. For blocks of several rows,
    the last two dimensions are the rows and a run.
    """
    if axis == "column":
        return piece, 1
    runs = piece.reshape(piece.shape[0], piece.shape[1], -1, matrix.run)
    return (runs.transpose(1, 2) if tall else runs), -1


def _bits(x: Tensor) -> NDArray[np.int32]:
    bits: NDArray[np.int32] = x.float().contiguous().view(torch.int32).reshape(-1).numpy()
    return bits


def _add_values(
    errors: Errors, operand: Tensor, result: Tensor, packed: QuantizedTensor, clipped: Tensor
) -> None:
    """Add a quantized chunk's errors, and its counts of codes and clipped values, to `errors`."""
    codes = packed.codes
    if packed.format.element.bits <= _NIBBLE:
        codes = unpack_nibbles(codes, packed.shape[packed.axis])
    codes = BlockLayout.of(packed.shape, packed.format, packed.axis).from_rows(codes)
    account_pairs(
        _bits(operand),
        _bits(result),
        clipped.reshape(-1).numpy(),
        errors.sums,
        codes.reshape(-1).numpy(),
        errors.codes,
    )


def _quantized(operand: Tensor, fmt: Format, dim: int) -> tuple[QuantizedTensor, Tensor]:
    """Quantize an operand, and determine which of its values are clipped.

    A value is clipped if, with an unbounded exponent range, it would round to more than the largest
    number of the format. Values are rounded once, to an element type that has larger numbers, and
    are then clipped to the largest number. Both results therefore use the same random numbers.

    Returns:
        The same tensor as `quantize`, and a mask of the clipped values.
    """
    layout = BlockLayout.of(tuple(operand.shape), fmt, dim)
    blocks, scales = reference.scale_down(operand, fmt, layout)
    seed = SEED if fmt.stochastic else None
    all_elements, all_codes, all_clipped = [], [], []
    for element in fmt.elements:
        assert not element.is_cast
        bound = element.max if element.saturates else math.inf
        rounded = reference.round_blocks(blocks, operand, fmt, layout, seed, element=element.wider)
        all_clipped.append(rounded.abs() > element.max)
        all_elements.append(rounded.clamp_(-bound, bound))
        all_codes.append(encode(rounded, element))
    clipped = reference.choose(all_clipped, fmt, scales)
    codes = layout.from_blocks(reference.choose(all_codes, fmt, scales))
    codes = pack_nibbles(codes) if fmt.element.bits <= _NIBBLE else codes
    rounded = reference.choose(all_elements, fmt, scales)
    scales = reference.final_scales(scales, blocks, rounded, fmt, seed)
    packed = QuantizedTensor(codes, scales, fmt, layout.shape, layout.axis, operand.dtype)
    return packed, layout.from_rows(layout.from_blocks(clipped))


def _limits(packed: QuantizedTensor) -> Tensor:
    """Return the largest number that the format can represent at each position of a tensor.

    The number depends on the scales that apply to the position.
    """
    element = packed.format.element
    assert not element.is_cast
    code = encode(positive_values(element)[-1:], element)
    shape = list(packed.codes.shape)
    if element.bits <= _NIBBLE:
        code, shape[-1] = pack_nibbles(code.repeat(2)), packed.codes.shape[-1]
    return dequantize(replace(packed, codes=code.expand(shape), dtype=torch.float32))


def _add_blocks(errors: Errors, operand: Tensor, packed: QuantizedTensor) -> None:
    """Add the scales, dynamic ranges and headroom of the blocks to `errors`."""
    layout = BlockLayout.of(packed.shape, packed.format, packed.axis)
    assert packed.format.scaling is not None
    stored = histogram_bytes(packed.scales.block(), packed.format.scaling)
    errors.scales += np.bincount(stored.reshape(-1).numpy(), minlength=256)
    blocks = layout.to_blocks(operand.float()).abs().double()
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
