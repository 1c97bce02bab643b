"""Launch the GPU kernel that sums dot products as matrix units do.

Tests treat the kernels like those of `triton_launch.py`.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import (
    OVERFLOW_EXPONENT,
    ZERO_EXPONENT,
    Accumulator,
    SumType,
)
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.float32_bits import BIAS, INFINITY
from megatron.fake_quant.fused import triton_accumulate
from megatron.fake_quant.fused.triton_accumulate import SCALE_BITS

TILE = 512  #: number of results per program
#: Smallest and largest number of columns of a tile. With 128 columns, Triton gives each thread all
#: four rows and one column, so that a thread loads five numbers for four products of a step.
NARROWEST, WIDEST = 64, 128
WARPS = 4
#: Largest number of mantissa bits of an element: in hardware units, and in research accumulators.
_NARROW, _WIDE = 10, 23
_LARGE = 2.0 ** (OVERFLOW_EXPONENT // 2)  #: products of smaller elements do not overflow
#: Smallest and largest magnitude of nonzero elements that `triton_accumulate.near_step` accepts.
NEAR = 2.0**-48, 2.0**60
_NEAR_BITS = 28  #: largest number of fractional bits with which a term fits into an int32 number
#: Bits of a float32 number that are zero if it has at most `_NARROW` mantissa bits.
_LOW_BITS = (1 << (23 - _NARROW)) - 1


def multiply(
    a: UnitOperand, b: UnitOperand, accumulator: Accumulator, *, start: Tensor | None = None
) -> Tensor:
    """Return A B^T + `start`, `[batch, M, N]`, for operands `[batch, M, K]` and `[batch, N, K]`.

    The result is that of `accumulate/reference.py`, bit for bit.
    """
    batches, rows, depth = a.elements.shape
    columns = b.elements.shape[1]
    out = a.elements.new_empty(batches, rows, columns)
    if start is not None:
        out.copy_(start)
    if out.numel() == 0 or depth == 0:
        return out.zero_() if start is None else out
    sides = [_side(operand, accumulator) for operand in (a, b)]
    powers = [side[0] for side in sides]
    if _has_near_step(accumulator):
        powers = [
            _powers(side[0], x.smallest_exponent) for side, x in zip(sides, (a, b), strict=True)
        ]
    tile_n = min(max(triton.next_power_of_2(columns), NARROWEST), WIDEST)
    tile_m = TILE // tile_n
    programs = batches * -(-rows // tile_m) * -(-columns // tile_n)
    (elements_a, *others_a), (elements_b, *others_b) = sides
    others = [tensor for pair in zip(others_a, others_b, strict=True) for tensor in pair]
    numbers = (rows, columns, depth, others_a[1].shape[1])
    with torch.cuda.device(out.get_device()):
        # If there are two launches, each computes the tiles that the other one skips.
        for kernel in kernels(accumulator):
            triton_accumulate.sums[(programs, 1, 1)](
                elements_a,
                elements_b,
                *powers,
                *others,
                out,
                *numbers,
                a.smallest_exponent,
                b.smallest_exponent,
                CONTINUED=start is not None,
                TILE_M=tile_m,
                TILE_N=tile_n,
                **kernel,
                **constants(accumulator),
                **OPTIONS,
            )
    return out


#: FP fusion would merge a product and a sum into one operation with one rounding.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}


def constants(accumulator: Accumulator) -> dict[str, Any]:
    """Return the kernel's compile-time arguments for an accumulator."""
    chained = accumulator.align_bits is None
    kept = _sum_type(accumulator.keep)
    second = {f"SECOND_{name}": x for name, x in _sum_type(accumulator.promote_to).items()}
    return {
        "DESIGN": "chained" if chained else accumulator.design,
        "STEP": accumulator.step,
        "PARTS": accumulator.interleave,
        "ALIGN": accumulator.align_bits or 0,
        "BITS": _NARROW if accumulator.elements else _WIDE,
        "SCALES": accumulator.scales,
        "BLOCK": accumulator.scale_block or 1,
        **kept,
        **second,
    }


