"""Scan every value once: count bit patterns, and find the extremes of channels, tokens and blocks.

A piece of a tensor has the shape `[outer, rows, columns]`. A 16-bit number is given by its pattern
(uint16), a float32 number by its bits (int32). Without the sign bit, both are in the order of the
magnitudes, with Inf and NaN above all numbers. These loops have no branches and compile to vector
instructions; each takes about 0.3 ns per value.
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


#: Fewer values than FEW are sorted instead of counted in a table; MANY would overflow its counts.
FEW, MANY = 1 << 13, 1 << 32


def counted(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return which of the values occur, in ascending order, and how often.

    values: one dimension, uint16 or int32
    """
    if values.dtype == np.uint16 and FEW <= len(values) < MANY:
        distinct, counts = _patterns(values)
        return distinct, counts
    distinct, counts = np.unique(values, return_counts=True)
    return distinct, counts


@kernel
def _patterns(values: Any) -> Any:
    """Return which of the 65,536 patterns occur, and how often.

    Neighboring values are counted in two different tables. In one table, counting a value would
    have to wait for its neighbor if both are equal.
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
    """Find the largest finite magnitude of each token and channel, as patterns.

    Args:
        infinity: pattern of Inf.
        token: [outer, rows, columns / channels], written.
        channel: [channels], raised to the magnitudes of this piece.
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
    """Find the largest finite magnitude of each token and channel, like `amax16`, of float32."""
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
    """Find the largest and the smallest magnitude of each block along a row, as patterns.

    The largest magnitude may be Inf or NaN. The smallest one is that above zero, and its pattern is
    reduced by one: zero then wraps around to 65,535 and needs no branch. A block of zeros has a
    smallest pattern of 65,535.

    Args:
        size: values per block.
        run: columns after which a new block begins.
        largest, smallest: [outer, rows, blocks in a row], written.
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

    The arguments are those of `block_extremes16`, but `smallest` is not reduced by one. A block of
    zeros has the largest int32 in its place.
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
    """Find the extremes of blocks along columns, like `block_extremes16`.

    largest, smallest: [outer, blocks in a column, columns], written
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
    """Find the extremes of blocks along columns, like `block_extremes32`.

    largest, smallest: [outer, blocks in a column, columns], written
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
    """Replace the extremes of each row of a square block by those of the whole block, in place."""
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
