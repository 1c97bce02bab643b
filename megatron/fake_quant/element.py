"""Rounding to an element format, and powers of two that are exact.

Everything works on the bits of float32: `log2` and `pow` are off by one near powers of two on some
machine or other, and a number format is nothing but its behaviour there.
"""

import torch
from torch import Tensor

from megatron.fake_quant.formats import ElementFormat

MANTISSA_BITS = 23
BIAS = 127
SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000  #: its bits, and also the mask that keeps the exponent


def power_of_two_bits(exponent: int) -> int:
    """Bits of the float32 2^exponent, for exponents of normal numbers: -126 to 127."""
    return (exponent + BIAS) << MANTISSA_BITS


def round_to(x: Tensor, element: ElementFormat) -> Tensor:
    """Round float32 `x` to the nearest value of `element`: ties to even, NaN stays.

    A new tensor of any shape; what is beyond the largest number saturates, Inf too. Clearing the
    mantissa of a float leaves the power of two at or below it; held between `emin` and `emax` and
    divided by 2^mantissa_bits it is the spacing of the element's values there. (A float32 subnormal
    loses all its bits and is lifted to `emin` like everything small.) Dividing by a power of two is
    exact, so `round` is the only rounding.
    """
    ulp_bits = x.view(torch.int32) & INFINITY
    ulp_bits.clamp_(power_of_two_bits(element.emin), power_of_two_bits(element.emax))
    ulp_bits.sub_(element.mantissa_bits << MANTISSA_BITS)
    ulp = ulp_bits.view(torch.float32)
    rounded = torch.div(x, ulp).round_().mul_(ulp).clamp_(-element.max, element.max)
    return rounded if element.negative_zero else rounded.masked_fill_(rounded == 0, 0.0)