def kernels(accumulator: Accumulator) -> list[dict[str, bool]]:
    """Return the compile-time arguments in which the kernels for an accumulator differ."""
    if _has_near_step(accumulator):
        return [{"NEAR": True, "FAR": False}, {"NEAR": False, "FAR": True}]
    return [{"NEAR": True, "FAR": True}]


def _has_near_step(accumulator: Accumulator) -> bool:
    """Return whether `near_step` computes an accumulator's steps in tiles without far elements."""
    align = accumulator.align_bits
    return (
        accumulator.design == "fused"
        and align is not None
        and align <= _NEAR_BITS
        and accumulator.scales != "exponents"
    )


def _sum_type(kept: SumType) -> dict[str, Any]:
    if kept.rounding not in ("rz", "rne"):
        raise AssertionError(f"no rule for the rounding {kept.rounding!r}")
    return {
        "MANTISSA": kept.mantissa_bits,
        "SMALLEST": kept.smallest_exponent,
        "LARGEST": kept.largest_exponent,
        "NEAREST": kept.rounding == "rne",
    }


def _side(operand: UnitOperand, accumulator: Accumulator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the kernel's arguments for one operand: elements, flags, scales and shifts."""
    elements, scales = operand.elements.detach(), operand.scales
    batches, rows, depth = elements.shape
    shifts = elements.new_zeros(1, 1, 1, dtype=torch.int32)
    if accumulator.scales == "after":
        scales = elements.new_ones(1, 1, 1)
    else:
        assert accumulator.scale_block is not None, accumulator.name
        if scales is None:
            scales = elements.new_ones(batches, rows, -(-depth // accumulator.scale_block))
        if accumulator.scales != "promotion":
            scale = scales.repeat_interleave(accumulator.scale_block, -1)[..., :depth]
            lost = ~scale.isfinite() | ((scale == 0) & elements.isinf())
            elements = elements.masked_fill(lost, torch.nan)
            scales, shifts = _split(scales, accumulator.smallest_scale)
            shifts = shifts.transpose(1, 2).contiguous()
        scales = scales.transpose(1, 2).contiguous()
    columns = torch.nn.functional.pad(elements, (0, -depth % accumulator.step)).transpose(1, 2)
    return columns.contiguous(), _flags(elements), scales, shifts


def _powers(elements: Tensor, smallest: int) -> Tensor:
    """Return 2^e for the exponent e of each element, and 0 for a zero."""
    exponents = (elements.view(torch.int32) & INFINITY).clamp(min=(smallest + BIAS) << 23)
    return exponents.masked_fill_(elements == 0, 0).view(torch.float32)


def _flags(elements: Tensor) -> Tensor:
    """Return the argument `flags` of the kernel for one operand, `[batch, M]`.

    `near_step` does not accept elements with more than `_NARROW` mantissa bits either, because
    their products would be rounded.
    """
    magnitudes = elements.abs()
    finite = magnitudes < _LARGE  # False for NaN, too
    far = (magnitudes > NEAR[1]) | ((magnitudes < NEAR[0]) & (magnitudes > 0))
    far |= (elements.view(torch.int32) & _LOW_BITS) != 0
    return torch.where(finite.all(-1), far.any(-1).to(torch.int32), 2).to(torch.int32)


def _split(scales: Tensor, smallest: int) -> tuple[Tensor, Tensor]:
    """Return two int32 results for scales: significands times 2^SCALE_BITS, and exponents."""
    scales = torch.where(scales.isfinite(), scales, 0.0)
    exponents = (torch.frexp(scales).exponent - 1).clamp(min=smallest)
    significands = torch.ldexp(scales.double(), SCALE_BITS.value - exponents).to(torch.int32)
    return significands, torch.where(scales == 0, ZERO_EXPONENT, exponents).to(torch.int32)
