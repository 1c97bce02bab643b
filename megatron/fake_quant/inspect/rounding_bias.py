"""Measure the bias of random rounding in a format, without drawing random numbers.

If a scaled value v is rounded stochastically to an element type, the mean of the result is v. If v
is beyond the type's largest number, the result is always that number. The mean of a quantized value
is therefore its scaled value, clipped and multiplied by the scale again. The format's own code
computes all three steps exactly. Two causes make the mean differ from the value:

    clipping   the scale maps the maximum of a block beyond the largest number
    scales     multiplying by the stored scale does not undo the division, as in HiFloat4, which
               divides by multiplying by a rounded reciprocal

MS-EDEN rounds the values to nearest and its scales at random, so the mean of a value is its rounded
value times the mean of its scale. The bias is that of a tensor of normal values, which random
rotations approximate. It is not zero, because blocks with different scales share a correction.

The result is stated as the gain of a product of two operands, sum(xy) / sum(x^2) - 1. Here, x are
the exact products of normally distributed values, and y are the means of the quantized products. In
a product, the errors of single values cancel, and a gain remains.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.fake_quant import eden, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.code_points import decode
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_table import number
from megatron.fake_quant.scalings.float8_types import FLOAT8

NEGLIGIBLE = 1e-6  #: gains below this magnitude are due to rounding to float32
SMALL = 2e-4  #: largest magnitude of a gain that is reported as small
_SHAPE = (512, 1024)
#: relative error of a scaled block maximum, due to a few roundings to float32
_FLOAT32_ERROR = 2.0**-20
_FEW = 4096  #: number of blocks below which their maxima do not cover a binade closely enough
#: factors by which normal values are multiplied if there are few blocks; they move the maxima of
#: the blocks through a binade
_FACTORS = tuple(2 ** (i / 8) for i in range(8))
#: size of the blocks that replace larger ones in the search for values that clip
_SMALL_BLOCK = 16


@dataclass(frozen=True, slots=True)
class RoundingBias:
    """Gain of a product of two randomly rounded operands, split by cause."""

    clipping: float
    scales: float
    correction: float = 0.0  #: gain from MS-EDEN's correction of the scales
    #: True if a block's maximum can be scaled beyond the largest number, however rarely
    clips: bool = False

    @property
    def gain(self) -> float:
        """Total gain of the product, which is 0 if the product is right on average."""
        return self.clipping + self.scales + self.correction

    @property
    def unbiased(self) -> bool:
        """True if the mean of every rounded value is the value itself, up to rounding to float32.

        Only then does the error of the mean of n products decrease as 1 / sqrt(n) for any n.
        """
        parts = (self.clipping, self.scales, self.correction)
        return not self.clips and all(abs(part) < NEGLIGIBLE for part in parts)


@functools.cache
def rounding_bias(fmt: Format) -> RoundingBias | None:
    """Return the bias of MS-EDEN rounding if `fmt` uses it, otherwise that of stochastic rounding.

    The result is None if the format has no stochastic rounding.
    """
    if "stochastic" not in fmt.roundings:
        return None
    fmt = fmt.with_own_amax()
    if not fmt.corrects_scales:
        fmt = replace(fmt, rounding="stochastic")
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    factors = _FACTORS if _has_few_blocks(fmt, _SHAPE) else (1.0,)
    gains = torch.tensor(
        [operand_gains(fmt, x * factor) for factor in factors], dtype=torch.float64
    )
    of_scales, of_both = ((1 + gains.mean(0)) ** 2 - 1).tolist()
    if fmt.corrects_scales:
        return RoundingBias(0.0, of_scales, of_both - of_scales)
    return RoundingBias(of_both - of_scales, of_scales, clips=clips(fmt, x))


def clips(fmt: Format, x: Tensor) -> bool:
    """Return whether any value of `x` clips by more than what float32 rounding errors explain.

    Whether a value clips depends on the position of a block's maximum within a binade. If `x` has
    too few blocks to cover a binade, smaller blocks with the same scale rule replace them.

    Args:
        fmt: format with stochastic rounding.
        x: float32 matrix, with blocks along its last axis.
    """
    if _has_few_blocks(fmt, tuple(x.shape)):
        assert isinstance(fmt.scaling, BlockScaling)
        fmt = replace(fmt, scaling=replace(fmt.scaling, size=_SMALL_BLOCK, height=1))
    layout = BlockLayout.of(tuple(x.shape), fmt, -1)
    blocks, scales = reference.scale_down(x, fmt, layout)
    largest = reference.choose(
        [blocks.new_tensor(element.max) for element in fmt.elements], fmt, scales
    )
    return bool((blocks.abs() > largest * (1 + _FLOAT32_ERROR)).any())


def _has_few_blocks(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Return whether a matrix has too few blocks for their maxima to cover a binade.

    Outer scales of a given number of values are left out, because they need many blocks.
    """
    scaling = fmt.scaling
    if not isinstance(scaling, BlockScaling) or scaling.outer_size not in (None, WHOLE_AXIS):
        return False
    rows, columns = min(scaling.height, shape[-2]), min(scaling.size, shape[-1])
    return shape[-2] * shape[-1] < _FEW * rows * columns


def limits(fmt: Format) -> str:
    """Return the end of a sentence that states the limits within which a format is unbiased.

    8-bit floating-point scales are too coarse for blocks whose scale is subnormal, and too small
    for blocks beyond their range. The values of such blocks clip. A result that is rounded to
    bfloat16 is off by up to 2^-9, and all results with the same scale may be off in one direction.
    The text is empty for powers of two, which have the range and the precision of float32.
    """
    scaling = fmt.scaling
    if scaling is None:
        return f"; for magnitudes up to {number(fmt.element.max)}"
    text = ""
    if isinstance(scaling, BlockScaling) and scaling.scale in FLOAT8:
        kind = FLOAT8[scaling.scale]
        low, high = number(kind.element.smallest_normal), number(kind.element.max)
        subnormal = kind.lowest < kind.element.smallest_normal
        if scaling.outer == "none":
            text = f"; for blocks with a scale from {low} to {high}"
        elif subnormal:
            text = f"; for blocks with a scale of at least {low}"
    exact = isinstance(scaling, BlockScaling) and (scaling.scale, scaling.headroom) == ("e8m0", "1")
    return text if exact else f"{text}; rounding results to bfloat16 can add up to 0.2 %"


def operand_gains(fmt: Format, x: Tensor) -> tuple[float, float]:
    """Return two gains of `x`: from its scales alone, and from scales and random rounding together.

    Args:
        fmt: format with a random rounding mode.
        x: float32 matrix, with blocks along its last axis.
    """
    layout = BlockLayout.of(tuple(x.shape), fmt, -1)
    blocks, scales = reference.scale_down(x, fmt, layout)

    def gain(blocks: Tensor) -> float:
        mean = reference.join(blocks, scales, fmt, layout).double()
        return float((mean * x.double()).sum() / x.double().square().sum()) - 1

    if fmt.corrects_scales:
        rounded = reference.round_blocks(blocks, x, fmt, layout, None)
        stored = decode(scales.block(), E4M3)
        mean_scales = eden.corrected_values(blocks, rounded, scales).clamp(max=E4M3.max)
        return gain(blocks), gain(rounded * (mean_scales / stored).unsqueeze(-1))
    parts = [
        blocks.clamp(-element.max, element.max) if element.saturates else blocks
        for element in fmt.elements
    ]
    return gain(blocks), gain(reference.choose(parts, fmt, scales))
