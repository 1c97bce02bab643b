"""CPU kernel for formats with `BlockScaling`.

It makes one pass over memory and allocates no temporary tensors. A tensor is a stack of matrices,
`[outer, n, inner]`, and a block has `height` rows and `width` columns of one of them. A tile has
one row of blocks and at most `TILE` columns, unless a single block is wider. Scales are computed
for all blocks of a tile at once and then copied to one array entry per column, so that one loop
covers a row of many blocks.
"""

from typing import Any, NamedTuple

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    ONE,
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
    stochastic,
    widen,
    with_sign,
)
from megatron.fake_quant.fused.numba_columns import TILE, block_maxima, column_maxima, expand
from megatron.fake_quant.fused.numba_compile import called, inlined
from megatron.fake_quant.fused.numba_scales import DIVIDED, WIDER, block_scales, outer_scales
from megatron.fake_quant.fused.numba_search import add_errors


class Tiling(NamedTuple):
    """Shape of the blocks of a tensor `[outer, n, inner]`, and how the tensor is cut into tiles.

    A tile has a row of whole blocks, unless blocks are divided. Then `rows` is less than `height`,
    or `columns` is less than `width`, and the largest magnitude of each block is found beforehand.
    """

    height: int  #: rows per block
    width: int  #: columns per block
    rows: int  #: rows per tile
    columns: int  #: columns per tile, a multiple of `width` unless blocks are divided
    strips: int  #: number of parts into which the columns are cut, for more threads
    #: True if blocks run along the last axis. The order in which a search for the best scale adds
    #: up the errors of a block depends on it.
    along_rows: bool
    divided: bool  #: True if a tile may have a part of a block
    #: an outer scale applies to 2^row_shift rows and 2^column_shift columns of a matrix
    row_shift: int = 0
    column_shift: int = 0


class Tile(NamedTuple):
    """Position of a tile in a matrix, and its number of blocks."""

    first: Any
    last: Any  #: first row after the tile
    left: Any
    right: Any  #: first column after the tile
    blocks: Any  #: number of blocks


@inlined
def scaled_up(rounded: Any, bits: Any, up: Any, decode: Any, element: Any) -> Any:
    """Multiply a rounded magnitude by its scales and restore the sign of `bits`.

    Return the bits of the result.
    """
    sign = np.int32(bits & SIGN)
    if rounded == 0:
        sign = np.int32(sign & element.zero_sign)
    return np.int32(as_bits(np.float32(as_float(rounded) * up) * decode) | sign)


@inlined
def scaled_down(bits: Any, down: Any, element: Any) -> Any:
    """Return the bits of a value's scaled magnitude, clamped to the element type's maximum."""
    return min(as_bits(as_float(np.int32(bits & MAGNITUDE)) * down), element.top)


@inlined
def divided(bits: Any, divisor: Any, element: Any) -> Any:
    """Return the bits of a value's magnitude / `divisor`, clamped to the type's largest number."""
    return min(as_bits(as_float(np.int32(bits & MAGNITUDE)) / divisor), element.top)


@inlined
def line(
    src: Any,
    dst: Any,
    down: Any,
    up: Any,
    decode: Any,
    element: Any,
    rule: Any,
    random: Any,
    index: Any,
    buffer: Any,
) -> Any:
    """Quantize consecutive values; `down`, `up` and `decode` hold one factor per value.

    `index` is the position of the first value in the tensor. One call covers many blocks, because
    starting a loop takes time.
    """
    if random.on:
        drawn = buffer[fill_random(buffer, index, len(src), random) :]
        for j in range(len(src)):
            bits = widen(src[j])
            scaled = scaled_down(bits, down[j], element)
            if rule.kind == DIVIDED:
                scaled = divided(bits, down[j], element)
            rounded = stochastic(scaled, element, drawn[j])
            dst[j] = narrow(scaled_up(rounded, bits, up[j], decode[j], element), dst[j])
    elif rule.kind == DIVIDED:
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = nearest(as_float(bits) / down[j], element)
            value = np.float32(np.float32(rounded * up[j]) * decode[j])
            dst[j] = narrow(with_sign(value, bits, element), dst[j])
    else:
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = nearest(as_float(bits) * down[j], element)
            value = np.float32(np.float32(rounded * up[j]) * decode[j])
            dst[j] = narrow(with_sign(value, bits, element), dst[j])


