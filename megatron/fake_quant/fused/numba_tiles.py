"""Tiles in which CPU kernels quantize to formats with unusual scales.

The values of some tiles are loaded as float32 bits, quantized in place, and stored. Each column of
a tile holds 16 neighbors along the axis of the blocks. The same code therefore quantizes along any
axis, and vector instructions handle a different block in each lane. The columns of a block of more
than 16 values are `near` columns apart: next to each other for blocks along the last axis, and one
strip of columns apart otherwise.

Loading and storing are separate kernels, so that they are compiled once for all formats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    ZERO,
    Random,
    fill_random,
    kernel,
    narrow,
    widen,
)
from megatron.fake_quant.fused.numba_compile import inlined

DEPTH = 16  #: number of rows of a tile
COLUMNS = 1024  #: largest number of columns of a tile
TILE = DEPTH * COLUMNS
TILES = 4  #: number of tiles that are loaded at a time, so that they stay in the L2 cache


class Cut(NamedTuple):
    """Division of a tensor into tiles.

    The tensor has the shape `[outer, n, inner]`, with blocks along the middle axis. If `inner` is 1
    and rows consist of whole blocks, all rows count as a single one.
    """

    n: int
    inner: int
    size: int  #: number of values per block, a multiple of 16
    strips: int  #: number of tiles per row, or per row of blocks
    blocks: int  #: number of rows of blocks per matrix


def cut(outer: int, n: int, inner: int, size: int) -> tuple[Cut, int]:
    """Return how an `[outer, n, inner]` tensor is divided into tiles, and the number of tiles."""
    if inner == 1:
        if n % size == 0:
            outer, n = 1, outer * n
        strips, blocks = -(-n // TILE), 1
    else:
        strips, blocks = -(-inner // (TILE // size)), -(-n // size)
    return Cut(n, inner, size, strips, blocks), outer * strips * blocks


class Extent(NamedTuple):
    """Position and size of a tile."""

    first: int  #: position of the first value in memory
    rows: int  #: number of rows of the tensor; 1 if blocks run along the last axis
    width: int  #: number of values per row of the tensor
    columns: int  #: number of columns of the tile
    near: int  #: distance between the columns of a block


@inlined
def extent(cut: Any, item: Any) -> Any:
    """Return the position and the size of tile number `item`."""
    row, strip = item // cut.strips, item % cut.strips
    if cut.inner == 1:
        left = strip * TILE
        count = min(TILE, cut.n - left)
        columns = (count + cut.size - 1) // cut.size * (cut.size // DEPTH)
        return Extent(row * cut.n + left, 1, count, columns, 1)
    first, left = row % cut.blocks * cut.size, strip * (TILE // cut.size)
    count = min(TILE // cut.size, cut.inner - left)
    index = (row // cut.blocks * cut.n + first) * cut.inner + left
    rows = min(cut.size, cut.n - first)
    return Extent(index, rows, count, count * (cut.size // DEPTH), count)


@inlined
def turn_in(read: Any, line: Any, tile: Any, columns: Any) -> Any:
    """Write consecutive values to the columns of a tile, and fill the last columns with zeros.

    Two passes each move every fourth value to the same quarter of the result, because LLVM
    vectorizes loops with a stride of 4 but not with a stride of 16. `line` has the size of a tile.
    """
    part = 4 * columns
    whole = min(len(read) >> 2, part)
    # LLVM would not vectorize a loop that writes to `line` at four offsets.
    a, b, c, d = line[:part], line[part : 2 * part], line[2 * part : 3 * part], line[3 * part :]
    for j in range(whole):
        a[j], b[j] = widen(read[4 * j]), widen(read[4 * j + 1])
        c[j], d[j] = widen(read[4 * j + 2]), widen(read[4 * j + 3])
    for j in range(whole, part):
        for i in range(4):
            line[i * part + j] = widen(read[4 * j + i]) if 4 * j + i < len(read) else ZERO
    for i in range(4):
        quarter = line[i * part : (i + 1) * part]
        first, second, third, fourth = tile[i], tile[4 + i], tile[8 + i], tile[12 + i]
        for j in range(columns):
            first[j], second[j] = quarter[4 * j], quarter[4 * j + 1]
            third[j], fourth[j] = quarter[4 * j + 2], quarter[4 * j + 3]


@inlined
def turn_out(tile: Any, line: Any, written: Any, columns: Any) -> Any:
    """Write the columns of a tile to consecutive values, which undoes `turn_in`."""
    part = 4 * columns
    for i in range(4):
        quarter = line[i * part : (i + 1) * part]
        first, second, third, fourth = tile[i], tile[4 + i], tile[8 + i], tile[12 + i]
        for j in range(columns):
            quarter[4 * j], quarter[4 * j + 1] = first[j], second[j]
            quarter[4 * j + 2], quarter[4 * j + 3] = third[j], fourth[j]
    whole = min(len(written) >> 2, part)
    a, b, c, d = line[:part], line[part : 2 * part], line[2 * part : 3 * part], line[3 * part :]
    for j in range(whole):
        like = written[4 * j]
        first, second = narrow(a[j], like), narrow(b[j], like)
        third, fourth = narrow(c[j], like), narrow(d[j], like)
        written[4 * j], written[4 * j + 1] = first, second
        written[4 * j + 2], written[4 * j + 3] = third, fourth
    for j in range(4 * whole, len(written)):
        written[j] = narrow(line[(j & 3) * part + (j >> 2)], written[j])


@kernel
def load(src: Any, tiles: Any, line: Any, cut: Any, start: Any, stop: Any) -> None:
    """Load the tiles `start` to `stop - 1` as float32 bits, and pad blocks with zeros."""
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        if cut.inner == 1:
            turn_in(src[place.first : place.first + place.width], line, tile, place.columns)
            continue
        for i in range(cut.size):
            left = i // DEPTH * place.width
            values = tile[i % DEPTH, left : left + place.width]
            if i >= place.rows:
                for j in range(len(values)):
                    values[j] = ZERO
                continue
            index = place.first + i * cut.inner
            read = src[index : index + place.width]
            for j in range(len(read)):
                values[j] = widen(read[j])


@kernel
def store(tiles: Any, dst: Any, line: Any, cut: Any, start: Any, stop: Any) -> None:
    """Store the tiles `start` to `stop - 1`, which undoes `load`."""
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        if cut.inner == 1:
            turn_out(tile, line, dst[place.first : place.first + place.width], place.columns)
            continue
        for i in range(place.rows):
            left, index = i // DEPTH * place.width, place.first + i * cut.inner
            values = tile[i % DEPTH, left : left + place.width]
            written = dst[index : index + place.width]
            for j in range(len(written)):
                written[j] = narrow(values[j], written[j])


@kernel
def draw(tiles: Any, line: Any, cut: Any, random: Any, start: Any, stop: Any) -> None:
    """Fill tiles with the random bits of the values that `load` loads."""
    buffer = np.empty(TILE + 7, np.int32)
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        for i in range(place.rows):
            skipped = fill_random(buffer, place.first + i * cut.inner, place.width, random)
            bits = buffer[skipped : skipped + place.width]
            if cut.inner == 1:
                turn_in(bits, line, tile, place.columns)
                continue
            values = tile[i % DEPTH, i // DEPTH * place.width :]
            for j in range(len(bits)):
                values[j] = bits[j]


def quantize(core: Callable[..., None], src: Any, dst: Any, cut: Cut, random: Random) -> Any:
    """Return a function that quantizes the tiles `start` to `stop - 1` of a flat array.

    core: kernel that quantizes tiles in place. It receives the tiles, random bits in the same
        order if `random.on` is True, the division of the tensor, and the numbers of the tiles.
    """

    def work(start: int, stop: int) -> None:
        tiles = np.empty((TILES, DEPTH, COLUMNS), np.int32)
        drawn = np.empty_like(tiles) if random.on else tiles
        line = np.empty(TILE, np.int32)
        for first in range(start, stop, TILES):
            last = min(first + TILES, stop)
            load(src, tiles, line, cut, first, last)
            if random.on:
                draw(drawn, line, cut, random, first, last)
            core(tiles, drawn, cut, first, last)
            store(tiles, dst, line, cut, first, last)

    return work


@inlined
def maxima(tile: Any, amax: Any, columns: Any) -> Any:
    """Write the bits of the largest magnitude of each column to `amax`."""
    for j in range(columns):
        amax[j] = ZERO
    for i in range(0, DEPTH, 4):
        a, b, c, d = tile[i], tile[i + 1], tile[i + 2], tile[i + 3]
        for j in range(columns):
            first = max(np.int32(a[j] & MAGNITUDE), np.int32(b[j] & MAGNITUDE))
            second = max(np.int32(c[j] & MAGNITUDE), np.int32(d[j] & MAGNITUDE))
            amax[j] = max(amax[j], max(first, second))


@inlined
def spread(amax: Any, place: Any, together: Any) -> Any:
    """Replace the maximum of each column by that of its block, which has `together` columns."""
    for first in range(0, place.columns, place.near * together):
        for j in range(first, first + place.near):
            largest = ZERO
            for i in range(together):
                largest = max(largest, amax[j + i * place.near])
            for i in range(together):
                amax[j + i * place.near] = largest


@inlined
def fill_special(tile: Any, amax: Any, columns: Any) -> Any:
    """Set all values of each column whose maximum is Inf or NaN to NaN."""
    largest = ZERO
    for j in range(columns):
        largest = max(largest, amax[j])
    if largest >= INFINITY:
        for i in range(DEPTH):
            values = tile[i]
            for j in range(columns):
                values[j] = NAN if amax[j] >= INFINITY else values[j]
