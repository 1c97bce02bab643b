"""Exact arithmetic on single float64 numbers, for the CPU kernels that sum dot products.

A number is truncated to a multiple of 2^e by multiplying it by 2^-e, removing the fraction, and
multiplying it by 2^e. NaN and Inf need no special code.
"""

from typing import Any, NamedTuple

import numpy as np

from megatron.fake_quant.accumulate.accumulator import ZERO_EXPONENT
from megatron.fake_quant.fused.numba_compile import called

ZERO = np.int16(ZERO_EXPONENT)
#: Exponents that stand for Inf and NaN in elements and in sums.
INFINITE_ELEMENT, INFINITE_SUM = 128, 600


class Kept(NamedTuple):
    """Number type of a sum."""

    mantissa: int  #: number of stored mantissa bits
    smallest: int  #: exponent of the smallest normal number
    limit: float  #: power of two at which the sum overflows
    nearest: bool  #: True to round to nearest even, False to round toward zero


# LLVM inlines the following functions into loops. If numba inlined them, compilation would take a
# third longer.


@called
def power(exponent: Any) -> Any:
    """Return 2^exponent for exponents from -1022 to 1023."""
    return np.int64(np.int64(exponent + 1023) << 52).view(np.float64)


@called
def exponent_field(x: Any) -> Any:
    """Return the exponent of a normal float64 number; 0 has -1023, and Inf and NaN have 1024."""
    return np.int64((np.float64(x).view(np.int64) >> 52) & 2047) - 1023


@called
def exponent(x: Any, smallest: Any) -> Any:
    """Return the exponent of an element, a scale or a running sum."""
    bounded = min(max(exponent_field(x), smallest), INFINITE_SUM)
    return np.int16(bounded) if x != 0 else ZERO


@called
def rounded(value: Any, kept: Any) -> Any:
    """Return a number, rounded to the number type of a sum; see `scalar._rounded`."""
    bounded = min(max(exponent_field(value), kept.smallest), INFINITE_SUM)
    scaled = value * power(kept.mantissa - bounded)
    whole = np.rint(scaled) if kept.nearest else np.trunc(scaled)
    result = whole * power(bounded - kept.mantissa)
    return result if abs(result) < kept.limit else result * np.inf


@called
def sum_to_odd(x: Any, y: Any) -> Any:
    """Return x + y; round an inexact sum to the neighboring number whose last bit is 1.

    Rounding the result to at most 51 bits is the same as rounding the exact sum.
    """
    total = x + y
    other = total - x
    error = (x - (total - other)) + (y - other)
    bits = np.float64(total).view(np.int64)
    away = np.int64(1) if (error > 0) == (total > 0) else np.int64(-1)
    # The error of a sum that is Inf or NaN is NaN.
    inexact = abs(error) > 0 and bits & 1 == 0
    return np.int64(bits + away if inexact else bits).view(np.float64)
