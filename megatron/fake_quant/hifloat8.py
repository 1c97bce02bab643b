"""Round to HiFloat8 (HiF8, arXiv 2409.16626), an 8-bit type that is most precise close to 1.

A prefix code, the "dot", gives the number of exponent bits; the remaining bits are the mantissa.
The exponent is stored as sign and magnitude. Because the magnitude's leading 1 is implied, D bits
cover the exponents +-2^(D-1) to +-(2^D - 1):

    dot    D          exponents E      mantissa bits   values in a binade
    0001   0          0                3               8
    001    1          +-1              3               8
    01     2          +-2, 3           3               8
    10     3          +-4 .. 7         2               4
    11     4          +-8 .. 15        1               2 (E = 15 has 1: 1.5 * 2^15 is Inf)
    0000   denormal   -22 .. -16       0               1 (only powers of two)

There are 126 positive finite numbers from 2^-22 to 2^15 = 32768, one zero (no -0), one NaN, +Inf
and -Inf. The numbers span 38 binades; E5M2 has 32 and E4M3 has 18. The spacing depends only on the
bit length of |E|:

    |E|          0 .. 3   4 .. 7   8 .. 15   16 and more
    spacing      2^(E-3)  2^(E-2)  2^(E-1)   2^E

That is, the spacing is 2^(E-4) times the largest power of two at or below |E|, where |E| is clamped
to the range from 2 to 16. In the bits of a float32, whose mantissa has 23 bits, one step of that
spacing is the integer 2^19 times the same power of two. `_steps` computes it.

The default rounding is the paper's TA: to nearest, ties away from zero. In terms of bits, it adds
half a step and clears the bits below a step. A carry runs into the exponent as it should, and the
first number of the next binade is always a HiFloat8 value. There are three special cases:

 *  Below 2^-22 the neighbors are zero and 2^-22, and the midpoint is 2^-23. So |x| < 2^-23 gives 0,
    and 2^-23 itself is rounded away from zero. Zero has no sign in this format: -0.0 and every
    underflow give +0.0.
 *  A magnitude of 1.25 * 2^15 = 40960 or more rounds to the code of Inf. By default the result is
    +-32768 instead (`overflow="saturate"`), also for +-Inf, as in Ascend's vector casts. With
    `overflow="inf"` it is +-Inf, which is the paper's other option and what its public simulators
    do.
 *  NaN stays NaN with both settings. (Ascend's saturating cast converts NaN to 0, which would hide
    a diverged run.)

The paper's hybrid rounding HR is TA below |E| = 4 and SR, "stochastic rounding", from there on,
where E is the exponent of x. SR draws no random number; it takes one from the low bits of x. It
rounds up when F >= T, where

    float32          F the upper 14 of the discarded bits, T the lower 14 bits of the mantissa
    float16, bf16    F the upper 2 of the discarded bits, T = 2 t + 1 (t: the mantissa's last bit)

(These are called SR14 and SR2. The mantissa is taken from x in its original dtype, so T depends on
that dtype.) For E = -23 the neighbors are 0 and 2^-22, and the discarded bits begin with the
implicit one. The paper's rule has a consequence that looks like a mistake: under SR14 an x that
*is* a HiFloat8 value has F = T = 0 and moves to the next value, for example from 16 to 20. The same
happens to all bf16 data stored as float32, so round bf16 tensors as bf16. Unlike HR, the mode
`stochastic` rounds with real random numbers, as for every other format.

The arithmetic uses integers, so neither the rounding mode of the processor nor flushing of
subnormals can affect it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.elements import HiFloat8
from megatron.fake_quant.float32_bits import (
    BIAS,
    INFINITY,
    MAGNITUDE,
    MANTISSA_BITS,
    SIGN,
    power_of_two_bits,
)
from megatron.fake_quant.random_bits import RANDOM_BITS

LARGEST_EXPONENT = 15
SMALLEST_EXPONENT = -22
#: Smallest |E|, with E the exponent of a value, for which hybrid rounding uses the value's low bits
#: (SR). For a smaller |E|, it rounds to nearest, with ties away from zero (TA).
HYBRID_FROM = 4
_LARGEST = power_of_two_bits(LARGEST_EXPONENT)
#: bits of 1.25 * 2^15, the smallest magnitude that overflows if it is rounded to nearest (TA)
_OVERFLOW = _LARGEST | 1 << (MANTISSA_BITS - 2)
_BEYOND = power_of_two_bits(LARGEST_EXPONENT + 1)  #: bits of 2^16, which always overflows
_SMALLEST = power_of_two_bits(SMALLEST_EXPONENT)
_UNITS = 1 << RANDOM_BITS
_UNITS_BELOW_SMALLEST = math.ldexp(_UNITS, -SMALLEST_EXPONENT)
_SMALLEST_NORMAL_FLOAT16 = power_of_two_bits(-14)


class Position(NamedTuple):
    """Position of each value between the nearest HiFloat8 values below and above it.

    All tensors except the mask are int32.
    """

    magnitude: Tensor  #: bits of the value's magnitude
    #: distance of the value from the HiFloat8 value below, in units of 2^-24 of the spacing
    way: Tensor
    small: Tensor  #: mask of magnitudes below 2^-22, HiFloat8's smallest positive number


def round_between_neighbors(
    x: Tensor,
    element: HiFloat8,
    goes_up: Callable[[Position, Tensor | None, torch.dtype], Tensor],
    random: Tensor | None,
    source: torch.dtype,
) -> Tensor:
    """Return a new float32 tensor with the values of float32 `x` rounded to HiFloat8.

    Args:
        x: values to round, of any shape.
        element: element type, which determines the result of an overflow.
        goes_up: rule of the rounding mode; it returns a mask of the values to round away from zero.
        random: for stochastic rounding, integers from 0 to 2^24 - 1 in the shape of `x`.
        source: dtype that `x` came from, for hybrid rounding.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    is_nan = magnitude > INFINITY
    overflow = _LARGEST if element.overflow == "saturate" else INFINITY
    magnitude.clamp_(max=min(overflow, _BEYOND))

    steps = _steps(magnitude.clamp(min=_SMALLEST))
    small = magnitude < _SMALLEST
    below = magnitude.bitwise_and(steps.neg()).masked_fill_(small, 0)
    above = (below + steps).masked_fill_(small, _SMALLEST)
    way = ((magnitude - below) * (_UNITS // steps)).masked_fill_(small, 0)
    way += torch.where(small, magnitude, 0).view(torch.float32).mul_(_UNITS_BELOW_SMALLEST).int()

    up = goes_up(Position(magnitude, way, small), random, source)
    rounded = torch.where(up, above, below)
    rounded.masked_fill_(rounded > _LARGEST, overflow)

    sign = (bits & SIGN).masked_fill_(rounded == 0, 0)
    return rounded.bitwise_or_(sign).view(torch.float32).masked_fill_(is_nan, torch.nan)


def nearest_up(position: Position, random: Tensor | None, source: torch.dtype) -> Tensor:
    """Return a mask of the values at or above the midpoint, which TA (ties away) rounds up."""
    return position.way >= _UNITS // 2


def stochastic_up(position: Position, random: Tensor | None, source: torch.dtype) -> Tensor:
    """Return a random mask of the values that stochastic rounding rounds up.

    The probability of rounding up is the distance from the neighbor below, divided by the spacing.
    """
    assert random is not None
    return position.way > random


def hybrid_up(position: Position, random: Tensor | None, source: torch.dtype) -> Tensor:
    """Return a mask of the values that hybrid rounding (HR) rounds up.

    TA decides for values with |E| < 4, and SR for values with |E| >= 4.
    """
    magnitude, _, small = position
    up = nearest_up(position, random, source)
    # At both ends of the range, the low bits do not matter: values below 2^-23 become zero, and
    # values from 40960 on overflow.
    by_low_bits = _low_bits_up(position, source) & (up | ~small)
    by_low_bits |= magnitude >= _OVERFLOW
    uses_low_bits = ((magnitude >> MANTISSA_BITS) - BIAS).abs_() >= HYBRID_FROM
    return torch.where(uses_low_bits, by_low_bits, up)


def _low_bits_up(position: Position, source: torch.dtype) -> Tensor:
    """Return a mask of the values that hybrid rounding rounds up according to their low bits.

    The rule is SR14 for a float32 source and SR2 for other sources; see the module's docstring.
    """
    magnitude, way, _ = position
    if source == torch.float32:
        threshold = magnitude & ((1 << 14) - 1)
        return way >> (RANDOM_BITS - 14) >= threshold
    last = magnitude >> (16 if source == torch.bfloat16 else 13) & 1
    if source == torch.float16:
        # The last bit of a float16 subnormal is worth 2^-24, whatever the exponent of its value.
        small = magnitude < _SMALLEST_NORMAL_FLOAT16
        subnormals = torch.where(small, magnitude, 0).view(torch.float32)
        last = torch.where(small, subnormals.mul_(1 << 24).int() & 1, last)
    return way >> (RANDOM_BITS - 2) >= 2 * last + 1


def _steps(magnitude: Tensor) -> Tensor:
    """Return HiFloat8's spacing at each magnitude, in units of the last bit of a float32.

    `magnitude` holds float32 bits; the result is int32.
    """
    distance = ((magnitude >> MANTISSA_BITS) - BIAS).abs_().float().clamp_(2, 16)
    power = distance.view(torch.int32).bitwise_and_(INFINITY).view(torch.float32)
    return power.mul_(1 << (MANTISSA_BITS - 4)).int()
