"""Count bit patterns, and find the extremes of channels, tokens and blocks, in one scan each.

A chunk of a tensor has the shape `[outer, rows, columns]`. A 16-bit number is given by its bit
pattern (uint16), and a float32 number by its bits (int32). With the sign bit cleared, their order
is the order of the magnitudes, with Inf and NaN above all finite numbers. The loops have no
branches and compile to vector instructions; each loop takes about 0.3 ns per value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel

LOW15 = np.uint16(0x7FFF)
LOW31 = np.int32(0x7FFFFFFF)
ONE16, ZERO16 = np.uint16(1), np.uint16(0)
ZERO32 = np.int32(0)
LARGEST32 = np.int32(0x7FFFFFFF)


#: uint16 arrays with at least FEW and fewer than MANY values are counted in a table; all other
#: arrays are sorted. Counting MANY values could overflow the counts of the table.
FEW, MANY = 1 << 13, 1 << 32


def counted(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct values in ascending order, and the number of occurrences of each.

    Args:
        values: one-dimensional array of uint16 or int32.
    """
    if values.dtype == np.uint16 and FEW <= len(values) < MANY:
        distinct, counts = _patterns(values)
        return distinct, counts
    distinct, counts = np.unique(values, return_counts=True)
    return distinct, counts


@kernel
def _patterns(values: Any) -> Any:
    """Return the bit patterns that occur, and the number of occurrences of each.

    Neighboring values are counted in two different tables. In a single table, counting a value
    would have to wait for the count of its neighbor if both are equal.
    """
    table, other = np.zeros(1 << 16, np.uint32), np.zeros(1 << 16, np.uint32)
    for i in range(0, len(values) - 1, 2):
        table[values[i]] += np.uint32(1)
        other[values[i + 1]] += np.uint32(1)
    if len(values) % 2:
        table[values[len(values) - 1]] += np.uint32(1)
    number = 0
    for pattern in range(len(table)):
        table[pattern] += other[pattern]
        number += 1 if table[pattern] else 0
    distinct, counts = np.empty(number, np.uint16), np.empty(number, np.int64)
    index = 0
    for pattern in range(len(table)):
        if table[pattern]:
            distinct[index], counts[index] = pattern, table[pattern]
            index += 1
    return distinct, counts


@kernel
def amax16(piece: Any, infinity: Any, token: Any, channel: Any) -> None:
    """Find the largest finite magnitude of each token and channel in a chunk of 16-bit values.

    Magnitudes are bit patterns.

    Args:
        infinity: bit pattern of Inf.
        token: [outer, rows, columns / channels] output array.
        channel: [channels] largest magnitudes so far, updated in place.
    """
    width = len(channel)
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            for t in range(token.shape[2]):
                values = piece[o, i, t * width : (t + 1) * width]
                largest = ZERO16
                for j in range(len(values)):
                    magnitude = np.uint16(values[j] & LOW15)
                    magnitude = magnitude if magnitude < infinity else ZERO16
                    largest = max(largest, magnitude)
                    channel[j] = max(channel[j], magnitude)
                token[o, i, t] = largest


@kernel
def amax32(piece: Any, infinity: Any, token: Any, channel: Any) -> None:
    """Find the largest finite magnitude of each token and channel in a chunk of float32 values.

    Magnitudes are float32 bits. The arguments are the same as in `amax16`.
    """
    width = len(channel)
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            for t in range(token.shape[2]):
                values = piece[o, i, t * width : (t + 1) * width]
                largest = ZERO32
                for j in range(len(values)):
                    magnitude = np.int32(values[j] & LOW31)
                    magnitude = magnitude if magnitude < infinity else ZERO32
                    largest = max(largest, magnitude)
                    channel[j] = max(channel[j], magnitude)
                token[o, i, t] = largest