@kernel
def group_maxima(
    src: Any, rows: Any, columns: Any, strips: Any, finite: Any, out: Any, start: Any, stop: Any
) -> None:
    """Compute the largest magnitude of each group, such as the values that share an outer scale.

    A group has `rows` x `columns` values of a matrix of `src`, `[outer, n, inner]`. `columns`
    divides `TILE` or is at least `inner`. `start` and `stop` count as in `blocks`. `out` must be
    zero.

    finite: True if Inf and NaN are ignored.
    """
    n, inner = src.shape[1], src.shape[2]
    bands = (n + rows - 1) // rows
    strip = (inner + TILE * strips - 1) // (TILE * strips) * TILE
    maxima, scratch = np.empty(TILE, src.dtype), np.empty(TILE, src.dtype)
    width = min(columns, TILE)
    for item in range(start, stop):
        outer, band = item // strips // bands, item // strips % bands
        first, begin = band * rows, item % strips * strip
        for left in range(begin, min(begin + strip, inner), TILE):
            right = min(left + TILE, inner)
            maxima[:] = 0
            for i in range(first, min(first + rows, n)):
                read = src[outer, i, left:right]
                if finite:
                    for j in range(len(read)):
                        maxima[j] = max(maxima[j], finite_magnitude(read[j]))
                else:
                    for j in range(len(read)):
                        maxima[j] = max(maxima[j], magnitude(read[j]))
            count = (right - left + width - 1) // width
            block_maxima(maxima, scratch, out[outer, band, left // columns :], width, count)


@inlined
def tile_maxima(matrix: Any, tile: Any, columns: Any, scratch: Any, maxima: Any, width: Any) -> Any:
    """Compute the largest magnitude of each block of a tile, and return that of the tile."""
    for b in range(tile.blocks):
        maxima[b] = 0
    for left in range(tile.left, tile.right, TILE):
        right, padded = min(left + TILE, tile.right), min(tile.blocks * width, TILE)
        column_maxima(matrix, tile, left, right, columns, padded)
        block_maxima(columns, scratch, maxima, width, tile.blocks)
    largest = ZERO
    for b in range(tile.blocks):
        largest = max(largest, maxima[b])
    return largest


@inlined
def given_maxima(whole: Any, first: Any, maxima: Any, count: Any) -> Any:
    """Copy the largest magnitudes of the blocks of a tile, and return the largest of them."""
    largest = ZERO
    for b in range(count):
        maxima[b] = whole[first + b]
        largest = max(largest, maxima[b])
    return largest


@called
def set_factors(
    maxima: Any,
    encode: Any,
    decode: Any,
    ratio: Any,
    down: Any,
    up: Any,
    all_down: Any,
    all_up: Any,
    scratch: Any,
    width: Any,
    count: Any,
    element: Any,
    rule: Any,
) -> Any:
    """Compute the factors of each block of a tile, and copy them to the block's columns."""
    block_scales(maxima, encode, decode, ratio, down, up, count, element, rule)
    expand(down, all_down, scratch, width, count)
    expand(up, all_up, scratch, width, count)


@inlined
def fill_special(matrix: Any, tile: Any, maxima: Any, width: Any) -> Any:
    """Set each block of a tile to NaN if the block contains an Inf or a NaN."""
    for b in range(tile.blocks):
        if maxima[b] >= INFINITY:
            left = tile.left + b * width
            for i in range(tile.first, tile.last):
                for j in range(left, min(left + width, tile.right)):
                    matrix[i, j] = narrow(NAN, matrix[i, j])


@kernel
def blocks(
    src: Any,
    dst: Any,
    whole: Any,
    most: Any,
    tiling: Any,
    element: Any,
    rule: Any,
    random: Any,
    start: Any,
    stop: Any,
) -> None:
    """Quantize the items `start` to `stop - 1` of an `[outer, n, inner]` array.

    An item is a strip of a row of blocks. The rows of blocks are counted from the first to the last
    matrix.

    whole: `[matrices, rows, columns]` float32 bits of the largest magnitude of each block, if
        `tiling.divided`.
    most: `[matrices, rows, columns]` float32 bits of the largest finite magnitude of the values
        that share each outer scale, if `rule.grouped`.
    """
    n, inner = src.shape[1], src.shape[2]
    height, width, span = tiling.height, tiling.width, tiling.columns
    rows, limit = tiling.rows, (span + width - 1) // width
    bands = (n + rows - 1) // rows
    strip = (inner + span * tiling.strips - 1) // (span * tiling.strips) * span
    columns, folded = np.empty(TILE, src.dtype), np.empty(TILE, src.dtype)
    maxima, amax = np.empty(limit, np.int32), np.full(limit, rule.amax)
    encode, decode = np.full(limit, rule.encode), np.full(limit, rule.decode)
    ratio, down, up = np.full(limit, ONE), np.full(limit, ONE), np.full(limit, ONE)
    last = ONE if rule.apart else rule.decode
    all_amax, all_decode = np.full(TILE, rule.amax), np.full(TILE, last)
    all_down, all_up = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    scratch, error = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    buffer = np.empty(TILE + 7, np.int32)
    sums = np.empty((2, rows, limit) if tiling.along_rows else (2, 1, span), np.float32)
    for item in range(start, stop):
        outer, first = item // tiling.strips // bands, item // tiling.strips % bands * rows
        last, begin = min(first + rows, n), item % tiling.strips * strip
        read, written = src[outer], dst[outer]
        for left in range(begin, min(begin + strip, inner), span):
            right = min(left + span, inner)
            count = (right - left + width - 1) // width
            tile = Tile(first, last, left, right, count)
            if tiling.divided:
                largest = given_maxima(whole[outer, first // height], left // width, maxima, count)
            else:
                largest = tile_maxima(read, tile, columns, folded, maxima, width)
            if rule.grouped:
                groups = most[outer, first >> tiling.row_shift]
                for b in range(count):
                    amax[b] = as_float(groups[(left + b * width) >> tiling.column_shift])
                outer_scales(amax, encode, decode, count, rule)
                expand(decode, all_decode, scratch, width, count)
                expand(amax, all_amax, scratch, width, count)
            # A search quantizes with each of two scales, and then again with the better one.
            for c in range(3 if rule.search > 0 else 1):
                for b in range(count):
                    better = c == 2 and sums[1, 0, b] < sums[0, 0, b]
                    ratio[b] = WIDER if c == 1 or better else ONE
                set_factors(
                    maxima,
                    encode,
                    decode,
                    ratio,
                    down,
                    up,
                    all_down,
                    all_up,
                    scratch,
                    width,
                    count,
                    element,
                    rule,
                )
                if rule.search > 0 and c < 2:
                    add_errors(
                        read,
                        tile,
                        all_down,
                        all_up,
                        all_amax,
                        sums[c],
                        error,
                        tiling,
                        element,
                        rule,
                    )
            for i in range(first, last):
                for part in range(left, right, TILE):
                    end = min(part + TILE, right)
                    index = (np.int64(outer) * n + i) * inner + part
                    row, out = read[i, part:end], written[i, part:end]
                    line(
                        row, out, all_down, all_up, all_decode, element, rule, random, index, buffer
                    )
            if largest >= INFINITY:
                fill_special(written, tile, maxima, width)
