"""Block scales on the GPU: factors that scale values down to the element type and up again.

The order of operations is that of `mx.py`, `float8_scales.py`, `float32_scales.py` and
`pair_exponents.py`, so that every result is equal bit for bit. A GPU and its compiler can break
this in four ways, none of which Triton's interpreter shows:

- A product and a sum become one fused operation, which rounds once instead of twice. Launches
  therefore set `enable_fp_fusion=False`.
- `/` on float32 tensors is an approximation. Every division here is `tl.div_rn`, which rounds as
  IEEE 754 requires.
- Subnormal numbers become zero under `.ftz`. Triton does not request this by default. Small blocks
  need subnormals, for instance as the reciprocal of an E8M0 scale of 2^127.
- `tl.sum` adds in an order that depends on the layout of the registers. Here it adds no more than
  two numbers at a time, and longer sums are loops. Maxima do not depend on the order; they are
  computed on integers, so that a NaN is larger than every number.

In all functions, `largest` holds the bits of the maximum of each block. If it is NaN or Inf, the
result is arbitrary, and the kernel writes NaN instead.
"""

import triton.language as tl

from megatron.fake_quant.fused.triton_bits import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_float,
    compiled,
    nearest_even,
    widen,
)
from megatron.fake_quant.scalings import float8_scales

FRACTION = tl.constexpr(0x7FFFFF)
SMALLEST_NORMAL = tl.constexpr(1 << 23)
SMALLEST_FLOAT32 = tl.constexpr(2.0**-126)  #: smallest normal float32
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
HALF_POWER = tl.constexpr(1 << 22)  #: bits of 2^-127
SIXTH = tl.constexpr(float8_scales.SIXTH.item())
WIDER = tl.constexpr(float8_scales.WIDER)
#: Bits of the smallest normal number and of the largest number of E4M3.
E4M3_LOWEST = tl.constexpr((127 - 6) << 23)
E4M3_TOP = tl.constexpr((127 + 8) << 23 | 6 << 20)
#: Bits of the smallest scale, the smallest normal number and the largest number of UE5M3 and E6M2.
UE5M3_LEAST = tl.constexpr((127 - 17) << 23)
UE5M3_LOWEST = tl.constexpr((127 - 14) << 23)
UE5M3_TOP = tl.constexpr((127 + 16) << 23 | 6 << 20)
E6M2_LEAST = tl.constexpr((127 - 48) << 23)
E6M2_TOP = tl.constexpr((127 + 15) << 23 | 1 << 22)


