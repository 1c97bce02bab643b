"""CPU kernel for HiFloat4, whose groups of 64 values have three levels of scales.

Products are computed in float64, where they are exact, as in `hifloat4.py`.
"""

from typing import Any

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    ZERO,
    as_bits,
    as_float,
    kernel,
    narrow,
    widen,
)
from megatron.fake_quant.fused.numba_compile import inlined

GROUP = 64
COLUMNS = 64  #: number of columns that are transposed to rows at a time
BIAS = 48
LARGEST_BYTE = 254
MANTISSA = 52  #: number of mantissa bits of a float64
DOUBLE_BIAS = 1023
SEVENTH = 73 / 512  #: 1 / 7, rounded to bfloat16
#: 1 / (1 + m / 4) for m = 0, 1, 2 and 3, rounded to bfloat16
RECIPROCALS = (1.0, 205 / 256, 171 / 256, 73 / 128)


@inlined
def e6m2(amax: Any) -> Any:
    """Return the E6M2 byte of a group's scale, given the group's maximum, a float32 above 0."""
    product = np.float64(np.float64(amax) * SEVENTH).view(np.int64)
    exponent = (product >> MANTISSA) - DOUBLE_BIAS
    fraction = (product & ((1 << MANTISSA) - 1)) | (1 << MANTISSA)
    # Round to 8 significant bits (bfloat16) and then to 3, both times to nearest even.
    dropped = MANTISSA - 7
    eight = (fraction + (1 << (dropped - 1)) - 1 + ((fraction >> dropped) & 1)) >> dropped
    three = (eight + 15 + ((eight >> 5) & 1)) >> 5
    return min(max((exponent + BIAS) * 4 + three - 4, 0), LARGEST_BYTE)


@inlined
def element(bits: Any, reciprocal: Any, up: Any) -> Any:
    """Multiply a value by `reciprocal`, round it to a multiple of 1/4, and multiply it by `up`.

    A rounded magnitude above 7/4 becomes 7/4. Return the bits of the result.
    """
    quarters = np.float64(as_float(np.int32(bits & MAGNITUDE))) * reciprocal * 4
    rounded = np.float32(min(np.floor(quarters + 0.5), 7.0)) * np.float32(0.25)
    return np.int32(as_bits(rounded * up) | np.int32(bits & SIGN))


@inlined
def one_group(group: Any) -> Any:
    """Quantize a group of 64 float32 values in place; `group` holds their bits."""
    amax = ZERO
    for j in range(GROUP):
        amax = max(amax, np.int32(group[j] & MAGNITUDE))
    if amax >= INFINITY:
        for j in range(GROUP):
            group[j] = NAN
        return
    byte = e6m2(as_float(amax)) if amax > 0 else 0
    # `power` is 2^(48 - e) in float64, and `scale` is 2^(e - 48) * (1 + m / 4) in float32. Both are
    # built from bits; e and m are the exponent and mantissa fields of the byte.
    power = np.int64((DOUBLE_BIAS + BIAS - (byte >> 2)) << MANTISSA).view(np.float64)
    reciprocal = RECIPROCALS[byte & 3] * power
    scale = as_float(np.int32(((127 - BIAS) << 23) + (byte << 21)))
    for eight in range(0, GROUP, 8):
        first = second = ZERO
        for j in range(4):
            first = max(first, np.int32(group[eight + j] & MAGNITUDE))
            second = max(second, np.int32(group[eight + 4 + j] & MAGNITUDE))
        e8 = 2 if np.float64(as_float(max(first, second))) * reciprocal >= 4 else 1
        for four in range(2):
            largest = np.float64(as_float(second if four else first)) * reciprocal / e8
            power_of_two = e8 * (2 if largest >= 2 else 1)
            down, up = reciprocal / power_of_two, scale * np.float32(power_of_two)
            for j in range(eight + 4 * four, eight + 4 * four + 4):
                group[j] = element(group[j], down, up)


@kernel
def hifloat4(src: Any, dst: Any, start: Any, stop: Any) -> None:
    """Quantize HiFloat4 groups along the middle axis of an `[outer, n, inner]` array.

    `start` and `stop` count groups of 64 rows; the groups of one matrix come before the groups of
    the next matrix.
    """
    n, inner = src.shape[1], src.shape[2]
    groups = (n + GROUP - 1) // GROUP
    buffer = np.empty((COLUMNS, GROUP), np.int32)
    for item in range(start, stop):
        outer, first = item // groups, item % groups * GROUP
        count = min(GROUP, n - first)
        for left in range(0, inner, COLUMNS):
            width = min(COLUMNS, inner - left)
            buffer[:, count:] = 0  # A group of NaNs may have overwritten the padding.
            for i in range(count):
                for j in range(width):
                    buffer[j, i] = widen(src[outer, first + i, left + j])
            for j in range(width):
                one_group(buffer[j])
            for i in range(count):
                for j in range(width):
                    like = dst[outer, first + i, left + j]
                    dst[outer, first + i, left + j] = narrow(buffer[j, i], like)
