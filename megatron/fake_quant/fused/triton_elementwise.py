"""GPU kernels that treat all values of a tensor alike.

They quantize in formats without block scales, find a tensor's largest finite magnitude, and
multiply the sums of a product by factors. This is the counterpart of `numba_elementwise.py`.
"""

import triton.language as tl

from megatron.fake_quant.fused.triton_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    as_bits,
    as_float,
    compiled,
    narrow,
    nearest_even,
    random_fours,
    round_by,
    stochastic,
    widen,
)
from megatron.fake_quant.fused.triton_scales import encode_scale, finite, reciprocal
from megatron.fake_quant.random_bits import RANDOM_BITS

LARGEST = tl.constexpr((127 + 15) << 23)
#: Bits of 1.25 * 2^15, at which HiFloat8 overflows.
OVERFLOW = tl.constexpr((127 + 15) << 23 | 1 << 21)
SMALLEST = tl.constexpr((127 - 22) << 23)
HALF_SMALLEST = tl.constexpr((127 - 23) << 23)
SMALLEST_NORMAL_FLOAT16 = tl.constexpr((127 - 14) << 23)
UNITS_BELOW_SMALLEST = tl.constexpr(2.0 ** (RANDOM_BITS + 22))
TWO_TO_23 = tl.constexpr((127 + 23) << 23)
TWO_TO_82 = tl.constexpr(2.0**82)
BITS = tl.constexpr(RANDOM_BITS)
HALF_WAY = tl.constexpr(1 << (RANDOM_BITS - 1))


@compiled
def finite_amax(
    src: tl.tensor, amax: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, REPEATS: tl.constexpr
) -> tl.tensor:
    """Store the bits of the largest finite magnitude of `src` in `amax`, which must start as 0.

    Every program raises `amax` to the maximum of its own values.
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCK * REPEATS)
    left = tl.minimum(count - first, BLOCK * REPEATS).to(tl.int32)
    largest = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(REPEATS):
        place = i * BLOCK + tl.arange(0, BLOCK)
        bits = widen(tl.load(src + first + place, mask=place < left, other=0.0))
        largest = tl.maximum(largest, finite(bits & MAGNITUDE))
    tl.atomic_max(amax, tl.max(largest, axis=0))


@compiled
def scaled(
    sums: tl.tensor,
    dst: tl.tensor,
    scale_a: tl.tensor,
    scale_b: tl.tensor,
    alpha: tl.tensor,
    count: tl.tensor,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Multiply float32 sums by up to two scales in memory and by `alpha`, one after the other.

    The results are rounded to the dtype of `dst`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    mask = place < tl.minimum(count - first, BLOCK).to(tl.int32)
    value = tl.load(sums + first + place, mask=mask, other=0.0)
    if HAS_A:
        value *= tl.load(scale_a)
    if HAS_B:
        value *= tl.load(scale_b)
    if HAS_ALPHA:
        value *= alpha
    bits = tl.where(value != value, NAN, as_bits(value))
    tl.store(dst + first + place, narrow(bits, dst.dtype.element_ty, EXACT=False), mask=mask)


@compiled
def binades_from_one(magnitude: tl.tensor) -> tl.tensor:
    """Return 3 minus HiFloat8's number of mantissa bits at a magnitude of at least 2^-22."""
    distance = tl.abs((magnitude >> 23) - 127)
    return (
        tl.where(distance >= 4, 1, 0)
        + tl.where(distance >= 8, 1, 0)
        + tl.where(distance >= 16, 1, 0)
    )