@compiled
def reciprocal(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(tl.full([], 1.0, tl.float32), x)


@compiled
def divided_by(x: tl.tensor, DIVISOR: tl.constexpr) -> tl.tensor:
    return tl.div_rn(x, tl.full([], DIVISOR, tl.float32))


@compiled
def encode_scale(largest: tl.tensor, TARGET: tl.constexpr) -> tl.tensor:
    """Return TARGET / amax, clamped to normal numbers; see `tensor_scale.divide_by`."""
    quotient = tl.div_rn(tl.full([], TARGET, tl.float32), as_float(largest))
    held = tl.minimum(tl.maximum(quotient, SMALLEST_FLOAT32), FLOAT32_MAX)
    return tl.where(largest == 0, 1.0, held)


# E8M0 scales, with or without an exponent bit for each pair of values.


@compiled
def power(byte: tl.tensor) -> tl.tensor:
    """Return 2^(byte - 127) as float32."""
    return as_float(tl.where(byte == 0, HALF_POWER, byte << 23))


@compiled
def e8m0(largest: tl.tensor, EMAX: tl.constexpr, CARRY_FROM: tl.constexpr) -> tl.tensor:
    """Return the E8M0 byte of each block's scale; see `mx.scale_bytes`."""
    subnormal = largest < SMALLEST_NORMAL
    lifted = tl.where(subnormal, as_bits(as_float(largest) * 4294967296.0), largest)  # times 2^32
    exponent = (lifted >> 23) - tl.where(subnormal, 32, 0)
    byte = exponent - EMAX + tl.where((lifted & FRACTION) >= CARRY_FROM, 1, 0)
    return tl.where(largest == 0, 0, tl.minimum(tl.maximum(byte, 0), 254))


@compiled
def pair_bytes(
    largest: tl.tensor, bits: tl.tensor, LEAST: tl.constexpr, ROWWISE: tl.constexpr
) -> tl.tensor:
    """Return the E8M0 byte of each value's scale, which depends on the pair of the value.

    See `pair_exponents.py`. `bits` is a tile `[A, T, B]`, and LEAST is the smallest byte.

    ROWWISE: True if pairs are neighbors in a row; False if they are neighbors in a column.
    """
    A: tl.constexpr = bits.shape[0]
    T: tl.constexpr = bits.shape[1]
    B: tl.constexpr = bits.shape[2]
    magnitude = bits & MAGNITUDE
    if ROWWISE:
        pairs = tl.reshape(magnitude, [A, T, B // 2, 2])
        larger = tl.broadcast_to(tl.max(pairs, axis=3, keep_dims=True), [A, T, B // 2, 2])
    else:
        pairs = tl.reshape(magnitude, [A // 2, 2, T, B])
        larger = tl.broadcast_to(tl.max(pairs, axis=1, keep_dims=True), [A // 2, 2, T, B])
    shared = largest >> 23
    lower = tl.where((tl.reshape(larger, [A, T, B]) >> 23) < shared, 1, 0)
    return tl.maximum(shared - lower, LEAST)


# 8-bit floating-point scales.


@compiled
def e4m3(wanted: tl.tensor) -> tl.tensor:
    """Return the E4M3 number nearest to `wanted`, at most 448."""
    return as_float(nearest_even(tl.minimum(as_bits(wanted), E4M3_TOP), E4M3_LOWEST, 3))


@compiled
def wanted_e4m3(largest: tl.tensor, encode: tl.tensor, REACHED: tl.constexpr) -> tl.tensor:
    """Return each block's E4M3 scale before it is rounded.

    encode: factor of the outer scale; None if there is none.
    REACHED: number to which the maximum of a block is mapped; 0 for NVFP4's order of operations.
    """
    if REACHED == 0:
        wanted = as_float(largest) * (encode * SIXTH)
    else:
        wanted = divided_by(as_float(largest), REACHED)
        if encode is not None:
            wanted *= encode
    return wanted


@compiled
def multiplier(scale: tl.tensor, decode: tl.tensor) -> tl.tensor:
    """Return the factor by which values with an E4M3 scale are multiplied before rounding.

    decode: outer scale; None if there is none.
    """
    product = scale
    if decode is not None:
        product = scale * decode
    return tl.minimum(reciprocal(product), FLOAT32_MAX)


@compiled
def unsigned_scale(wanted: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the UE5M3 or E6M2 number nearest to `wanted`; neither of these scales can be zero."""
    if KIND == "ue5m3":
        bits = tl.minimum(tl.maximum(as_bits(wanted), UE5M3_LEAST), UE5M3_TOP)
        scale = nearest_even(bits, UE5M3_LOWEST, 3)
    else:
        bits = tl.minimum(tl.maximum(as_bits(wanted), E6M2_LEAST), E6M2_TOP)
        scale = nearest_even(bits, E6M2_LEAST, 2)
    return as_float(scale)


@compiled
def divisor(
    largest: tl.tensor,
    amax: tl.tensor,
    KIND: tl.constexpr,
    REACHED: tl.constexpr,
    TARGET: tl.constexpr,
    SMALLEST_OUTER: tl.constexpr,
) -> tl.tensor:
    """Return the UE5M3 or E6M2 scale of each block times its outer scale.

    amax: bits of the largest finite magnitude under an outer scale; not read if TARGET is 0.
    """
    if TARGET == 0:
        factor = unsigned_scale(divided_by(as_float(largest), REACHED), KIND)
    else:
        outer = tl.maximum(divided_by(as_float(amax), TARGET), SMALLEST_OUTER)
        wanted = divided_by(tl.div_rn(as_float(largest), outer), REACHED)
        factor = unsigned_scale(wanted, KIND) * outer
    return factor


# The search between two E4M3 scales ("4/6").


@compiled
def error(
    magnitude: tl.tensor,
    scale: tl.tensor,
    factor: tl.tensor,
    amax: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    TARGET: tl.constexpr,
    SEARCH: tl.constexpr,
) -> tl.tensor:
    """Return the error of one value of each block under a scale; see `float8_scales._error`.

    factor: factor that belongs to the scale; see `multiplier`.
    """
    clamped = tl.minimum(as_bits(magnitude * factor), TOP)
    value = as_float(nearest_even(clamped, LOWEST, MANTISSA)) * scale
    if TARGET != 0:
        value = divided_by(value * as_float(amax), TARGET)
    difference = value - magnitude
    return difference * difference if SEARCH == "mse" else tl.abs(difference)


@compiled
def added_in_halves(total: tl.tensor, AXIS: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Sum the COUNT numbers along an axis of `[A, T, B]` by repeated halving.

    The first half is added to the second half until one sum is left. The sum of two numbers does
    not depend on their order.
    """
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        if AXIS == 0:
            split = tl.reshape(total, [2, HALF, total.shape[1], total.shape[2]])
            total = added_in_halves(tl.sum(split, axis=0), AXIS, HALF)
        else:
            split = tl.reshape(total, [total.shape[0], total.shape[1], 2, HALF])
            total = added_in_halves(tl.sum(split, axis=2), AXIS, HALF)
    return total


@compiled
def better_e4m3(
    wanted: tl.tensor,
    decode: tl.tensor,
    amax: tl.tensor,
    values: tl.tensor,
    mask: tl.tensor,
    step: tl.tensor,
    limit: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    TARGET: tl.constexpr,
    SEARCH: tl.constexpr,
    COUNT: tl.constexpr,
    AXIS: tl.constexpr,
    HALVES: tl.constexpr,
) -> tl.tensor:
    """Return, for each block, the better of the two E4M3 scales that `float8_scales.py` compares.

    The errors of a block are added in the order of the reference: COUNT neighbors are added one by
    one, in a loop that reads them from memory again (they are in the cache). A reduction of the
    tile in registers would add them in a different order.

    values: pointers to the first of the neighbors; `mask` is True where it exists, `step` is the
        distance between two neighbors, and the first `limit` of them exist.
    HALVES: number of rows or columns of a block, whose sums along AXIS are added in halves.
    """
    six, four = e4m3(wanted), e4m3(wanted * WIDER)
    down_six, down_four = multiplier(six, decode), multiplier(four, decode)
    error_six = tl.zeros(mask.shape, tl.float32)
    error_four = tl.zeros(mask.shape, tl.float32)
    for i in range(COUNT):
        bits = widen(tl.load(values, mask=mask & (i < limit), other=0.0))
        values += step
        value = as_float(bits & MAGNITUDE)
        error_six += error(value, six, down_six, amax, LOWEST, TOP, MANTISSA, TARGET, SEARCH)
        error_four += error(value, four, down_four, amax, LOWEST, TOP, MANTISSA, TARGET, SEARCH)
    error_six = added_in_halves(error_six, AXIS, HALVES)
    error_four = added_in_halves(error_four, AXIS, HALVES)
    return tl.where(error_four < error_six, four, six)


@compiled
def finite(magnitude: tl.tensor) -> tl.tensor:
    """Return the bits of magnitudes, with 0 for NaN and Inf."""
    return tl.where(magnitude < INFINITY, magnitude, 0)
