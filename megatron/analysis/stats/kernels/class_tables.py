"""Counts 16-bit values by the classes of their blocks and their pattern, in bounded memory.

A table has planes of 65,536 counts. In a `ClassTable` there is one for each class of the blocks
along rows, or along columns. In a `PairTable` there is one for each pair of classes (of the block
along the row and the one along the column that a value is in) that occurs: they are handed out as
pairs turn up, and when too few are left, counting stops; the caller takes what is there and goes
on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.scalar_quantizer import CLASSES

PATTERNS = 1 << 16
PLANES = 256  #: of a table; memory is taken when a plane is first used, 256 KiB each
TABLE_BYTES = PLANES * PATTERNS * 4

Cells = NDArray[np.float64]  #: counts [classes or pairs, patterns]: exact to 2^53


class ClassTable:
    """Counts by the class of the block along one axis."""

    def __init__(self) -> None:
        self.counts = np.zeros((CLASSES, PATTERNS), np.uint32)
        self.occurs = np.zeros(CLASSES, np.bool_)

    def take(self, patterns: NDArray[np.uint16]) -> tuple[NDArray[np.int32], Cells]:
        """Classes, and their counts; the table is empty then.

        patterns: all that were counted, and maybe more.
        """
        classes = np.flatnonzero(self.occurs).astype(np.int32)
        cells = np.empty((len(classes), len(patterns)))
        _take(self.counts, classes, patterns, cells)
        self.occurs[:] = False
        return classes, cells


class PairTable:
    """Counts by the classes along both axes."""

    def __init__(self, planes: int = PLANES) -> None:
        self.counts = np.zeros((planes, PATTERNS), np.uint32)
        self.plane_of = np.full((CLASSES, CLASSES), -1, np.int32)
        self.pairs = np.zeros((planes, 2), np.int32)  #: classes along row and column, by plane
        self.used = 0

    def take(self, patterns: NDArray[np.uint16]) -> tuple[NDArray[np.int32], Cells]:
        """Pairs [n, 2], and their counts; the table is empty then."""
        pairs = self.pairs[: self.used].copy()
        cells = np.empty((self.used, len(patterns)))
        _take(self.counts, np.arange(self.used, dtype=np.int32), patterns, cells)
        self.plane_of[pairs[:, 0], pairs[:, 1]] = -1
        self.used = 0
        return pairs, cells


@kernel
def _take(counts: Any, planes: Any, patterns: Any, cells: Any) -> None:
    """Move the counts of these planes and patterns to `cells`."""
    for row in range(len(planes)):
        plane, part = counts[planes[row]], cells[row]
        for k in range(len(patterns)):
            part[k] = plane[patterns[k]]
            plane[patterns[k]] = 0


@kernel
def count_rows(piece: Any, classes: Any, size: Any, run: Any, counts: Any, occurs: Any) -> None:
    """Count the values of `piece` [outer, rows, columns] by the classes of the blocks along rows,
    [outer, rows, blocks].
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
    """As `count_rows`, by the classes of the blocks along columns: [outer, blocks, columns]."""
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
    """A row of values, each into its plane. One long loop: entering many short ones costs more than
    what is done in them.
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
    """As `count_rows`, by the classes of both blocks that a value is in, from tile `start` on. A
    tile is a block high and a block wide; `size` rows of tiles are gone through in the order of
    memory, after planes were found for all their pairs.

    Returns the planes in use, and the tile for which there were too few: the number of tiles where
    all were counted.
    """
    outer, height, width = piece.shape
    down, edges = (height + size - 1) // size, _edges(width, size, run)
    across = len(edges)
    flat = counts.ravel()
    # for each class of a row: where the planes of its pairs with a strip's columns begin, and of
    # which strip that is known
    bases = np.empty((CLASSES, width), np.uint32)
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
    """Where the blocks of a row begin and end: [blocks, 2]."""
    found = np.empty((width // run * ((run + size - 1) // size), 2), np.uint32)
    block = 0
    for first in range(0, width, run):
        for left in range(first, first + run, size):
            found[block, 0], found[block, 1] = left, min(left + size, first + run)
            block += 1
    return found


@kernel
def _find_planes(class_: Any, columns: Any, plane_of: Any, pairs: Any, used: Any, base: Any) -> Any:
    """Give a plane to each pair of a row's class with these classes of columns, and put where it
    begins into `base`; whether there were enough.
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
    """Where in a piece of this shape tile number `tile` lies."""
    blocks_in_run = -(-run // size)
    across, down = shape[2] // run * blocks_in_run, -(-shape[1] // size)
    outer, rest = divmod(tile, down * across)
    strip, block = divmod(rest, across)
    left = block // blocks_in_run * run + block % blocks_in_run * size
    right = min(left + size, (block // blocks_in_run + 1) * run)
    rows = slice(strip * size, min((strip + 1) * size, shape[1]))
    return slice(outer, outer + 1), rows, slice(left, right)
