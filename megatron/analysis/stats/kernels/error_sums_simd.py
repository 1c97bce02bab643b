"""What block formats do to counted bfloat16 values, eight patterns at a time.

The same as `account_cells` and `account_disagreement`, several times faster: sums are kept for each
pattern, so that none waits for the one before it, and go to their binades at the end. Counts are
float64 here, exact to 2^53. Stretches of patterns that a class does not have are passed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.error_sums import (
    BIAS,
    COMPARED,
    L1,
    LARGEST_ERROR,
    LOST,
    MAGNITUDE_ERROR,
    POISONED,
    RELATIVE,
    SATURATED,
    SQUARED,
    UNDERFLOW,
    VALUES,
    XX,
    XY,
    YY,
    disagree,
)
from megatron.analysis.stats.kernels.scalar_quantizer import to_bfloat16
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_float,
    inlined,
    nearest_even,
)

TILE = 128
#: Sums by pattern.
_FINITE, _ZERO, _BEYOND, _LOST, _ERROR, _DISTANCE, _SQUARE, _BECAME, _BECAME_SQUARE = range(9)
_PLACES = 9


@inlined
def block_value(magnitude: Any, down: Any, up: Any, element: Any, decode: Any) -> Any:
    """What a bfloat16 magnitude becomes, in bits: `coder.result_bits` without branches."""
    scaled = as_bits(as_float(magnitude) * down)
    rounded = nearest_even(min(scaled, element.top), element)
    return to_bfloat16(as_bits(np.float32(as_float(rounded) * up) * decode))


@kernel
def account_blocks(
    patterns: Any, classes: Any, cells: Any, coder: Any, sums: Any, code_counts: Any
) -> None:
    """As `account_cells`, of an element format with block scales and bfloat16 values."""
    by_pattern = np.zeros((_PLACES, len(patterns)))
    largest, magnitudes = np.zeros(len(patterns)), np.empty(len(patterns), np.int32)
    for k in range(len(patterns)):
        magnitudes[k] = patterns[k] & MAGNITUDE
    upper, kept = np.empty(TILE, np.int32), np.empty(TILE)
    became = np.empty(TILE, np.int32)
    for row in range(len(classes)):
        down, up = coder.down[classes[row]], coder.up[classes[row]]
        for first in range(0, len(patterns), TILE):
            n, tile = cells[row, first : first + TILE], magnitudes[first : first + TILE]
            total = 0.0
            for k in range(len(n)):
                total = max(total, n[k])
            if total == 0:
                continue
            if np.isnan(up):
                for k in range(len(n)):
                    sums[0][POISONED] += np.int64(n[k]) if tile[k] < INFINITY else 0
                continue
            part = by_pattern[:, first : first + TILE]
            _tile(
                tile, n, down, up, coder, part, largest[first : first + TILE], upper, kept, became
            )
            for k in range(len(n)):
                index = upper[k] | (np.int32(0x8000) if patterns[first + k] < 0 else np.int32(0))
                code_counts[coder.codes[np.uint32(index)]] += np.int64(kept[k])
    _to_binades(patterns, by_pattern, largest, sums)


@kernel
def _tile(
    magnitudes: Any,
    n: Any,
    down: Any,
    up: Any,
    coder: Any,
    part: Any,
    largest: Any,
    upper: Any,
    kept: Any,
    became: Any,
) -> None:
    """Neighboring patterns with one class. Written: the upper halves of the elements' bits, how
    many values are finite before and after, and what they become. Loops write one array each: with
    more, the compiler cannot rule out that they overlap, and gives up on vectors.
    """
    element, decode = coder.element, coder.rule.decode
    limit = coder.limit if up > 0 else INFINITY  # under a scale of zero no value is clipped
    for k in range(len(n)):
        scaled = min(as_bits(as_float(magnitudes[k]) * down), element.top)
        upper[k] = np.int32(nearest_even(scaled, element) >> 16)
    for k in range(len(n)):
        became[k] = block_value(magnitudes[k], down, up, element, decode)
    for k in range(len(n)):
        kept[k] = n[k] if magnitudes[k] < INFINITY and became[k] < INFINITY else 0.0
    beyond, zero, finite, lost = part[_BEYOND], part[_ZERO], part[_FINITE], part[_LOST]
    for k in range(len(n)):
        scaled = as_bits(as_float(magnitudes[k]) * down)
        beyond[k] += n[k] if scaled > limit and magnitudes[k] < INFINITY else 0.0
    for k in range(len(n)):
        lost[k] += n[k] if magnitudes[k] < INFINITY and became[k] >= INFINITY else 0.0
        became[k] = became[k] if became[k] < INFINITY else 0
    for k in range(len(n)):
        zero[k] += kept[k] if became[k] == 0 else 0.0
    for k in range(len(n)):
        finite[k] += kept[k]
    errors, distances, squares = part[_ERROR], part[_DISTANCE], part[_SQUARE]
    for k in range(len(n)):
        errors[k] += kept[k] * _error(magnitudes[k], became[k])
    for k in range(len(n)):
        distances[k] += kept[k] * abs(_error(magnitudes[k], became[k]))
    for k in range(len(n)):
        error = _error(magnitudes[k], became[k])
        squares[k] += kept[k] * (error * error)
    for k in range(len(n)):
        error = abs(_error(magnitudes[k], became[k]))
        largest[k] = max(largest[k], error if kept[k] > 0 else 0.0)
    results, result_squares = part[_BECAME], part[_BECAME_SQUARE]
    for k in range(len(n)):
        results[k] += kept[k] * np.float64(as_float(became[k]))
    for k in range(len(n)):
        y = np.float64(as_float(became[k]))
        result_squares[k] += kept[k] * (y * y)


@inlined
def _error(magnitude: Any, became: Any) -> Any:
    """Of finite numbers; what is not finite counts as zero, and has no weight."""
    x = np.float64(as_float(magnitude if magnitude < INFINITY else np.int32(0)))
    return np.float64(as_float(became)) - x


@kernel
def _to_binades(patterns: Any, by_pattern: Any, largest: Any, sums: Any) -> None:
    """Add the sums of each pattern to those of its binade and of the tensor."""
    counts, totals, binade_counts, binade_sums = sums
    for k in range(len(patterns)):
        magnitude = np.int32(patterns[k] & MAGNITUDE)
        if magnitude >= INFINITY:
            continue
        n, error = by_pattern[_FINITE, k], by_pattern[_ERROR, k]
        counts[COMPARED] += np.int64(n)
        counts[LOST] += np.int64(by_pattern[_LOST, k])
        if magnitude == 0:
            continue
        x, binade = np.float64(as_float(magnitude)), magnitude >> 23
        binade_counts[VALUES, binade] += np.int64(n)
        binade_counts[UNDERFLOW, binade] += np.int64(by_pattern[_ZERO, k])
        binade_counts[SATURATED, binade] += np.int64(by_pattern[_BEYOND, k])
        binade_sums[SQUARED, binade] += by_pattern[_SQUARE, k]
        binade_sums[MAGNITUDE_ERROR, binade] += error
        binade_sums[RELATIVE, binade] += by_pattern[_DISTANCE, k] / x
        totals[XX] += n * (x * x)
        totals[YY] += by_pattern[_BECAME_SQUARE, k]
        totals[XY] += x * by_pattern[_BECAME, k]
        totals[BIAS] += -error if patterns[k] < 0 else error
        totals[L1] += n * x
        totals[LARGEST_ERROR] = max(totals[LARGEST_ERROR], largest[k])


@kernel
def disagree_blocks(
    patterns: Any,
    row_classes: Any,
    column_classes: Any,
    cells: Any,
    coder: Any,
    counts: Any,
    totals: Any,
) -> None:
    """As `account_disagreement`, of an element format with block scales and bfloat16 values."""
    magnitudes = np.empty(len(patterns), np.int32)
    for k in range(len(patterns)):
        magnitudes[k] = patterns[k] & MAGNITUDE
    differ, squares = np.zeros(len(patterns)), np.zeros(len(patterns))
    one, other = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    for pair in range(len(row_classes)):
        first, second = row_classes[pair], column_classes[pair]
        if coder.bytes[first] == coder.bytes[second]:
            continue
        downs, ups = (coder.down[first], coder.down[second]), (coder.up[first], coder.up[second])
        if np.isnan(ups[0]) or np.isnan(ups[1]):
            for k in range(len(patterns)):
                if cells[pair, k] > 0:
                    n = np.int64(cells[pair, k])
                    disagree(patterns[k], first, second, n, coder, counts, totals)
            continue
        for left in range(0, len(patterns), TILE):
            n, tile = cells[pair, left : left + TILE], magnitudes[left : left + TILE]
            total = 0.0
            for k in range(len(n)):
                total = max(total, n[k])
            if total > 0:
                counted, summed = differ[left : left + TILE], squares[left : left + TILE]
                _compare(tile, n, downs, ups, coder, one, other, counted, summed)
    for k in range(len(patterns)):
        counts[0] += np.int64(differ[k])
        totals[0] += squares[k]


@kernel
def _compare(
    magnitudes: Any,
    n: Any,
    downs: Any,
    ups: Any,
    coder: Any,
    one: Any,
    other: Any,
    differ: Any,
    squares: Any,
) -> None:
    """Neighboring patterns with one pair of classes; loops as in `_tile`."""
    element, decode = coder.element, coder.rule.decode
    for k in range(len(n)):
        one[k] = block_value(magnitudes[k], downs[0], ups[0], element, decode)
    for k in range(len(n)):
        other[k] = block_value(magnitudes[k], downs[1], ups[1], element, decode)
    for k in range(len(n)):
        different = one[k] != other[k] and magnitudes[k] < INFINITY
        differ[k] += n[k] if different else 0.0
    for k in range(len(n)):
        both = one[k] < INFINITY and other[k] < INFINITY and magnitudes[k] < INFINITY
        a = np.float64(as_float(one[k] if both else np.int32(0)))
        b = np.float64(as_float(other[k] if both else np.int32(0)))
        squares[k] += n[k] * ((a - b) * (a - b))
