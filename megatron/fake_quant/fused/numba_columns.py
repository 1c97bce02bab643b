"""Convert between one number per block and one number per column, in CPU kernels.

A block is a group of `width` neighboring columns. LLVM does not vectorize loops that are as short
as most blocks. If the width is divisible by 4, the loops here work on pairs of neighbors instead:
each loop halves or doubles the number of values. A loop reads one array and writes another one,
because LLVM does not vectorize a loop that reads and writes parts of the same array.
"""

from typing import Any

from megatron.fake_quant.fused.numba_bits import magnitude, widen
from megatron.fake_quant.fused.numba_compile import called, inlined

#: length of arrays with one entry per column, large enough that a tile has many blocks
TILE = 4096


@called
def column_maxima(matrix: Any, tile: Any, left: Any, right: Any, maxima: Any, padded: Any) -> Any:
    """Compute the largest magnitude in each column of a part of a tile.

    The entries of `maxima` up to `padded` that belong to no column are set to zero.
    """
    row = matrix[tile.first, left:right]
    for j in range(len(row)):
        maxima[j] = magnitude(row[j])
    for j in range(len(row), padded):
        maxima[j] = 0
    for i in range(tile.first + 1, tile.last):
        row = matrix[i, left:right]
        for j in range(len(row)):
            maxima[j] = max(maxima[j], magnitude(row[j]))


@inlined
def larger_of_pairs(values: Any, out: Any, count: Any) -> Any:
    """Write the larger number of each of the first `count` pairs of neighbors to `out`."""
    # The limit tells LLVM that an index does not overflow.
    for j in range(min(count, TILE)):
        out[j] = max(values[2 * j], values[2 * j + 1])


@called
def block_maxima(columns: Any, scratch: Any, maxima: Any, width: Any, count: Any) -> Any:
    """Raise each block's maximum to the largest value in its columns; `columns` is overwritten.

    A block that is wider than `columns` contains all entries of `columns`.
    """
    rest = min(width, TILE)
    while rest & 3 == 0:
        larger_of_pairs(columns, scratch, (count * rest) >> 1)
        rest >>= 2
        larger_of_pairs(scratch, columns, count * rest)
    if rest == 1:
        for b in range(count):
            maxima[b] = max(maxima[b], widen(columns[b]))
    elif rest == 2:
        larger_of_pairs(columns, scratch, count)
        for b in range(count):
            maxima[b] = max(maxima[b], widen(scratch[b]))
    else:
        for b in range(count):
            amax = columns[b * rest]
            for j in range(b * rest + 1, (b + 1) * rest):
                amax = max(amax, columns[j])
            maxima[b] = max(maxima[b], widen(amax))


@inlined
def twice(values: Any, out: Any, count: Any) -> Any:
    """Write each of the first `count` values twice to `out`."""
    for j in range(min(count, TILE)):
        out[2 * j] = values[j]
        out[2 * j + 1] = values[j]


@called
def expand(blocks: Any, columns: Any, scratch: Any, width: Any, count: Any) -> Any:
    """Write the value of each block to all its columns in `columns`, up to the end of the array."""
    width = min(width, TILE)
    rest = width
    while rest & 3 == 0:
        rest >>= 2
    if rest == 1:
        for b in range(count):
            columns[b] = blocks[b]
    elif rest == 2:
        twice(blocks, columns, count)
    else:
        for b in range(count):
            for j in range(b * rest, (b + 1) * rest):
                columns[j] = blocks[b]
    while rest < width:
        twice(columns, scratch, count * rest)
        twice(scratch, columns, count * rest * 2)
        rest <<= 2
