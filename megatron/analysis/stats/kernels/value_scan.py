"""The first look at every value: bit patterns, magnitudes of channels and tokens, block maxima.

A piece of a tensor is `[outer, rows, columns]`. A 16-bit number is its pattern (uint16), a float32
its bits (int32); without the sign they order as the magnitudes do, Inf and NaN above all numbers.
These loops have no branches and become vector instructions: about 0.3 ns a value and pass.
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


#: Fewer values than this are sorted rather than counted in a table; more would overflow its counts.
FEW, MANY = 1 << 13, 1 << 32


def counted(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Which values (flat; uint16 or int32) occur, ascending, and how often."""
    if values.dtype == np.uint16 and FEW <= len(values) < MANY:
        found, counts = _patterns(values)
        return found, counts
    found, counts = np.unique(values, return_counts=True)
    return found, counts


@kernel
def _patterns(values: Any) -> Any:
    """Of the 65,536 patterns those that occur, and how often.

    Two neighbors that are equal would wait for each other: they go to different tables.
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
    found, counts = np.empty(number, np.uint16), np.empty(number, np.int64)
    place = 0
    for pattern in range(len(table)):
        if table[pattern]:
            found[place], counts[place] = pattern, table[pattern]
            place += 1
    return found, counts


@kernel
def amax16(piece: Any, infinity: Any, token: Any, channel: Any) -> None:
    """Largest finite magnitude (patterns) of each token and channel.

    token: [outer, rows, columns / channels], written; channel: [channels], raised.
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
    """As `amax16`, for the bits of float32."""
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
    """Of each block along a row: the largest magnitude, NaN included, and the smallest above zero
    minus one (65,535 where there is none), as patterns. Blocks begin anew with every `run` columns.

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
    """As `block_extremes16`, for the bits of float32; `smallest` is not lowered by one, and the
    largest int32 where there is none.
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
    """As `block_extremes16`, of blocks of `size` rows: [outer, blocks in a column, columns]."""
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
    """As `block_extremes32`, of blocks of `size` rows: [outer, blocks in a column, columns]."""
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
    """Give every row of a square block the extremes of all of them: in place."""
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
