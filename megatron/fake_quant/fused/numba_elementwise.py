"""CPU kernels for formats without block scales, and for a tensor's largest finite magnitude."""

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
    fill_random,
    finite_magnitude,
    kernel,
    magnitude,
    narrow,
    nearest,
    nearest_even,
    stochastic,
    widen,
    with_sign,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.random_bits import RANDOM_BITS

FRACTION = np.int32(0x7FFFFF)
UNITS = np.int32(1 << RANDOM_BITS)
LARGEST = np.int32((127 + 15) << 23)
OVERFLOW = np.int32(LARGEST | 1 << 21)  #: bits of 1.25 * 2^15, at which HiFloat8 overflows
SMALLEST = np.int32((127 - 22) << 23)
HALF_SMALLEST = np.int32((127 - 23) << 23)
SMALLEST_NORMAL_FLOAT16 = np.int32((127 - 14) << 23)
UNITS_BELOW_SMALLEST = np.float32(2.0 ** (RANDOM_BITS + 22))
HALF_16 = np.int32(0x7FFF)  #: just below half of bfloat16's last place, in float32 bits
HIGH_16 = np.int32(-(1 << 16))  #: mask of the bits of a float32 number that bfloat16 has
PIECE = 1024  #: number of values for which random bits are generated at a time
NEAREST, STOCHASTIC, HYBRID = 0, 1, 2
FROM_FLOAT32, FROM_BFLOAT16, FROM_FLOAT16 = 0, 1, 2


@kernel
def finite_amax(src: Any, start: Any, stop: Any) -> Any:
    """Return the bits of the largest finite magnitude in `src[start:stop]`."""
    part = src[start:stop]  # A loop that starts at 0 needs no check for negative indices.
    # Values are compared in their own width, because a vector register holds more 16-bit values
    # than 32-bit values.
    amax = np.zeros(1, src.dtype)[0]
    for i in range(len(part)):
        amax = max(amax, finite_magnitude(part[i]))
    return widen(amax)


@kernel
def casts(src: Any, dst: Any, kept: Any, element: Any, start: Any, stop: Any) -> None:
    """Round each value to bfloat16 or float16, to nearest even; an overflow becomes Inf.

    kept: True for bfloat16, whose results are the high 16 bits of float32 numbers. Otherwise,
        `element` describes float16, with twice its largest power of two as the largest number.
    """
    read, written = src[start:stop], dst[start:stop]
    if kept:
        for i in range(len(read)):
            bits = widen(read[i])
            # The sum can change the sign bit only if the value is a NaN, which is replaced.
            rounded = np.int32(np.int32(bits + HALF_16 + ((bits >> 16) & 1)) & HIGH_16)
            special = np.int32(bits & MAGNITUDE) > INFINITY
            written[i] = narrow(NAN if special else rounded, written[i])
    else:
        for i in range(len(read)):
            bits = widen(read[i])
            magnitude = np.int32(bits & MAGNITUDE)
            rounded = nearest_even(min(magnitude, element.top), element)
            rounded = INFINITY if rounded >= element.top else rounded
            value = np.int32(rounded | np.int32(bits & SIGN))
            written[i] = narrow(NAN if magnitude > INFINITY else value, written[i])


@inlined
def element_value(bits: Any, rounded: Any, up: Any, element: Any) -> Any:
    """Return the bits of a dequantized value: `rounded` times `up`, with the sign of the input.

    The result for a NaN is the canonical NaN.
    """
    sign = np.int32(bits & SIGN)
    if rounded == 0:
        sign = np.int32(sign & element.zero_sign)
    value = np.int32(as_bits(as_float(rounded) * up) | sign)
    return NAN if np.int32(bits & MAGNITUDE) > INFINITY else value


@kernel
def elements(
    src: Any, dst: Any, down: Any, up: Any, element: Any, random: Any, start: Any, stop: Any
) -> None:
    """Multiply each value by `down`, round it to the element type, and multiply it by `up`."""
    read, written = src[start:stop], dst[start:stop]
    if random.on:
        buffer = np.empty(PIECE + 7, np.int32)
        for first in range(start, stop, PIECE):
            read, written = src[first : min(first + PIECE, stop)], dst[first:stop]
            drawn = buffer[fill_random(buffer, first, len(read), random) :]
            for i in range(len(read)):
                bits = widen(read[i])
                scaled = as_bits(as_float(np.int32(bits & MAGNITUDE)) * down)
                rounded = stochastic(min(scaled, element.top), element, drawn[i])
                written[i] = narrow(element_value(bits, rounded, up, element), written[i])
    else:
        for first in range(start, stop, PIECE):
            read, written = src[first : min(first + PIECE, stop)], dst[first:stop]
            largest = magnitude(read[0])
            for i in range(len(read)):
                largest = max(largest, magnitude(read[i]))
            for i in range(len(read)):
                bits = widen(read[i])
                rounded = nearest(as_float(bits) * down, element)
                value = with_sign(np.float32(rounded * up), bits, element)
                written[i] = narrow(value, written[i])
            if widen(largest) > INFINITY:
                for i in range(len(read)):
                    if widen(magnitude(read[i])) > INFINITY:
                        written[i] = narrow(NAN, written[i])


