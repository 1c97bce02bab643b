"""Bit-level arithmetic on single numbers, shared by the CPU kernels.

The kernels perform the same operations as `reference.py`, so that the results are equal bit for
bit; tests check this. Arrays hold the bits of float32 values as int32, and the bits of bfloat16
values as int16. In numba, the sum of two int32 numbers is an int64, which would halve the number of
values in a vector register. Results are therefore cast back to int32.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.fused.numba_compile import inlined, kernel_compiler
from megatron.fake_quant.random_bits import KEY_STEPS, MULTIPLIERS, RANDOM_BITS, ROUNDS

SIGN = np.int32(-(1 << 31))
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
NAN = np.int32(0x7FC00000)
#: `MAGNITUDE`, `INFINITY` and `ZERO` for bfloat16 bits.
MAGNITUDE_16, INFINITY_16, ZERO_16 = np.int16(0x7FFF), np.int16(0x7F80), np.int16(0)
#: Bits of 2^127 (float32). Subtracting the bits of a power of two from them gives the bits of its
#: reciprocal.
POWER_254 = np.int32(254 << 23)
ZERO, ONE = np.int32(0), np.float32(1)
UNITS = np.float32(1 << RANDOM_BITS)
UNUSED = np.uint32(32 - RANDOM_BITS)  #: number of low bits of a random word that are discarded


class Element(NamedTuple):
    """Parameters of an `ElementFormat`, as integers for the kernels."""

    lowest: np.int32  #: float32 bits of 2^emin
    top: np.int32  #: float32 bits of the element type's largest number
    mantissa: np.int32  #: number of mantissa bits, shifted left to the exponent field of a float32
    emax: np.int32  #: exponent of the largest number
    zero_sign: np.int32  #: mask for the sign of a zero: the sign bit, or 0 if -0 does not exist
    shifter: np.int32  #: difference between the bits of `nearest`'s shifter and those of the binade


@functools.cache
def element_bits(element: ElementFormat) -> Element:
    """Return the parameters of an element type as integers for the kernels."""

    def bits_of(x: float) -> Any:
        return np.float32(x).view(np.int32)

    return Element(
        lowest=bits_of(element.smallest_normal),
        top=bits_of(element.max),
        mantissa=np.int32(element.mantissa_bits << 23),
        emax=np.int32(element.emax),
        zero_sign=np.int32(0) if element.twos_complement else SIGN,
        shifter=np.int32(((23 - element.mantissa_bits) << 23) + (1 << 22)),
    )


class Random(NamedTuple):
    """Key from which random bits are generated; `on` is False without stochastic rounding."""

    on: bool
    key0: np.uint32
    key1: np.uint32


def _sources() -> list[Path]:
    """Return the source files from which the fused kernels are compiled."""
    here = Path(__file__).parent
    return [*sorted(here.glob("*.py")), here.parent / "random_bits.py"]


kernel = kernel_compiler("fused", Path(__file__).parent, _sources)


@inlined
def as_float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@inlined
def as_bits(x: Any) -> Any:
    return np.float32(x).view(np.int32)


def widen(stored: Any) -> Any:
    """Convert the bits of a float32 or bfloat16 value, as stored in memory, to float32 bits."""
    raise NotImplementedError("only in compiled code")


def narrow(bits: Any, like: Any) -> Any:
    """Round float32 bits to the width of `like` (float32 or bfloat16), to nearest even.

    This function undoes `widen`. A NaN must be the canonical NaN.
    """
    raise NotImplementedError("only in compiled code")


def magnitude(stored: Any) -> Any:
    """Clear the sign bit of a stored value, in its own width."""
    raise NotImplementedError("only in compiled code")


def finite_magnitude(stored: Any) -> Any:
    """Clear the sign bit of a stored value, in its own width; return 0 for Inf and NaN."""
    raise NotImplementedError("only in compiled code")


@overload(magnitude, inline="always", strict=False)
def _magnitude(stored: Any) -> Any:
    if stored == types.int16:
        return lambda stored: np.int16(stored & MAGNITUDE_16)
    return lambda stored: np.int32(stored & MAGNITUDE)


@overload(finite_magnitude, inline="always", strict=False)
def _finite_magnitude(stored: Any) -> Any:
    limit, zero = (INFINITY_16, ZERO_16) if stored == types.int16 else (INFINITY, ZERO)

    def finite(stored: Any) -> Any:
        bits = magnitude(stored)
        return bits if bits < limit else zero

    return finite


@overload(widen, inline="always", strict=False)
def _widen(stored: Any) -> Any:
    if stored == types.int16:
        return lambda stored: np.int32(np.int32(stored) << 16)
    return lambda stored: stored


@overload(narrow, inline="always", strict=False)
def _narrow(bits: Any, like: Any) -> Any:
    if like == types.int16:
        return lambda bits, like: np.int16(np.int32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return lambda bits, like: bits


@inlined
def nearest_even(magnitude: Any, element: Any) -> Any:
    """Round a finite magnitude to the nearest value of the element type, ties to even.

    The shifter is 2^(23 - mantissa bits) times the power of two at the start of the magnitude's
    binade. At the shifter, float32 numbers have the same spacing as the element type has in the
    binade. Adding and then subtracting the shifter therefore rounds the magnitude.
    """
    binade = max(np.int32(magnitude & INFINITY), element.lowest)
    shifter = as_float(np.int32(binade + (np.int32(23 << 23) - element.mantissa)))
    return as_bits(np.float32(as_float(magnitude) + shifter) - shifter)


@inlined
def nearest(x: Any, element: Any) -> Any:
    """Round a signed number to the nearest value of the element type, ties to even.

    A number beyond the largest one becomes the largest one, and -0 becomes 0. The shifter is 1.5
    times that of `nearest_even`, so that the spacing at the sum is the same for either sign.
    """
    top = as_float(element.top)
    clamped = min(max(np.float32(x), -top), top)
    binade = max(np.int32(as_bits(clamped) & INFINITY), element.lowest)
    shifter = as_float(np.int32(binade + element.shifter))
    return np.float32(np.float32(clamped + shifter) - shifter)


@inlined
def with_sign(value: Any, bits: Any, element: Any) -> Any:
    """Return the bits of `value`; a zero gets the sign of the input `bits` if the type has a -0."""
    return np.int32(as_bits(value) | np.int32(bits & element.zero_sign))


@inlined
def stochastic(magnitude: Any, element: Any, random: Any) -> Any:
    """Round a finite magnitude stochastically; see `rounding._stochastic`."""
    spacing = np.int32(max(np.int32(magnitude & INFINITY), element.lowest) - element.mantissa)
    steps = np.float32(as_float(magnitude) * as_float(np.int32(POWER_254 - spacing)))
    whole = np.float32(np.int32(steps))
    up = np.float32(np.float32(steps - whole) * UNITS) >= np.float32(np.int32(random + 1))
    return as_bits((whole + ONE if up else whole) * as_float(spacing))


@inlined
def fill_random(buffer: Any, index: Any, count: Any, random: Any) -> Any:
    """Fill `buffer` with random bits for the `count` values from position `index` (int64) on.

    Random bits are generated in groups of four values; see `random_bits.py`. Values before `index`
    may therefore precede it in the buffer, which must have room for `count + 7` numbers. Return the
    position of value `index` in the buffer.
    """
    first = index >> 2
    skipped = index & 3
    for group in range((skipped + count + 3) >> 2):
        number = first + group
        c0, c1 = np.uint32(number), np.uint32(number >> 32)
        c2, c3 = np.uint32(0), np.uint32(0)
        k0, k1 = random.key0, random.key1
        for _ in range(ROUNDS):
            p0 = np.uint64(MULTIPLIERS[0]) * np.uint64(c0)
            p1 = np.uint64(MULTIPLIERS[1]) * np.uint64(c2)
            c0 = np.uint32(np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0)
            c2 = np.uint32(np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1)
            c1, c3 = np.uint32(p1), np.uint32(p0)
            k0 = np.uint32(k0 + np.uint32(KEY_STEPS[0]))
            k1 = np.uint32(k1 + np.uint32(KEY_STEPS[1]))
        buffer[4 * group] = np.int32(c0 >> UNUSED)
        buffer[4 * group + 1] = np.int32(c1 >> UNUSED)
        buffer[4 * group + 2] = np.int32(c2 >> UNUSED)
        buffer[4 * group + 3] = np.int32(c3 >> UNUSED)
    return skipped
