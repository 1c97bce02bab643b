"""Bit-level arithmetic on Triton tensors, shared by the GPU kernels.

This is the counterpart of `numba_bits.py` and does the same arithmetic on the bits of float32
values, held as int32. It avoids operations that differ between GPUs: NaN is written as bits,
bfloat16 is rounded in integer arithmetic, and every division is rounded as IEEE 754 requires.
Kernels must be launched with `enable_fp_fusion=False`.

Names in capitals are compile-time constants: Triton compiles one kernel per combination of their
values.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from megatron.fake_quant import random_bits

SIGN = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
NAN_FLOAT16 = tl.constexpr(0x7E00)
#: Bits of 2^127. Subtracting the bits of a power of two from them gives the bits of its reciprocal.
POWER_254 = tl.constexpr(254 << 23)
UNITS = tl.constexpr(float(1 << random_bits.RANDOM_BITS))
#: Number of low bits of a random word that are discarded.
UNUSED = tl.constexpr(32 - random_bits.RANDOM_BITS)
ROUNDS = tl.constexpr(random_bits.ROUNDS)
MULTIPLIER_0 = tl.constexpr(random_bits.MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(random_bits.MULTIPLIERS[1])
KEY_STEP_0 = tl.constexpr(random_bits.KEY_STEPS[0])
KEY_STEP_1 = tl.constexpr(random_bits.KEY_STEPS[1])


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function for the GPU, or interpret it if TRITON_INTERPRET is 1 at import."""
    # Without `do_not_specialize`, Triton compiles another kernel for keys divisible by 16.
    keys = [name for name in ("key0", "key1") if name in function.__code__.co_varnames]
    return triton.jit(function, do_not_specialize=keys)


@compiled
def as_float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@compiled
def as_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@compiled
def widen(stored: tl.tensor) -> tl.tensor:
    """Convert loaded values to float32 and return their bits."""
    if stored.dtype == tl.bfloat16:
        bits = stored.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = as_bits(stored.to(tl.float32))
    return bits


@compiled
def narrow(bits: tl.tensor, dtype: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """Convert float32 bits to values of `dtype`, rounding to nearest even.

    This function undoes `widen`. A NaN must be the canonical NaN.

    EXACT: True if bfloat16 can represent every value, so that no rounding is needed.
    """
    if dtype == tl.bfloat16:
        if not EXACT:
            bits += 0x7FFF + ((bits >> 16) & 1)
        stored = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        # A GPU converts a NaN to 0x7FFF. NaN is replaced before the conversion, too: otherwise the
        # compiler, for which the conversion returns 0x7E00, omits the replacement after it.
        undefined = bits == NAN
        half = as_float(tl.where(undefined, 0, bits)).to(tl.float16).to(tl.int16, bitcast=True)
        stored = tl.where(undefined, NAN_FLOAT16, half).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        stored = as_float(bits)
    return stored


@compiled
def round_by(magnitude: tl.tensor, shifter: tl.tensor) -> tl.tensor:
    """Round a magnitude to a multiple of the spacing of float32 at `shifter`, a power of two.

    Adding and then subtracting the shifter rounds the magnitude.
    """
    return as_bits((as_float(magnitude) + shifter) - shifter)


@compiled
def nearest_even(magnitude: tl.tensor, LOWEST: tl.constexpr, MANTISSA: tl.constexpr) -> tl.tensor:
    """Round a finite magnitude to the nearest value of the element type; see `numba_bits.py`."""
    binade = tl.maximum(magnitude & INFINITY, LOWEST)
    return round_by(magnitude, as_float(binade) * (1 << (23 - MANTISSA)))


@compiled
def stochastic(
    magnitude: tl.tensor, random: tl.tensor, LOWEST: tl.constexpr, MANTISSA: tl.constexpr
) -> tl.tensor:
    """Round a finite magnitude stochastically; see `rounding._stochastic`."""
    spacing = tl.maximum(magnitude & INFINITY, LOWEST) - (MANTISSA << 23)
    steps = as_float(magnitude) * as_float(-spacing + POWER_254)
    whole = steps.to(tl.int32).to(tl.float32)
    up = (steps - whole) * UNITS >= (random + 1).to(tl.float32)
    return as_bits(tl.where(up, whole + 1.0, whole) * as_float(spacing))


@compiled
def philox(counter: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """Return four random words for each 64-bit counter; see `random_bits.py`."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, MULTIPLIER_0), c0 * MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, MULTIPLIER_1), c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEP_0, k1 + KEY_STEP_1
    return c0, c1, c2, c3


@compiled
def random_each(place: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """Return the random bits of values, given their positions `place` (int64) in the tensor."""
    w0, w1, w2, w3 = philox(place >> 2, key0, key1)
    odd = (place & 1) == 1
    words = tl.where((place & 2) == 0, tl.where(odd, w1, w0), tl.where(odd, w3, w2))
    return (words >> UNUSED).to(tl.int32)


@compiled
def random_fours(first: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """Return random bits `[..., 2, 2]` for the four values that start at each position in `first`.

    The positions must be multiples of 4.
    """
    w0, w1, w2, w3 = philox(first >> 2, key0, key1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return (words >> UNUSED).to(tl.int32)