@inlined
def steps_of(magnitude: Any) -> Any:
    """Return HiFloat8's spacing at a magnitude >= 2^-22, in units of float32's last bit."""
    distance = abs(np.int32(np.int32(magnitude >> 23) - 127))
    shift = 20 + (distance >= 4) + (distance >= 8) + (distance >= 16)
    return np.int32(np.int32(1) << np.int32(shift))


@inlined
def nearest_hifloat8(magnitude: Any) -> Any:
    """Round a magnitude to the nearest HiFloat8 value, ties away from zero.

    The result may exceed HiFloat8's largest number; the caller handles the overflow.
    """
    lifted = max(magnitude, SMALLEST)
    steps = steps_of(lifted)
    rounded = np.int32(np.int32(lifted + (steps >> 1)) & np.int32(-steps))
    return ZERO if magnitude < HALF_SMALLEST else rounded


@inlined
def carries_by_low_bits(magnitude: Any, way: Any, source: Any) -> Any:
    """Return whether HiFloat8's hybrid rounding rounds a value up because of its low bits.

    The rule is SR14 for float32 values and SR2 for other dtypes; see `hifloat8.py`. `way` is the
    distance from the neighbor below, in units of 2^-24 of the spacing.
    """
    if source == FROM_FLOAT32:
        return (way >> (RANDOM_BITS - 14)) >= (magnitude & ((1 << 14) - 1))
    if source == FROM_BFLOAT16:
        last = (magnitude >> 16) & 1
    elif magnitude >= SMALLEST_NORMAL_FLOAT16:
        last = (magnitude >> 13) & 1
    else:
        last = np.int32(as_float(magnitude) * np.float32(1 << 24)) & 1
    return (way >> (RANDOM_BITS - 2)) >= 2 * last + 1


@inlined
def other_hifloat8(magnitude: Any, rounding: Any, source: Any, random: Any) -> Any:
    """Round a magnitude to HiFloat8 in the hybrid or the stochastic mode.

    The result may exceed HiFloat8's largest number; the caller handles the overflow.
    """
    small = magnitude < SMALLEST
    steps = steps_of(max(magnitude, SMALLEST))
    below = ZERO if small else np.int32(magnitude & np.int32(-steps))
    if small:
        way = np.int32(as_float(magnitude) * UNITS_BELOW_SMALLEST)
    else:
        way = np.int32(np.int32(magnitude - below) * (UNITS // steps))
    if rounding == STOCHASTIC:
        up = way > random
    elif abs((magnitude >> 23) - 127) < 4:
        up = way >= UNITS // 2
    else:
        up = carries_by_low_bits(magnitude, way, source)
        up = (up and magnitude >= HALF_SMALLEST) or magnitude >= OVERFLOW
    above = SMALLEST if small else np.int32(below + steps)
    return above if up else below


@inlined
def hifloat8_value(bits: Any, scaled: Any, rounded: Any, up: Any, beyond: Any) -> Any:
    """Return the bits of a dequantized value: `rounded` times `up`, with the sign of the input.

    A rounded magnitude above HiFloat8's largest number becomes `beyond` first. A zero is positive,
    because HiFloat8 has no -0. The result is the canonical NaN if `scaled`, the magnitude before
    rounding, is a NaN.
    """
    if rounded > LARGEST:
        rounded = beyond
    sign = np.int32(bits & SIGN) if rounded != 0 else ZERO
    value = np.int32(as_bits(as_float(rounded) * up) | sign)
    return NAN if scaled > INFINITY else value


@kernel
def hifloat8(
    src: Any,
    dst: Any,
    down: Any,
    up: Any,
    beyond: Any,
    rounding: Any,
    source: Any,
    random: Any,
    start: Any,
    stop: Any,
) -> None:
    """Multiply each value by `down`, round it to HiFloat8, and multiply it by `up`.

    `beyond` holds the bits of the magnitude that replaces an overflow.
    """
    read, written = src[start:stop], dst[start:stop]
    # Clamp at twice the largest number at most, because this magnitude overflows in every mode.
    limit = np.int32(min(beyond, np.int32(LARGEST + (1 << 23))))
    if rounding == NEAREST:
        for i in range(len(read)):
            bits = widen(read[i])
            scaled = as_bits(as_float(np.int32(bits & MAGNITUDE)) * down)
            rounded = nearest_hifloat8(min(scaled, limit))
            written[i] = narrow(hifloat8_value(bits, scaled, rounded, up, beyond), written[i])
    elif rounding == HYBRID:
        for i in range(len(read)):
            bits = widen(read[i])
            scaled = as_bits(as_float(np.int32(bits & MAGNITUDE)) * down)
            rounded = other_hifloat8(min(scaled, limit), HYBRID, source, ZERO)
            written[i] = narrow(hifloat8_value(bits, scaled, rounded, up, beyond), written[i])
    else:
        buffer = np.empty(PIECE + 7, np.int32)
        for first in range(start, stop, PIECE):
            read, written = src[first : min(first + PIECE, stop)], dst[first:stop]
            drawn = buffer[fill_random(buffer, first, len(read), random) :]
            for i in range(len(read)):
                bits = widen(read[i])
                scaled = as_bits(as_float(np.int32(bits & MAGNITUDE)) * down)
                rounded = other_hifloat8(min(scaled, limit), STOCHASTIC, source, drawn[i])
                written[i] = narrow(hifloat8_value(bits, scaled, rounded, up, beyond), written[i])
