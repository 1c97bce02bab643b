"""CPU kernels, compiled by numba: one pass over memory, no temporaries.

They do what `reference.py` does, operation by operation, so that the bits are the same; tests hold
them to it. All in one file, because numba's cache on disk looks at the file of a kernel only, and
would go on using what an edited helper in another file had been compiled to.

Arrays hold the bits of the numbers: int32 for float32, int16 for bfloat16. numba's arithmetic on
two int32 gives an int64, which would halve what a vector register holds: results are cast back at
once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import overload

from megatron.fake_quant.random_bits import KEY_STEPS, MULTIPLIERS, RANDOM_BITS, ROUNDS

SIGN = np.int32(-(1 << 31))
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
NAN = np.int32(0x7FC00000)
FRACTION = np.int32(0x7FFFFF)
POWER_254 = np.int32(254 << 23)  #: minus the bits of a power of two: the bits of its reciprocal
HALF_POWER = np.int32(1 << 22)  #: 2^-127
ZERO, ONE = np.int32(0), np.float32(1)
UNITS = np.float32(1 << RANDOM_BITS)
COLUMNS = 512  #: that a tile is wide, so that a block's rows of it stay in the nearest cache


class Element(NamedTuple):
    """An `ElementFormat` in bits; exponents are in place, shifted by 23."""

    lowest: np.int32  #: bits of 2^emin
    top: np.int32  #: bits of the largest number
    mantissa: np.int32  #: mantissa bits, as an exponent
    emax: np.int32  #: as a number
    keep_zero_sign: bool


class Rule(NamedTuple):
    """How a block's scale follows from its maximum."""

    carry_from: np.int32  #: E8M0: mantissa bits of a maximum from which on the scale is doubled
    encode: np.float32  #: NVFP4: of the tensor; 0 for E8M0
    decode: np.float32  #: NVFP4: of the tensor; 1 for E8M0


class Random(NamedTuple):
    """The key of stochastic rounding."""

    on: bool
    key0: np.uint32
    key1: np.uint32


def inlined(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always", error_model="numpy")(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Without the interpreter's lock; cached on disk where there is a place for that."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the source's folder nor the user's cache can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


@inlined
def as_float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@inlined
def as_bits(x: Any) -> Any:
    return np.float32(x).view(np.int32)


def widen(stored: Any) -> Any:
    """Bits of the float32 that an array's float32 or bfloat16 stands for."""
    raise NotImplementedError("only in compiled code")


def narrow(bits: Any, like: Any) -> Any:
    """Undo `widen`, rounding to nearest even; a NaN must be the canonical one."""
    raise NotImplementedError("only in compiled code")


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
    """Round a finite magnitude. A power of two that is 23 minus mantissa bits larger than the
    binade has the binade's spacing for its own: adding and subtracting it rounds.
    """
    binade = max(np.int32(magnitude & INFINITY), element.lowest)
    shifter = as_float(np.int32(binade + (np.int32(23 << 23) - element.mantissa)))
    return as_bits(np.float32(as_float(magnitude) + shifter) - shifter)


@inlined
def stochastic(magnitude: Any, element: Any, random: Any) -> Any:
    """See `element.round_to`."""
    spacing = np.int32(max(np.int32(magnitude & INFINITY), element.lowest) - element.mantissa)
    steps = np.float32(as_float(magnitude) * as_float(np.int32(POWER_254 - spacing)))
    whole = np.float32(np.int32(steps))
    up = np.float32(np.float32(steps - whole) * UNITS) >= np.float32(np.int32(random + 1))
    return as_bits((whole + ONE if up else whole) * as_float(spacing))


@inlined
def random_bits(index: Any, random: Any) -> Any:
    """For value number `index` (int64), see `random_bits.py`."""
    c0, c1 = np.uint32(index >> 2), np.uint32(index >> 34)
    c2, c3 = np.uint32(0), np.uint32(0)
    k0, k1 = random.key0, random.key1
    for _ in range(ROUNDS):
        p0 = np.uint64(MULTIPLIERS[0]) * np.uint64(c0)
        p1 = np.uint64(MULTIPLIERS[1]) * np.uint64(c2)
        c0 = np.uint32(np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1)
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + np.uint32(KEY_STEPS[0])), np.uint32(k1 + np.uint32(KEY_STEPS[1]))
    lane = index & 3
    word = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
    return np.int32(word >> np.uint32(32 - RANDOM_BITS))


@inlined
def e8m0(amax: Any, element: Any, rule: Any) -> Any:
    """The byte of a block's scale, -1 for NaN; see `block.scale_bytes`."""
    if amax >= INFINITY:
        return np.int32(-1)
    exponent, fraction = amax >> 23, np.int32(amax & FRACTION)
    if exponent == 0 and amax > 0:
        exponent = 1
        while fraction <= FRACTION:
            fraction = np.int32(fraction << 1)
            exponent -= 1
        fraction = np.int32(fraction & FRACTION)
    byte = exponent - element.emax + (1 if fraction >= rule.carry_from else 0)
    return np.int32(0 if amax == 0 else min(max(byte, 0), 254))


@inlined
def power(byte: Any) -> Any:
    """2^(byte - 127) as float32."""
    return as_float(np.int32(byte << 23) if byte > 0 else HALF_POWER)


@inlined
def block_scale(amax: Any, element: Any, rule: Any) -> Any:
    """What a block's values are multiplied by before and after, and the mask that keeps a sign."""
    byte = e8m0(amax, element, rule)
    if byte < 0:
        return as_float(NAN), as_float(NAN), ZERO
    return power(254 - byte), power(byte), SIGN
