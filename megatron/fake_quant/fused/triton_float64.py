"""Exact arithmetic on numbers, for the GPU kernel that sums dot products.

This is the counterpart of `numba_float64.py`. float32 numbers are taken apart into integers and
exponents, and float64 numbers are rounded. Only `sum_to_odd` needs operations that are not fused.
"""

import triton.language as tl

from megatron.fake_quant.fused.triton_bits import INFINITY, MAGNITUDE, as_bits, compiled
from megatron.fake_quant.fused.triton_scales import FRACTION, SMALLEST_NORMAL

FLOAT32_BITS = tl.constexpr(23)  #: fractional bits of a float32 significand


@compiled
def power(exponent: tl.tensor) -> tl.tensor:
    """Return 2^exponent in float64, for exponents from -1022 to 1023."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@compiled
def undefined(x: tl.tensor) -> tl.tensor:
    """Return whether float32 numbers are NaN or Inf."""
    return (as_bits(x) & MAGNITUDE) >= INFINITY


@compiled
def decode(x: tl.tensor, smallest: tl.tensor, BITS: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """Return two results for float32 numbers: significands times 2^BITS, and exponents.

    smallest: exponent of the smallest normal number of their type.
    ZERO: exponent of zero.
    """
    bits = as_bits(x)
    magnitude = bits & MAGNITUDE
    own = tl.maximum(magnitude >> 23, 1) - 127
    exponent = tl.maximum(own, smallest)
    whole = (magnitude & FRACTION) | tl.where(magnitude >= SMALLEST_NORMAL, SMALLEST_NORMAL, 0)
    significand = whole >> tl.minimum(exponent - own + (FLOAT32_BITS - BITS), 31)
    exponent = tl.where(magnitude == 0, ZERO, exponent)
    return tl.where(bits < 0, -significand, significand), exponent


@compiled
def truncated(number: tl.tensor, shift: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """Divide integers by 2^shift, rounding toward zero.

    LAST: number of bits of the integers, minus 1.
    """
    magnitude = tl.abs(number) >> tl.minimum(shift, LAST).to(number.dtype)
    return tl.where(number < 0, -magnitude, magnitude)


@compiled
def floored(number: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Divide int64 numbers by 2^shift, rounding down."""
    return number >> tl.minimum(shift, 63).to(tl.int64)


@compiled
def rounded(
    value: tl.tensor,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    NEAREST: tl.constexpr,
) -> tl.tensor:
    """Round finite float64 numbers to the number type of a sum and return them in float32."""
    magnitude = tl.abs(value)
    field = (magnitude.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
    exponent = tl.maximum(field, SMALLEST)
    scaled = magnitude * power(MANTISSA - exponent)
    whole = scaled.to(tl.int64)
    if NEAREST:
        rest = scaled - whole.to(tl.float64)
        up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
        whole += tl.where(up, 1, 0)
    result = whole.to(tl.float64) * power(exponent - MANTISSA)
    overflow = result >= power(tl.full([], LARGEST + 1, tl.int32))
    result = tl.where(overflow, float("inf"), result)
    negative = value.to(tl.int64, bitcast=True) < 0
    # Triton computes -x as 0 - x, which would turn a negative zero into a positive one.
    return tl.where(negative, result * -1.0, result).to(tl.float32)


@compiled
def sum_to_odd(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Return x + y in float64, rounded to odd; see `numba_float64.sum_to_odd`."""
    total = x + y
    other = total - x
    error = (x - (total - other)) + (y - other)
    bits = total.to(tl.int64, bitcast=True)
    away = tl.where((error > 0) == (total > 0), 1, -1)
    inexact = (tl.abs(error) > 0) & ((bits & 1) == 0)
    return tl.where(inexact, bits + away, bits).to(tl.float64, bitcast=True)
