"""GPU kernels for formats with block scales, the counterpart of `numba_blocks.py`.

Each program holds a tile of values in registers. It reads and writes each value once, except that a
search (4/6) reads the values a second time. Maxima of groups that are larger than a tile, or larger
than the blocks in it, are computed by a separate kernel, which runs first.
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
    random_each,
    random_fours,
    stochastic,
    widen,
)
from megatron.fake_quant.fused.triton_scales import (
    better_e4m3,
    divisor,
    e4m3,
    e8m0,
    encode_scale,
    finite,
    multiplier,
    pair_bytes,
    power,
    reciprocal,
    wanted_e4m3,
)


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
def corner(
    rows: tl.tensor,
    columns: tl.tensor,
    bands: tl.tensor,
    tiles: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the index of the program's matrix, and the position of its tile in the matrix.

    The position consists of the first row, the first column, and the numbers of rows and columns
    from there on, at most HEIGHT and WIDTH. Each matrix is divided into `bands` rows of `tiles`
    tiles.
    """
    program = tl.program_id(0)
    band = program // tiles
    row = (band % bands).to(tl.int64) * HEIGHT
    column = (program % tiles).to(tl.int64) * WIDTH
    below = tl.minimum(rows - row, HEIGHT).to(tl.int32)
    left = tl.minimum(columns - column, WIDTH).to(tl.int32)
    return (band // bands).to(tl.int64), row, column, below, left


@compiled
def heads(
    below: tl.tensor,
    left: tl.tensor,
    ROWWISE: tl.constexpr,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
) -> tl.tensor:
    """Return the position of the first value in each row or column of each block of a tile.

    The position is a row and a column in the tile, and a mask that is False beyond the matrix.

    ROWWISE: True for the rows of blocks; False for their columns.
    """
    block = tl.arange(0, T)[None, :, None] * WIDTH
    if ROWWISE:
        row = tl.arange(0, A)[:, None, None]
        column = block
        exists = (row < below) & (block < left)
    else:
        row = tl.zeros([1, 1, 1], tl.int32)
        within = tl.arange(0, B)[None, None, :]
        column = block + within
        exists = (within < WIDTH) & (column < left)
    return row, column, exists


@compiled
def group_place(
    matrix: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    groups: tl.tensor,
    ROWWISE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Return the position, among the maxima of groups, of the group that holds a value.

    There are `groups` groups of GROUP values along each row (ROWWISE) or along each column; GROUP
    is 0 if a group is a whole row or column.
    """
    if ROWWISE:
        place = (matrix * rows + row) * groups
        if GROUP != 0:
            place += column // GROUP
    else:
        place = matrix * groups
        if GROUP != 0:
            place += row // GROUP
        place = place * columns + column
    return place


@compiled
def maxima(
    src: tl.tensor,
    amax: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    bands: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    FINITE: tl.constexpr,
    ROWWISE: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
) -> tl.tensor:
    """Store the bits of the largest magnitude of each group in `amax`, which must start as zeros.

    Several programs may hold parts of one group; each raises the group's maximum to that of its
    part. The result does not depend on their order. See `blocks` for tiles and `group_place` for
    the order of groups.

    FINITE: True to ignore NaN and Inf.
    """
    TALL: tl.constexpr = A if HEIGHT == 1 else HEIGHT
    matrix, top, start, below, left = corner(rows, columns, bands, tiles, TALL, T * WIDTH)
    row = tl.arange(0, A)[:, None, None]
    within = tl.arange(0, B)[None, None, :]
    column = tl.arange(0, T)[None, :, None] * WIDTH + within
    mask = (row < below) & (within < WIDTH) & (column < left)
    first = (matrix * rows + top) * columns + start
    place = row.to(tl.int64) * columns + column
    magnitude = widen(tl.load(src + first + place, mask=mask, other=0.0)) & MAGNITUDE
    if FINITE:
        magnitude = finite(magnitude)
    largest = tl.max(magnitude, axis=2 if ROWWISE else 0, keep_dims=True)
    line, head, exists = heads(below, left, ROWWISE, WIDTH, A, T, B)
    group = group_place(matrix, top + line, start + head, rows, columns, groups, ROWWISE, GROUP)
    # A later kernel reads the maxima, so the order of memory operations does not matter here.
    tl.atomic_max(amax + group, largest, mask=exists, sem="relaxed")


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
    groups: tl.tensor,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    ONE_ZERO: tl.constexpr,
    KIND: tl.constexpr,
    EMAX: tl.constexpr,
    CARRY_FROM: tl.constexpr,
    SHARE: tl.constexpr,
    INVERSE_SHARE: tl.constexpr,
    REACHED: tl.constexpr,
    TARGET: tl.constexpr,
    SMALLEST_OUTER: tl.constexpr,
    SEARCH: tl.constexpr,
    APART: tl.constexpr,
    RANDOM: tl.constexpr,
    AMAX: tl.constexpr,
    ROWWISE: tl.constexpr,
    GROUP: tl.constexpr,
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

    LOWEST, TOP, MANTISSA, ONE_ZERO: element type; see `triton_elementwise.elements`.
    KIND: number type of block scales, in lower case; or "pairs" for shared microexponents, whose
        smallest scale byte is EMAX.
    EMAX, CARRY_FROM, SHARE, INVERSE_SHARE: rule and headroom of E8M0 scales.
    REACHED: number to which the maximum of a block is mapped; see `wanted_e4m3`.
    TARGET: number to which the outer scale maps a maximum; 0 if there is no outer scale.
    SEARCH: "mae", "mse" or "none"; see `better_e4m3`.
    APART: True to leave the scale of the tensor or of whole rows out of the results.
    RANDOM: 0 to round to nearest; see `drawn` for other values.
    AMAX: content of `amax`: "none"; "tensor", the maximum of the tensor; "groups", the maxima of
        the groups that share an outer scale; "blocks", the maxima of blocks that are larger than
        a tile. In the last case, HEIGHT and WIDTH are those of the tile, and T is 1.
    ROWWISE: True if blocks run along rows; False if they run along columns.
    GROUP: see `group_place`.
    """
    TALL: tl.constexpr = A if HEIGHT == 1 else HEIGHT
    matrix, top, start, below, left = corner(rows, columns, bands, tiles, TALL, T * WIDTH)
    row = tl.arange(0, A)[:, None, None]
    within = tl.arange(0, B)[None, None, :]
    column = tl.arange(0, T)[None, :, None] * WIDTH + within
    mask = (row < below) & (within < WIDTH) & (column < left)
    first = (matrix * rows + top) * columns + start
    place = row.to(tl.int64) * columns + column
    bits = widen(tl.load(src + first + place, mask=mask, other=0.0))

    line, head, exists = heads(below, left, ROWWISE, WIDTH, A, T, B)
    outer = None
    if AMAX == "tensor":
        outer = tl.load(amax)
    if AMAX == "groups" or AMAX == "blocks":
        group = group_place(matrix, top + line, start + head, rows, columns, groups, ROWWISE, GROUP)
        outer = tl.load(amax + group, mask=exists, other=0)
    if AMAX == "blocks":
        largest = outer
    else:
        largest = tl.max(bits & MAGNITUDE, axis=2, keep_dims=True)
        if HEIGHT > 1:
            largest = tl.max(largest, axis=0, keep_dims=True)

    decode = None
    if KIND == "e8m0":
        byte = e8m0(largest, EMAX, CARRY_FROM)
        down, up = power(254 - byte), power(byte)
        if SHARE != 1.0:
            down *= SHARE
            decode = INVERSE_SHARE
    elif KIND == "pairs":
        byte = pair_bytes(largest, bits, EMAX, ROWWISE)
        down, up = power(254 - byte), power(byte)
    elif KIND == "fp32":
        down = encode_scale(largest, REACHED)
        up = reciprocal(down)
    elif KIND == "e4m3":
        encode = None
        if TARGET != 0:
            encode = encode_scale(outer, TARGET)
            decode = reciprocal(encode)
        wanted = wanted_e4m3(largest, encode, REACHED)
        if SEARCH == "none":
            up = e4m3(wanted)
        else:
            up = better_e4m3(
                wanted,
                decode,
                outer,
                src + first + line.to(tl.int64) * columns + head,
                exists,
                1 if ROWWISE else columns,
                left - head if ROWWISE else below,
                LOWEST,
                TOP,
                MANTISSA,
                TARGET,
                SEARCH,
                WIDTH if ROWWISE else HEIGHT,
                0 if ROWWISE else 2,
                HEIGHT if ROWWISE else WIDTH,
            )
        down = multiplier(up, decode)
    else:
        up = divisor(largest, outer, KIND, REACHED, TARGET, SMALLEST_OUTER)

    if KIND == "ue5m3" or KIND == "e6m2":
        scaled = tl.div_rn(as_float(bits & MAGNITUDE), up)
    else:
        scaled = as_float(bits & MAGNITUDE) * down
    magnitude = tl.minimum(as_bits(scaled), TOP)
    if RANDOM == 0:
        rounded = nearest_even(magnitude, LOWEST, MANTISSA)
    else:
        random = drawn(first, columns, place, key0, key1, RANDOM)
        rounded = stochastic(magnitude, random, LOWEST, MANTISSA)
    value = as_float(rounded)
    if not (APART and KIND == "fp32"):
        value *= up
    if decode is not None and not APART:
        value *= decode
    result = as_bits(value) | (bits & SIGN)
    if ONE_ZERO:
        result = tl.where(rounded == 0, 0, result)
    result = tl.where(largest >= INFINITY, NAN, result)
    EXACT: tl.constexpr = (KIND == "e8m0" and SHARE == 1.0) or KIND == "pairs"
    stored = narrow(result, src.dtype.element_ty, EXACT=EXACT)
    tl.store(dst + first + place, stored, mask=mask)
