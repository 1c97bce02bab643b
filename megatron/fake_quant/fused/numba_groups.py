"""CPU kernels for HiFloat4, whose groups of 64 values have three levels of scales.

`hifloat4.py` computes in float64, where its products are exact. The kernels compute in int32, so
that a vector register holds twice as many values. Their results are equal bit for bit:

- A product with the rounded reciprocal R of a scale has at most 24 + 8 bits. It is computed as the
  product of two integers and fits into 32 bits.
- A comparison of a product with a power of two is a comparison of the value's bits with those of
  the smallest float32 number for which the product is large enough.
- The scale of a group has a new value at four fixed fractions of each binade of its maximum.

The product of a bfloat16 value with R has at most 8 + 8 bits and is exact in float32. Such values
therefore need fewer operations.
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    ZERO,
    as_bits,
    as_float,
    kernel,
    widen,
)
from megatron.fake_quant.fused.numba_compile import inlined

GROUP = 64
FOURS = GROUP // 4  #: number of fours (4 neighbors with a common exponent) in a group
EIGHTS = GROUP // 8
TILE = 1024  #: number of consecutive values that `rows` loads at a time, a multiple of GROUP
PART = TILE // 4  #: number of fours in a tile
COLUMNS = 512  #: number of columns that `columns` loads at a time
FRACTION = np.int32(0x7FFFFF)
BINADE = np.int32(1 << 23)  #: difference between the bits of a float32 number and of its double
LARGEST_BYTE = np.int32(254)
#: A shift to the right by this many bits leaves no bit of a non-negative int32 number.
ALL_BITS = np.int32(31)


def _first_from(numerator: int, denominator: int) -> int:
    """Return the bits of the smallest float32 number that is at least numerator / denominator."""
    exponent = math.frexp(numerator / denominator)[1]
    significand = -(-(numerator << (24 - exponent)) // denominator)
    return ((exponent + 125) << 23) + significand


#: 256 / (1 + m / 4) for the mantissas m of E6M2, rounded to 8 significant bits. This is 256 * R for
#: the scales from 1 to 1.75, to which the following tables refer.
FACTORS = np.array([256, 205, 171, 146], np.int32)
#: Float32 bits of the smallest value whose product with R is at least 4.
LIMITS = np.array([_first_from(4 * 256, int(factor)) for factor in FACTORS], np.int32)
#: Float32 bits of the largest value whose product with R is below 7.5 / 4. Larger values would
#: round to 8 quarters.
CAPS = np.array([_first_from(480, int(factor)) - 1 for factor in FACTORS], np.int32)
#: Fraction bits of a group's maximum from which the scale has its next value. At these thresholds,
#: the maximum times bf16(1/7) is 351/256, 417/256, 479/256 and 578/256 times a power of two.
#: Slightly larger numbers, rounded to 8 bits and then to 3, are 3/2, 7/4, 2 and 5/2. No float32
#: number is exactly at one of the four thresholds.
STEPS = tuple(np.int32(_first_from(end, 292) - _first_from(1, 1)) for end in (351, 417, 479, 578))
#: The byte of a scale is 4 times the biased exponent of the maximum, minus this number, plus one
#: for each step that the maximum reaches.
BYTE_BIAS = np.int32(4 * (127 + 3 - 48) - 1)
SCALE_BIAS = np.int32(48)
#: For a scale from 1 to 1.75, the exponent field of SHIFT minus the bits of a value is the number
#: of places by which `element` shifts a product. The ones in the fraction bits of SHIFT make the
#: fraction of the value irrelevant.
SHIFT = np.int32((154 << 23) + 0x7FFFFF)
QUARTER = np.int32((127 - 48 - 2) << 23)  #: float32 bits of 2^-50
SIX_BINADES = np.int32(6 << 23)  #: difference between the float32 bits of 256 R and of 4 R
SEVEN, HALF = np.float32(7), np.float32(0.5)


def is_short(stored: Any) -> Any:
    """Return whether a value is stored as the 16 bits (int16) of a bfloat16 number."""
    raise NotImplementedError("only in compiled code")


@overload(is_short, inline="always", strict=False)
def _is_short(stored: Any) -> Any:
    if stored == types.int16:
        return lambda stored: True
    return lambda stored: False


def shorten(bits: Any, like: Any) -> Any:
    """Convert the float32 bits of a result to the width of `like`, as `narrow` does.

    Results have at most 6 significant bits, so nothing is rounded.
    """
    raise NotImplementedError("only in compiled code")


@overload(shorten, inline="always", strict=False)
def _shorten(bits: Any, like: Any) -> Any:
    if like == types.int16:
        return lambda bits, like: np.int16(bits >> 16)
    return lambda bits, like: bits


@inlined
def reached(fraction: Any, step: Any) -> Any:
    """Return 1 if `fraction` is at least `step`, and 0 otherwise, without a branch."""
    return np.int32(np.int32(np.int32(step - np.int32(1)) - fraction) >> 31) & np.int32(1)


@inlined
def group_scale(amax: Any) -> Any:
    """Return the constants of a group, given the float32 bits of its largest magnitude.

    The constants are the entries of `LIMITS`, `FACTORS` and `CAPS` for the mantissa of the group's
    scale, `SHIFT`, and the float32 bits of a quarter of the scale. The exponent of the scale is
    added to the exponent fields of the limit, the cap and the shift.
    """
    fraction = np.int32(amax & FRACTION)
    steps = reached(fraction, STEPS[0]) + reached(fraction, STEPS[1])
    steps += reached(fraction, STEPS[2]) + reached(fraction, STEPS[3])
    byte = np.int32(np.int32(np.int32(amax >> 23) << 2) - BYTE_BIAS + steps)
    byte = min(max(byte, ZERO), LARGEST_BYTE)
    mantissa = byte & 3
    power = np.int32(np.int32(np.int32(byte >> 2) - SCALE_BIAS) << 23)
    limit, cap = np.int32(LIMITS[mantissa] + power), np.int32(CAPS[mantissa] + power)
    unit = np.int32(QUARTER + np.int32(byte << 21))
    return limit, FACTORS[mantissa], cap, np.int32(SHIFT + power), unit


@inlined
def exponent_bits(four: Any, eight: Any, limit: Any) -> Any:
    """Return the sum of both exponent bits of 4 neighbors, shifted to float32's exponent field.

    `four` and `eight` are the bits of the largest magnitude of 4 and of 8 neighbors.
    """
    first = BINADE if eight >= limit else ZERO
    second = BINADE if four >= np.int32(np.int32(limit - BINADE) + first) else ZERO
    return np.int32(first + second)


@inlined
def quadruple(factor: Any, shift: Any) -> Any:
    """Return the float32 bits of 4 times R, the rounded reciprocal of a scale.

    The arguments are constants of `group_scale`.
    """
    power = np.int32(shift - SHIFT)
    return np.int32(np.int32(as_bits(np.float32(factor)) - SIX_BINADES) - power)


@inlined
def short_element(bits: Any, power: Any, ratio: Any, unit: Any) -> Any:
    """Round a bfloat16 value as `element` does; `ratio` is the result of `quadruple`.

    No sum is rounded up to an integer: products from 2^-9 on are multiples of 2^-24, and smaller
    ones leave the sum below 1.
    """
    magnitude = as_float(np.int32(bits & MAGNITUDE))
    quarters = min(np.float32(magnitude * as_float(np.int32(ratio - power))), SEVEN)
    rounded = np.float32(np.int32(np.float32(quarters + HALF)))
    return np.int32(as_bits(rounded * as_float(np.int32(unit + power))) | np.int32(bits & SIGN))


@inlined
def element(bits: Any, power: Any, factor: Any, cap: Any, shift: Any, unit: Any) -> Any:
    """Round a value to a multiple of a quarter of its scale, with ties away from zero.

    `power` is the result of `exponent_bits`, and the other arguments are those of `group_scale`.
    Return the bits of the result.
    """
    magnitude = min(np.int32(np.int32(bits & MAGNITUDE) - power), cap)
    significand = np.int32(np.int32(magnitude & FRACTION) | BINADE)
    product = np.uint32(np.uint32(significand) * np.uint32(factor))
    places = np.int32(min(np.int32(np.int32(shift - magnitude) >> 23), ALL_BITS) & ALL_BITS)
    halves = np.int32(np.int32(product >> np.uint32(1)) >> places)
    quarters = np.float32(np.int32(np.int32(halves + np.int32(1)) >> 1))
    return np.int32(as_bits(quarters * as_float(np.int32(unit + power))) | np.int32(bits & SIGN))


@inlined
def load(read: Any, work: Any, whole: Any, groups: Any) -> Any:
    """Load up to `TILE` values into `work`, and fill the last group with zeros.

    The parts 0 to 3 of `work` receive the first to fourth values of the fours. Parts 4 and 5
    receive the largest magnitude of each four, and that of the 8 neighbors to which it belongs.
    """
    for j in range(whole):
        a, b = widen(read[4 * j]), widen(read[4 * j + 1])
        c, d = widen(read[4 * j + 2]), widen(read[4 * j + 3])
        work[j], work[PART + j], work[2 * PART + j], work[3 * PART + j] = a, b, c, d
        first = max(np.int32(a & MAGNITUDE), np.int32(b & MAGNITUDE))
        second = max(np.int32(c & MAGNITUDE), np.int32(d & MAGNITUDE))
        work[4 * PART + j] = max(first, second)
    for j in range(whole, FOURS * groups):
        largest = ZERO
        for i in range(4):
            bits = widen(read[4 * j + i]) if 4 * j + i < len(read) else ZERO
            work[i * PART + j] = bits
            largest = max(largest, np.int32(bits & MAGNITUDE))
        work[4 * PART + j] = largest
    for j in range(EIGHTS * groups):
        largest = max(work[4 * PART + 2 * j], work[4 * PART + 2 * j + 1])
        work[5 * PART + 2 * j], work[5 * PART + 2 * j + 1] = largest, largest


@inlined
def scales(work: Any, groups: Any, like: Any) -> Any:
    """Write the constants of `group_scale` to parts 6 to 10 of `work`, for every 4 neighbors.

    If the values of `like` are bfloat16 numbers, part 7 receives 4 R, and parts 8 and 9 nothing.
    Return the bits of the tile's largest magnitude. The constants of a group with an Inf or a NaN
    have no meaning.
    """
    largest = ZERO
    for group in range(groups):
        first = FOURS * group
        amax = work[5 * PART + first]
        for j in range(2, FOURS, 2):
            amax = max(amax, work[5 * PART + first + j])
        largest = max(largest, amax)
        limit, factor, cap, shift, unit = group_scale(amax)
        if is_short(like):
            ratio = quadruple(factor, shift)
            for j in range(FOURS):
                work[6 * PART + first + j] = limit
                work[7 * PART + first + j] = ratio
                work[10 * PART + first + j] = unit
            continue
        for j in range(FOURS):
            work[6 * PART + first + j] = limit
            work[7 * PART + first + j] = factor
            work[8 * PART + first + j] = cap
            work[9 * PART + first + j] = shift
            work[10 * PART + first + j] = unit
    return largest


@inlined
def quantize(work: Any, groups: Any, like: Any) -> Any:
    """Quantize the values in the parts 0 to 3 of `work` in place."""
    if is_short(like):
        for j in range(FOURS * groups):
            power = exponent_bits(work[4 * PART + j], work[5 * PART + j], work[6 * PART + j])
            ratio, unit = work[7 * PART + j], work[10 * PART + j]
            work[j] = short_element(work[j], power, ratio, unit)
            work[PART + j] = short_element(work[PART + j], power, ratio, unit)
            work[2 * PART + j] = short_element(work[2 * PART + j], power, ratio, unit)
            work[3 * PART + j] = short_element(work[3 * PART + j], power, ratio, unit)
        return
    for j in range(FOURS * groups):
        power = exponent_bits(work[4 * PART + j], work[5 * PART + j], work[6 * PART + j])
        factor, cap = work[7 * PART + j], work[8 * PART + j]
        shift, unit = work[9 * PART + j], work[10 * PART + j]
        work[j] = element(work[j], power, factor, cap, shift, unit)
        work[PART + j] = element(work[PART + j], power, factor, cap, shift, unit)
        work[2 * PART + j] = element(work[2 * PART + j], power, factor, cap, shift, unit)
        work[3 * PART + j] = element(work[3 * PART + j], power, factor, cap, shift, unit)


@inlined
def fill_special(work: Any, groups: Any) -> Any:
    """Set all values of each group that has an Inf or a NaN to NaN."""
    for group in range(groups):
        amax = ZERO
        for j in range(FOURS * group, FOURS * (group + 1)):
            amax = max(amax, work[5 * PART + j])
        if amax >= INFINITY:
            for i in range(4):
                for j in range(FOURS * group, FOURS * (group + 1)):
                    work[i * PART + j] = NAN


@kernel
def rows(src: Any, dst: Any, start: Any, stop: Any) -> None:
    """Quantize rows `start` to `stop - 1` of a `[rows, n]` array, in groups along the last axis.

    Loops over all values of a tile are separate from loops over its groups, because LLVM does not
    vectorize loops that are as short as a group. The data of a loop is in one array, because the
    compiler would check at run time whether several arrays overlap.
    """
    n = src.shape[1]
    work = np.empty(11 * PART, np.int32)
    for row in range(start, stop):
        for left in range(0, n, TILE):
            read, written = src[row, left : left + TILE], dst[row, left : left + TILE]
            count = len(read)
            whole = min(count >> 2, PART)
            groups = min((count + GROUP - 1) >> 6, TILE // GROUP)
            load(read, work, whole, groups)
            largest = scales(work, groups, read[0])
            quantize(work, groups, read[0])
            if largest >= INFINITY:
                fill_special(work, groups)
            for j in range(whole):
                written[4 * j] = shorten(work[j], written[4 * j])
                written[4 * j + 1] = shorten(work[PART + j], written[4 * j])
                written[4 * j + 2] = shorten(work[2 * PART + j], written[4 * j])
                written[4 * j + 3] = shorten(work[3 * PART + j], written[4 * j])
            for j in range(4 * whole, count):
                written[j] = shorten(work[(j & 3) * PART + whole], written[j])


@inlined
def column_scales(fours: Any, constants: Any, width: Any, like: Any) -> Any:
    """Compute the constants that `group_scale` returns for each column of a tile.

    Row k of `constants` receives constant k of all columns.

    If the values of `like` are bfloat16 numbers, 4 R replaces the factor.

    `fours` has the largest magnitudes of the fours, and receives their exponent bits. Return the
    bits of the tile's largest magnitude.
    """
    amax = constants[5]
    amax[:] = 0
    for i in range(FOURS):
        four = fours[i]
        for j in range(width):
            amax[j] = max(amax[j], four[j])
    largest = ZERO
    for j in range(width):
        largest = max(largest, amax[j])
        limit, factor, cap, shift, unit = group_scale(amax[j])
        if is_short(like):
            factor = quadruple(factor, shift)
        constants[0, j], constants[1, j], constants[2, j] = limit, factor, cap
        constants[3, j], constants[4, j] = shift, unit
    limits = constants[0]
    for i in range(0, FOURS, 2):
        upper, lower = fours[i], fours[i + 1]
        for j in range(width):
            eight = max(upper[j], lower[j])
            upper[j] = exponent_bits(upper[j], eight, limits[j])
            lower[j] = exponent_bits(lower[j], eight, limits[j])
    return largest


@kernel
def columns(src: Any, dst: Any, start: Any, stop: Any) -> None:
    """Quantize an `[outer, n, inner]` array in groups along the middle axis.

    `start` and `stop` count groups of 64 rows; the groups of one matrix come before the groups of
    the next matrix.
    """
    n, inner = src.shape[1], src.shape[2]
    groups = (n + GROUP - 1) // GROUP
    fours, constants = np.empty((FOURS, COLUMNS), np.int32), np.empty((6, COLUMNS), np.int32)
    factor, cap, shift, unit = constants[1], constants[2], constants[3], constants[4]
    for item in range(start, stop):
        outer, first = item // groups, item % groups * GROUP
        last = min(first + GROUP, n)
        for left in range(0, inner, COLUMNS):
            right = min(left + COLUMNS, inner)
            fours[:] = 0
            for i in range(first, last):
                read, four = src[outer, i, left:right], fours[(i - first) >> 2]
                for j in range(len(read)):
                    four[j] = max(four[j], np.int32(widen(read[j]) & MAGNITUDE))
            largest = column_scales(fours, constants, right - left, src[outer, first, left])
            for i in range(first, last):
                read, written = src[outer, i, left:right], dst[outer, i, left:right]
                power = fours[(i - first) >> 2]
                if is_short(read[0]):
                    for j in range(len(read)):
                        bits = short_element(widen(read[j]), power[j], factor[j], unit[j])
                        written[j] = shorten(bits, written[j])
                    continue
                for j in range(len(read)):
                    bits = element(widen(read[j]), power[j], factor[j], cap[j], shift[j], unit[j])
                    written[j] = shorten(bits, written[j])
            if largest >= INFINITY:
                for i in range(first, last):
                    written = dst[outer, i, left:right]
                    for j in range(len(written)):
                        if constants[5, j] >= INFINITY:
                            written[j] = shorten(NAN, written[j])