@kernel
def block_extremes16(piece: Any, size: Any, run: Any, largest: Any, smallest: Any) -> None:
    """Find the largest and the smallest magnitude of each block along a row, as bit patterns.

    The largest magnitude may be Inf or NaN. The smallest magnitude excludes zeros, and its pattern
    is reduced by one: a zero then wraps around to 65,535 and needs no branch. The result for a
    block of zeros is 65,535.

    Args:
        size: number of values per block.
        run: number of values in a run; no block along a row crosses its boundary.
        largest, smallest: [outer, rows, blocks per row] output arrays.
    """
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            block = 0
            for first in range(0, piece.shape[2], run):
                for left in range(first, first + run, size):
                    values = piece[o, i, left : min(left + size, first + run)]
                    high, low = ZERO16, np.uint16(0xFFFF)
                    for j in range(len(values)):
                        magnitude = np.uint16(values[j] & LOW15)
                        high = max(high, magnitude)
                        low = min(low, np.uint16(magnitude - ONE16))
                    largest[o, i, block] = high
                    smallest[o, i, block] = low
                    block += 1


@kernel
def block_extremes32(piece: Any, size: Any, run: Any, largest: Any, smallest: Any) -> None:
    """Find the largest and the smallest magnitude of each block along a row, as float32 bits.

    The arguments are the same as in `block_extremes16`, but the smallest magnitude is not reduced
    by one. For a block of zeros, it is the maximum int32.
    """
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            block = 0
            for first in range(0, piece.shape[2], run):
                for left in range(first, first + run, size):
                    values = piece[o, i, left : min(left + size, first + run)]
                    high, low = ZERO32, LARGEST32
                    for j in range(len(values)):
                        magnitude = np.int32(values[j] & LOW31)
                        high = max(high, magnitude)
                        low = min(low, magnitude if magnitude > 0 else LARGEST32)
                    largest[o, i, block] = high
                    smallest[o, i, block] = low
                    block += 1


@kernel
def column_extremes16(piece: Any, size: Any, largest: Any, smallest: Any) -> None:
    """Find the largest and the smallest magnitude of each block along a column, as bit patterns.

    `block_extremes16` describes the results.

    Args:
        size: number of values per block.
        largest, smallest: [outer, blocks per column, columns] output arrays.
    """
    for o in range(piece.shape[0]):
        for block in range(largest.shape[1]):
            high, low = largest[o, block], smallest[o, block]
            high[:], low[:] = ZERO16, np.uint16(0xFFFF)
            for i in range(block * size, min((block + 1) * size, piece.shape[1])):
                values = piece[o, i]
                for j in range(len(values)):
                    magnitude = np.uint16(values[j] & LOW15)
                    high[j] = max(high[j], magnitude)
                    low[j] = min(low[j], np.uint16(magnitude - ONE16))


@kernel
def column_extremes32(piece: Any, size: Any, largest: Any, smallest: Any) -> None:
    """Find the largest and the smallest magnitude of each block along a column, as float32 bits.

    `block_extremes32` describes the results.

    Args:
        size: number of values per block.
        largest, smallest: [outer, blocks per column, columns] output arrays.
    """
    for o in range(piece.shape[0]):
        for block in range(largest.shape[1]):
            high, low = largest[o, block], smallest[o, block]
            high[:], low[:] = ZERO32, LARGEST32
            for i in range(block * size, min((block + 1) * size, piece.shape[1])):
                values = piece[o, i]
                for j in range(len(values)):
                    magnitude = np.int32(values[j] & LOW31)
                    high[j] = max(high[j], magnitude)
                    low[j] = min(low[j], magnitude if magnitude > 0 else LARGEST32)


@kernel
def square_extremes(largest: Any, smallest: Any, size: Any) -> None:
    """Merge the largest and smallest magnitudes of all rows of each square block, in place.

    All rows of a block then have equal entries.
    """
    for o in range(largest.shape[0]):
        for first in range(0, largest.shape[1], size):
            last = min(first + size, largest.shape[1])
            for block in range(largest.shape[2]):
                high, low = largest[o, first, block], smallest[o, first, block]
                for i in range(first, last):
                    high = max(high, largest[o, i, block])
                    low = min(low, smallest[o, i, block])
                for i in range(first, last):
                    largest[o, i, block] = high
                    smallest[o, i, block] = low