@compiled
def nearest_hifloat8(magnitude: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Round a magnitude of 2^-23 or more to the nearest HiFloat8 value, ties away from zero.

    The result may exceed HiFloat8's largest number; the caller handles the overflow. The last bit
    of the float32 matters only in a tie, where it is 0. Setting it makes the neighbor away from
    zero the nearer one.
    """
    lifted = tl.maximum(tl.minimum(magnitude | 1, LIMIT), SMALLEST)
    exponent = as_float((lifted >> 23) | TWO_TO_23) - (8388608.0 + 127.0)
    # `square` is at least 8, 32, 128 or 512 if HiFloat8's mantissa has 3, 2, 1 or 0 bits at this
    # exponent. On a GPU, float32 arithmetic is twice as fast as comparing and adding integers.
    square = (exponent + exponent) * exponent + 8.0
    shift = as_float((as_bits(square) >> 1) & INFINITY) * TWO_TO_82  # 2^20 to 2^23
    return round_by(lifted, as_float(lifted & INFINITY) * shift)


@compiled
def carries_by_low_bits(magnitude: tl.tensor, way: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return whether HiFloat8's hybrid rounding rounds a value up because of its low bits.

    The rule is SR14 for float32 values and SR2 for other dtypes; see `hifloat8.py`. `way` is the
    distance from the neighbor below, in units of 2^-24 of the spacing.
    """
    if dtype == tl.float32:
        carries = (way >> (BITS - 14)) >= (magnitude & ((1 << 14) - 1))
    else:
        if dtype == tl.bfloat16:
            last = (magnitude >> 16) & 1
        else:
            small = magnitude < SMALLEST_NORMAL_FLOAT16
            units = (as_float(tl.where(small, magnitude, 0)) * (1 << 24)).to(tl.int32)
            last = tl.where(small, units, magnitude >> 13) & 1
        carries = (way >> (BITS - 2)) >= 2 * last + 1
    return carries


@compiled
def other_hifloat8(magnitude: tl.tensor, random: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round a magnitude to HiFloat8 stochastically, or in the hybrid mode if `random` is None.

    The result may exceed HiFloat8's largest number; the caller handles the overflow.
    """
    small = magnitude < SMALLEST
    shift = 20 + binades_from_one(tl.maximum(magnitude, SMALLEST))
    step = 1 << shift
    below = tl.where(small, 0, magnitude & -step)
    above = tl.where(small, SMALLEST, below + step)
    tiny = (as_float(tl.where(small, magnitude, 0)) * UNITS_BELOW_SMALLEST).to(tl.int32)
    way = tl.where(small, tiny, (magnitude - below) << (BITS - shift))
    if random is None:
        carries = carries_by_low_bits(magnitude, way, dtype)
        carries = (carries & (magnitude >= HALF_SMALLEST)) | (magnitude >= OVERFLOW)
        near = tl.abs((magnitude >> 23) - 127) < 4
        up = tl.where(near, way >= HALF_WAY, carries)
    else:
        up = way > random
    return tl.where(up, above, below)


@compiled
def element(
    magnitude: tl.tensor,
    random: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
) -> tl.tensor:
    """Round a magnitude to an `ElementFormat` stochastically, or to nearest if `random` is None."""
    magnitude = tl.minimum(magnitude, TOP)
    if random is None:
        rounded = nearest_even(magnitude, LOWEST, MANTISSA)
    else:
        rounded = stochastic(magnitude, random, LOWEST, MANTISSA)
    return rounded


@compiled
def hifloat8(
    magnitude: tl.tensor,
    random: tl.tensor,
    BEYOND: tl.constexpr,
    ROUNDING: tl.constexpr,
    SOURCE: tl.constexpr,
) -> tl.tensor:
    """Round a magnitude to HiFloat8 and replace an overflow by BEYOND.

    If ROUNDING is "nearest", the result for a magnitude below 2^-23 is undefined, and the caller
    must replace it by zero.
    """
    # Clamp at twice the largest number at most, because this magnitude overflows in every mode.
    LIMIT: tl.constexpr = min(BEYOND, LARGEST + (1 << 23))
    if ROUNDING == "nearest":
        rounded = nearest_hifloat8(magnitude, LIMIT)
    else:
        rounded = other_hifloat8(tl.minimum(magnitude, LIMIT), random, SOURCE)
    if BEYOND > LARGEST or ROUNDING != "nearest":
        rounded = tl.where(rounded > LARGEST, BEYOND, rounded)
    return rounded


@compiled
def elements(
    src: tl.tensor,
    dst: tl.tensor,
    amax: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    count: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    ONE_ZERO: tl.constexpr,
    BEYOND: tl.constexpr,
    TARGET: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    APART: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Quantize a tensor value by value, for a format without block scales.

    If TARGET is not 0, every value is multiplied by the factor `encode_scale` before rounding and
    by the reciprocal of this factor afterward.

    APART: True to leave out the multiplication by the reciprocal.
    BEYOND: bits of the magnitude that replaces an overflow of HiFloat8; 0 for an `ElementFormat`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    mask = place < tl.minimum(count - first, BLOCK).to(tl.int32)
    bits = widen(tl.load(src + first + place, mask=mask, other=0.0))
    magnitude = bits & MAGNITUDE
    if TARGET != 0:
        encode = encode_scale(tl.load(amax), TARGET)
        if POWER_OF_TWO:
            encode = as_float(as_bits(encode) & INFINITY)
        magnitude = as_bits(as_float(magnitude) * encode)
    random = None
    if ROUNDING == "stochastic":
        fours = random_fours(first + tl.arange(0, BLOCK // 4) * 4, key0, key1)
        random = tl.reshape(fours, [BLOCK])
    if BEYOND == 0:
        rounded = element(magnitude, random, LOWEST, TOP, MANTISSA)
        no_sign = rounded == 0 if ONE_ZERO else None
    else:
        SOURCE: tl.constexpr = src.dtype.element_ty if TARGET == 0 else tl.float32
        rounded = hifloat8(magnitude, random, BEYOND, ROUNDING, SOURCE)
        no_sign = magnitude < HALF_SMALLEST if ROUNDING == "nearest" else rounded == 0
    result = rounded
    if TARGET != 0 and not APART:
        result = as_bits(as_float(rounded) * reciprocal(encode))
    result |= bits & SIGN
    if no_sign is not None:
        result = tl.where(no_sign, 0, result)
    value = as_float(bits)
    result = tl.where(value != value, NAN, result)
    stored = narrow(result, src.dtype.element_ty, EXACT=TARGET == 0)
    tl.store(dst + first + place, stored, mask=mask)
