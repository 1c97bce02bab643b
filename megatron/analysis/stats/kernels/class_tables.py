"""Count 16-bit values by bit pattern and by the scale classes of their blocks, in bounded memory.

A table consists of planes, each with one count per bit pattern. A `ClassTable` has one plane per
scale class of the blocks along one axis. Each value belongs to two blocks: the row
block along its row and the column block along its column. A `PairTable` counts values by the scale
classes of both. It assigns a plane to each pair of classes when the pair first occurs. If no plane
is left, counting stops; the caller takes the counts, which empties the table, and continues.

`kernels.scalar_quantizer` defines the scale class of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.scalar_quantizer import CLASSES

PATTERNS = 1 << 16
#: Maximum number of planes in a `PairTable`; the counts of one plane take 256 KiB.
PLANES = 256
TABLE_BYTES = PLANES * PATTERNS * 4

#: numbers of values, shape [scale classes or pairs of them, bit patterns]; exact up to 2^53
Cells = NDArray[np.float64]


class ClassTable:
    """Table that counts values by bit pattern and by the scale class of their block."""

    def __init__(self) -> None:
        self.counts = np.zeros((CLASSES, PATTERNS), np.uint32)
        self.occurs = np.zeros(CLASSES, np.bool_)

    def take(self, patterns: NDArray[np.uint16]) -> tuple[NDArray[np.int32], Cells]:
        """Return the scale classes that occur and their counts, and empty the table.

        Args:
            patterns: bit patterns whose counts are returned; must include all counted patterns.
        """
        classes = np.flatnonzero(self.occurs).astype(np.int32)
        cells = np.empty((len(classes), len(patterns)))
        _take(self.counts, classes, patterns, cells)
        self.occurs[:] = False
        return classes, cells


class PairTable:
    """Table that counts values by bit pattern and by scale classes of row and column blocks."""

    def __init__(self, planes: int = PLANES) -> None:
        self.counts = np.zeros((planes, PATTERNS), np.uint32)
        self.plane_of = np.full((CLASSES, CLASSES), -1, np.int32)
        #: scale classes (row block, column block) of the values that each plane counts, shape
        #: [planes, 2]
        self.pairs = np.zeros((planes, 2), np.int32)
        self.used = 0

    def take(self, patterns: NDArray[np.uint16]) -> tuple[NDArray[np.int32], Cells]:
        """Return the pairs of scale classes that occur and their counts, and empty the table."""
        pairs = self.pairs[: self.used].copy()
        cells = np.empty((self.used, len(patterns)))
        _take(self.counts, np.arange(self.used, dtype=np.int32), patterns, cells)
        self.plane_of[pairs[:, 0], pairs[:, 1]] = -1
        self.used = 0
        return pairs, cells


@kernel
def _take(counts: Any, planes: Any, patterns: Any, cells: Any) -> None:
    """Copy counts from a table to `cells`, and set them to zero in the table.

    Row i of `cells` receives the counts of `patterns` in the plane `planes[i]`.
    """
    for row in range(len(planes)):
        plane, part = counts[planes[row]], cells[row]
        for k in range(len(patterns)):
            part[k] = plane[patterns[k]]
            plane[patterns[k]] = 0


@kernel
def count_rows(piece: Any, classes: Any, size: Any, run: Any, counts: Any, occurs: Any) -> None:
    """Count the values of a chunk by bit pattern and by the scale class of their row block.

    Args:
        piece: [outer, rows, columns] bit patterns of the values.
        classes: [outer, rows, blocks] scale classes of the blocks.
        size: number of values per block.
        run: number of values in a run; no block along a row crosses its boundary.
        counts, occurs: arrays of the `ClassTable`, updated in place.
    """
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            values, of_blocks = piece[o, i], classes[o, i]
            block = 0
            for first in range(0, len(values), run):
                for left in range(first, first + run, size):
                    part = values[left : min(left + size, first + run)]
                    occurs[of_blocks[block]] = True
                    plane = counts[of_blocks[block]]
                    for j in range(len(part)):
                        plane[part[j]] += np.uint32(1)
                    block += 1


@kernel
def count_columns(piece: Any, classes: Any, size: Any, counts: Any, occurs: Any) -> None:
    """Count the values of a chunk by bit pattern and by the scale class of their column block.

    Args:
        classes: [outer, blocks, columns] scale classes of the blocks.

    The other arguments are the same as in `count_rows`.
    """
    flat, base = counts.ravel(), np.empty(piece.shape[2], np.uint32)
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            if i % size == 0:
                of_blocks = classes[o, i // size]
                for j in range(len(base)):
                    occurs[of_blocks[j]] = True
                    base[j] = np.uint32(of_blocks[j]) << np.uint32(16)
            _count(piece[o, i], base, flat)


@kernel
def _count(values: Any, base: Any, flat: Any) -> None:
    """Count the values of one row by bit pattern; the counts for column j begin at `flat[base[j]]`.

    One loop covers the whole row, because starting many short loops would take longer than
    counting.
    """
    for j in range(len(values)):
        flat[np.uintp(base[j] | np.uint32(values[j]))] += np.uint32(1)


@kernel
def count_pairs(
    piece: Any,
    rows: Any,
    columns: Any,
    size: Any,
    run: Any,
    counts: Any,
    plane_of: Any,
    pairs: Any,
    used: Any,
    start: Any,
) -> Any:
    """Count a chunk's values by bit pattern and by scale classes of row and column blocks.

    A tile is as high as a block along a column and as wide as a block along a row. A strip is a
    row of tiles. For each strip, planes are first assigned to all pairs of scale classes; then the
    values are counted in memory order.

    Args:
        piece: [outer, rows, columns] bit patterns of the values.
        rows: [outer, rows, blocks] scale classes of the row blocks.
        columns: [outer, blocks, columns] scale classes of the column blocks.
        counts, plane_of, pairs: arrays of the `PairTable`, updated in place.
        used: number of planes in use.
        start: number of the first tile to count.

    Returns:
        Number of planes in use, and number of the first tile that was not counted because no plane
        was left. If all tiles were counted, the latter is the number of tiles.
    """
    outer, height, width = piece.shape
    down, edges = (height + size - 1) // size, _edges(width, size, run)
    across = len(edges)
    flat = counts.ravel()
    # bases[c, j]: index in `flat` at which a plane begins. The plane counts the values of column j
    # whose row block has the scale class c.
    bases = np.empty((CLASSES, width), np.uint32)
    # known[c, k]: number of the strip (row of tiles) for which `bases[c]` was last updated in the
    # columns of row block k
    known = np.full((CLASSES, across), -1, np.int64)
    tile = start
    while tile < outer * down * across:
        number, first = tile // across, tile % across
        o, top = number // down, number % down * size
        bottom = min(top + size, height)
        last, enough = first, True
        while last < across:
            left, right = edges[last]
            for i in range(top, bottom):
                class_ = rows[o, i, last]
                if known[class_, last] != number:
                    seconds, base = columns[o, number % down, left:right], bases[class_, left:right]
                    used, enough = _find_planes(class_, seconds, plane_of, pairs, used, base)
                    if not enough:
                        break
                    known[class_, last] = number
            if not enough:
                break
            last += 1
        for i in range(top, bottom):
            values, of_row = piece[o, i], rows[o, i]
            for block in range(first, last):
                left, right = edges[block]
                _count(values[left:right], bases[of_row[block], left:right], flat)
        tile += last - first
        if not enough:
            break
    return used, tile


@kernel
def _edges(width: Any, size: Any, run: Any) -> Any:
    """Return the columns at which each block of a row begins and ends, with shape [blocks, 2]."""
    edges = np.empty((width // run * ((run + size - 1) // size), 2), np.uint32)
    block = 0
    for first in range(0, width, run):
        for left in range(first, first + run, size):
            edges[block, 0], edges[block, 1] = left, min(left + size, first + run)
            block += 1
    return edges


@kernel
def _find_planes(class_: Any, columns: Any, plane_of: Any, pairs: Any, used: Any, base: Any) -> Any:
    """Find the plane that counts each pair of scale classes, and assign free planes to new pairs.

    Each pair consists of `class_` and the scale class of one of the columns.

    Args:
        class_: scale class of the row block.
        columns: scale classes of the column blocks.
        base: output array for the index at which the plane of each column begins.

    Returns:
        Number of planes in use, and whether there were enough planes.
    """
    planes = plane_of[class_]
    for j in range(len(columns)):
        if planes[columns[j]] < 0:
            if used == len(pairs):
                return used, False
            planes[columns[j]] = used
            pairs[used, 0], pairs[used, 1] = class_, columns[j]
            used += 1
        base[j] = np.uint32(planes[columns[j]]) << np.uint32(16)
    return used, True


def tile_of(shape: tuple[int, ...], size: int, run: int, tile: int) -> tuple[slice, slice, slice]:
    """Return the slices that select a tile, as defined in `count_pairs`, from a chunk."""
    blocks_in_run = -(-run // size)
    across, down = shape[2] // run * blocks_in_run, -(-shape[1] // size)
    outer, rest = divmod(tile, down * across)
    strip, block = divmod(rest, across)
    left = block // blocks_in_run * run + block % blocks_in_run * size
    right = min(left + size, (block // blocks_in_run + 1) * run)
    rows = slice(strip * size, min((strip + 1) * size, shape[1]))
    return slice(outer, outer + 1), rows, slice(left, right)
