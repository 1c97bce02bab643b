"""GPU kernel for formats with block scales, the counterpart of `numba_blocks.py`.

Each program holds a tile of values in registers. It reads and writes each value once.
"""

import triton.language as tl

from megatron.fake_quant.float8_scales import SIXTH as SIXTH_TENSOR
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
    random_each,
    random_fours,
    stochastic,
    widen,
)
from megatron.fake_quant.fused.triton_elementwise import encode_scale

FRACTION = tl.constexpr(0x7FFFFF)
SMALLEST_NORMAL = tl.constexpr(1 << 23)
HALF_POWER = tl.constexpr(1 << 22)  #: bits of 2^-127
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
SIXTH = tl.constexpr(SIXTH_TENSOR.item())
E4M3_LOWEST = tl.constexpr((127 - 6) << 23)
E4M3_TOP = tl.constexpr((127 + 8) << 23 | 6 << 20)


@compiled
def power(byte: tl.tensor) -> tl.tensor:
    """Return 2^(byte - 127) as float32."""
    return as_float(tl.where(byte == 0, HALF_POWER, byte << 23))


@compiled
def e8m0(amax: tl.tensor, EMAX: tl.constexpr, CARRY_FROM: tl.constexpr) -> tl.tensor:
    """Return the E8M0 byte of a block's scale from its finite maximum; see `mx.scale_bytes`."""
    subnormal = amax < SMALLEST_NORMAL
    lifted = tl.where(subnormal, as_bits(as_float(amax) * 4294967296.0), amax)  # times 2^32
    exponent = (lifted >> 23) - tl.where(subnormal, 32, 0)
    byte = exponent - EMAX + tl.where((lifted & FRACTION) >= CARRY_FROM, 1, 0)
    return tl.where(amax == 0, 0, tl.minimum(tl.maximum(byte, 0), 254))


@compiled
def e4m3(amax: tl.tensor, encode: tl.tensor, decode: tl.tensor) -> tl.tensor:
    """Return the multiplier and the scale for an NVFP4 block; see `float8_scales.py`."""
    scaled = tl.minimum(as_bits(as_float(amax) * (encode * SIXTH)), E4M3_TOP)
    scale = as_float(nearest_even(scaled, E4M3_LOWEST, 3))
    product = scale * decode
    multiplier = tl.div_rn(tl.full(product.shape, 1.0, tl.float32), product)
    return tl.minimum(multiplier, FLOAT32_MAX), scale


@compiled
def drawn(
    first: tl.tensor,
    columns: tl.tensor,
    place: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    RANDOM: tl.constexpr,
) -> tl.tensor:
    """Return random bits for the stochastic rounding of the values in a tile.

    RANDOM: 4 if every four neighbors in a row share one block of random words, otherwise 1.
    """
    A: tl.constexpr = place.shape[0]
    COLUMNS: tl.constexpr = place.shape[1] * place.shape[2]
    if RANDOM == 4:
        row = tl.arange(0, A)[:, None].to(tl.int64) * columns
        fours = first + row + tl.arange(0, COLUMNS // 4)[None, :] * 4
        random = tl.reshape(random_fours(fours, key0, key1), place.shape)
    else:
        random = random_each(first + place, key0, key1)
    return random


@compiled
def blocks(
    src: tl.tensor,
    dst: tl.tensor,
    amax: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    bands: tl.tensor,
    tiles: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    EMAX: tl.constexpr,
    ONE_ZERO: tl.constexpr,
    CARRY_FROM: tl.constexpr,
    TARGET: tl.constexpr,
    RANDOM: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
) -> tl.tensor:
    """Quantize consecutive `[rows, columns]` matrices in blocks of HEIGHT x WIDTH values.

    A tile `[A, T, B]` holds T blocks side by side; A and B are their height and width, rounded up
    to powers of two. If HEIGHT is 1, the tile holds A rows of T blocks instead. Each matrix is
    divided into `bands` rows of `tiles` tiles.

    TARGET: target of the tensor's scale for NVFP4; 0 for E8M0 scales.
    RANDOM: 0 to round to nearest; see `drawn` for other values.
    """
    program = tl.program_id(0)
    band = program // tiles
    TALL: tl.constexpr = A if HEIGHT == 1 else HEIGHT
    first_row = (band % bands).to(tl.int64) * TALL
    first_column = (program % tiles).to(tl.int64) * (T * WIDTH)
    first = ((band // bands).to(tl.int64) * rows + first_row) * columns + first_column
    row = tl.arange(0, A)[:, None, None]
    within = tl.arange(0, B)[None, None, :]
    column = tl.arange(0, T)[None, :, None] * WIDTH + within
    left = tl.minimum(columns - first_column, T * WIDTH).to(tl.int32)
    below = tl.minimum(rows - first_row, TALL).to(tl.int32)
    mask = (row < below) & (within < WIDTH) & (column < left)
    place = row.to(tl.int64) * columns + column
    bits = widen(tl.load(src + first + place, mask=mask, other=0.0))

    largest = tl.max(bits & MAGNITUDE, axis=2, keep_dims=True)
    if HEIGHT > 1:
        largest = tl.max(largest, axis=0, keep_dims=True)
    if TARGET == 0:
        byte = e8m0(largest, EMAX, CARRY_FROM)
        down, up = power(254 - byte), power(byte)
    else:
        encode = encode_scale(amax, TARGET)
        decode = tl.div_rn(tl.full([], 1.0, tl.float32), encode)
        down, up = e4m3(largest, encode, decode)
    magnitude = tl.minimum(as_bits(as_float(bits & MAGNITUDE) * down), TOP)
    if RANDOM == 0:
        rounded = nearest_even(magnitude, LOWEST, MANTISSA)
    else:
        random = drawn(first, columns, place, key0, key1, RANDOM)
        rounded = stochastic(magnitude, random, LOWEST, MANTISSA)
    value = as_float(rounded) * up
    if TARGET != 0:
        value *= decode
    result = as_bits(value) | (bits & SIGN)
    if ONE_ZERO:
        result = tl.where(rounded == 0, 0, result)
    result = tl.where(largest >= INFINITY, NAN, result)
    stored = narrow(result, src.dtype.element_ty, EXACT=TARGET == 0)
    tl.store(dst + first + place, stored, mask=mask)
