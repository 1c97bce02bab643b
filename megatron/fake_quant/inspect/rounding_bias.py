"""Measure the bias of stochastic rounding in a format, without drawing random numbers.

If a scaled value v is rounded stochastically to an element type, the mean of the result is v. If v
is beyond the type's largest number, the result is always that number. The mean of a quantized value
is therefore its scaled value, clipped and multiplied by the scale again. The format's own code
computes all three steps exactly. Two causes make the mean differ from the value:

    clipping   the scale maps the maximum of a block beyond the largest number
    scales     multiplying by the stored scale does not undo the division, as in HiFloat4, whose
               rounded reciprocal divides

The result is stated as the gain of a product of two operands, sum(xy) / sum(x^2) - 1. Here, x are
the exact products of normally distributed values, and y are the means of the quantized products. In
a product, the errors of single values cancel, and a gain remains.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.fake_quant import reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.formats import Format

NEGLIGIBLE = 1e-6  #: gains below this magnitude are due to rounding to float32
SMALL = 2e-4  #: largest magnitude of a gain that is reported as small
_SHAPE = (512, 1024)


@dataclass(frozen=True, slots=True)
class RoundingBias:
    """Gain of a product of two stochastically rounded operands, divided among its two causes."""

    clipping: float
    scales: float

    @property
    def gain(self) -> float:
        """Total gain of the product, which is 0 if the product is right on average."""
        return self.clipping + self.scales

    @property
    def unbiased(self) -> bool:
        """True if the mean of every rounded value is the value itself, up to rounding to float32.

        Only then does the error of the mean of n products decrease as 1 / sqrt(n) for any n.
        """
        return abs(self.clipping) < NEGLIGIBLE and abs(self.scales) < NEGLIGIBLE


@functools.cache
def rounding_bias(fmt: Format) -> RoundingBias | None:
    """Return the bias of `fmt` with stochastic rounding, or None if it has no such rounding."""
    if "stochastic" not in fmt.element.roundings:
        return None
    fmt = replace(fmt, rounding="stochastic")
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout.of(_SHAPE, fmt, -1)
    blocks, scales = reference.scale_down(x, fmt, layout)
    largest = fmt.element.max
    clipped = blocks.clamp(-largest, largest) if fmt.element.saturates else blocks

    def gain(blocks: Tensor) -> float:
        mean = reference.join(blocks, scales, fmt, layout).double()
        return float((mean * x.double()).sum() / x.double().square().sum()) - 1

    of_scales, of_both = ((1 + gain(part)) ** 2 - 1 for part in (blocks, clipped))
    return RoundingBias(of_both - of_scales, of_scales)
