"""HiFloat8 (HiF8, arXiv 2409.16626): one byte whose precision tapers off with the distance from 1.

A prefix code, the "dot", says how many bits the exponent takes; the mantissa gets what is left. The
exponent is stored as sign and magnitude, and as the magnitude's leading 1 is implied, D bits reach
the exponents +-2^(D-1) to +-(2^D - 1):

    dot    D          exponents E      mantissa bits   values in a binade
    0001   0          0                3               8
    001    1          +-1              3               8
    01     2          +-2, 3           3               8
    10     3          +-4 .. 7         2               4
    11     4          +-8 .. 15        1               2 (E = 15 has 1: 1.5 * 2^15 is Inf)
    0000   denormal   -22 .. -16       0               1 (only powers of two)

So there are 126 positive finite numbers from 2^-22 to 2^15 = 32768, one zero (no -0), one NaN, +Inf
and -Inf; 38 binades where E5M2 has 32 and E4M3 has 18. Read downwards, the table says that the
spacing depends on the bit length of |E| alone:

    |E|          0 .. 3   4 .. 7   8 .. 15   16 and more
    spacing      2^(E-3)  2^(E-2)  2^(E-1)   2^E

that is, the spacing is 2^(E-4) times the largest power of two at or below |E|, where |E| counts as
at least 2 and at most 16. In the bits of a float32, whose mantissa has 23 bits, one step of that
spacing is the integer 2^19 times the same power of two. `_steps` computes it.

Rounding is the paper's TA: to nearest, ties away from zero. In bits, add half a step and clear what
lies below a step; a carry runs into the exponent as it should, and the first number of the next
binade is always a HiFloat8 value. Three places differ:

 *  Below 2^-22 the only neighbor is zero and half-way is 2^-23. So |x| < 2^-23 gives 0, and 2^-23
    itself goes away from zero. Zero has no sign in this format: -0.0 and all that underflows give
    +0.0.
 *  From 1.25 * 2^15 = 40960 on a value rounds to the code of Inf. By default it becomes +-32768
    instead (`overflow="saturate"`), and so do +-Inf, as in Ascend's vector casts. `overflow="inf"`
    gives Inf, the paper's other option and what its public simulators do.
 *  NaN stays NaN in both. (Ascend's saturating cast makes it 0, which would hide a diverged run.)

The stochastic and hybrid roundings of the paper (SR, HR) are not here: the paper trains language
models with TA alone. Nor is a tensor scale: the paper casts activations, weights and gradients
directly. The work is done on integers, so neither the rounding mode of the machine nor flushing of
subnormals can touch it.
"""

import torch
from torch import Tensor

from megatron.fake_quant.element import (
    BIAS,
    INFINITY,
    MAGNITUDE,
    MANTISSA_BITS,
    SIGN,
    power_of_two_bits,
)
from megatron.fake_quant.formats import HiFloat8

LARGEST_EXPONENT = 15
SMALLEST_EXPONENT = -22
_LARGEST = power_of_two_bits(LARGEST_EXPONENT)
_SMALLEST = power_of_two_bits(SMALLEST_EXPONENT)
_HALF_SMALLEST = power_of_two_bits(SMALLEST_EXPONENT - 1)


def round_to_hifloat8(x: Tensor, element: HiFloat8) -> Tensor:
    """Round float32 `x` of any shape to HiFloat8 values, in a new float32 tensor."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    is_nan = magnitude > INFINITY
    is_zero = magnitude < _HALF_SMALLEST
    largest = _LARGEST if element.overflow == "saturate" else INFINITY
    magnitude.clamp_(_SMALLEST, largest)

    steps = _steps(magnitude)
    magnitude.add_(steps >> 1).bitwise_and_(steps.neg_())
    if element.overflow == "inf":
        magnitude.masked_fill_(magnitude > _LARGEST, INFINITY)

    magnitude.bitwise_or_(bits & SIGN).masked_fill_(is_zero, 0)
    return magnitude.view(torch.float32).masked_fill_(is_nan, torch.nan)


def _steps(magnitude: Tensor) -> Tensor:
    """Spacing of HiFloat8 at float32 bit patterns, in units of their last bit, as int32."""
    distance = ((magnitude >> MANTISSA_BITS) - BIAS).abs_().float().clamp_(2, 16)
    power = distance.view(torch.int32).bitwise_and_(INFINITY).view(torch.float32)
    return power.mul_(1 << (MANTISSA_BITS - 4)).int()
