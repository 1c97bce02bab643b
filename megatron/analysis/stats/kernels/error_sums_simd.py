"""Add up the errors of block-scaled formats in bfloat16 values, eight bit patterns at a time.

The kernels compute the same results as `account_counted` and `compare_counted`, but several times
faster. Each pattern has its own sums, so that no addition waits for the previous one; at the end,
these sums are added to the sums of the binades. Counts are stored in float64, which is exact up to
2^53. Tiles of patterns that do not occur with a class are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.error_sums import (
    BIAS,
    CLIPPING_ERROR,
    COMPARED,
    GRID_ERROR,
    L1,
    LARGEST_ERROR,
    LOST,
    MAGNITUDE_ERROR,
    OVERFLOW,
    POISONED,
    RELATIVE,
    SATURATED,
    UNDERFLOW,
    UNDERFLOW_ERROR,
    VALUES,
    XX,
    XY,
    YY,
    compare_value,
)
from megatron.analysis.stats.kernels.scalar_quantizer import to_bfloat16
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_float,
    nearest_even,
)
from megatron.fake_quant.fused.numba_compile import inlined

TILE = 128  #: number of bit patterns that each loop processes
#: Rows of an array with one column per bit pattern. The first four rows count the values that stay
#: finite, become zero, are clipped, and become Inf. The others are sums: of the error, its
#: magnitude, the squared error due to the grid, the squared error due to clipping, the result, and
#: the squared result.
_FINITE, _ZERO, _CLIPPED, _LOST, _ERROR, _DISTANCE = range(6)
_GRID, _CLIPPING, _BECAME, _BECAME_SQUARE = range(6, 10)
_ROWS = 10


@inlined
def block_value(magnitude: Any, down: Any, up: Any, element: Any, decode: Any) -> Any:
    """Quantize a bfloat16 magnitude, and return the result as float32 bits.

    The result is the same as in `scalar_quantizer.quantized`, but is computed without branches.

    Args:
        down, up: scale factors of the block before and after rounding.
    """
    scaled = as_bits(as_float(magnitude) * down)
    rounded = nearest_even(min(scaled, element.top), element)
    return to_bfloat16(as_bits(np.float32(as_float(rounded) * up) * decode))


@kernel
def account_counted_simd(
    patterns: Any, classes: Any, cells: Any, quantizer: Any, sums: Any, code_counts: Any
) -> None:
    """Quantize distinct bfloat16 values with block scales, and sum the errors weighted by counts.

    The results are the same as those of `account_counted`.
    """
    by_pattern = np.zeros((_ROWS, len(patterns)))
    largest, magnitudes = np.zeros(len(patterns)), np.empty(len(patterns), np.int32)
    for k in range(len(patterns)):
        magnitudes[k] = patterns[k] & MAGNITUDE
    upper, finite_counts = np.empty(TILE, np.int32), np.empty(TILE)
    became, grid_counts = np.empty(TILE, np.int32), np.empty(TILE)
    for row in range(len(classes)):
        down, up = quantizer.down[classes[row]], quantizer.up[classes[row]]
        for first in range(0, len(patterns), TILE):
            n, tile = cells[row, first : first + TILE], magnitudes[first : first + TILE]
            # bits of the largest magnitude that occurs with this scale class
            highest = np.int32(-1)
            for k in range(len(n)):
                highest = max(highest, tile[k] if n[k] > 0 else np.int32(-1))
            if highest < 0:
                continue
            if np.isnan(up):
                for k in range(len(n)):
                    sums[0][POISONED] += np.int64(n[k]) if tile[k] < INFINITY else 0
                continue
            part = by_pattern[:, first : first + TILE]
            _tile(
                tile,
                n,
                highest,
                down,
                up,
                quantizer,
                part,
                largest[first : first + TILE],
                upper,
                finite_counts,
                became,
                grid_counts,
            )
            for k in range(len(n)):
                index = upper[k] | (np.int32(0x8000) if patterns[first + k] < 0 else np.int32(0))
                code_counts[quantizer.codes[np.uint32(index)]] += np.int64(finite_counts[k])
    _to_binades(patterns, by_pattern, largest, sums)


@kernel
def _tile(
    magnitudes: Any,
    n: Any,
    highest: Any,
    down: Any,
    up: Any,
    quantizer: Any,
    part: Any,
    largest: Any,
    upper: Any,
    finite_counts: Any,
    became: Any,
    grid_counts: Any,
) -> None:
    """Quantize up to TILE consecutive bit patterns with the same scale, and add up their errors.

    Each loop writes to only one array. If a loop wrote to several arrays, the compiler could not
    rule out that they overlap, and would not vectorize the loop.

    Args:
        magnitudes: float32 bits of the patterns.
        n: number of values with each pattern.
        highest: largest of the magnitudes that occur.
        part: sums for each pattern, updated in place.
        largest: largest error of each pattern, updated in place.
        upper: output array for the upper halves of the element magnitudes' float32 bits.
        finite_counts: output array; `n` if the value and its result are finite, otherwise 0.
        became: output array for the float32 bits of the results; 0 if a result is not finite.
        grid_counts: output array; `n` if the value is neither clipped nor becomes zero, otherwise
            0.
    """
    element, decode = quantizer.element, quantizer.rule.decode
    for k in range(len(n)):
        scaled = min(as_bits(as_float(magnitudes[k]) * down), element.top)
        upper[k] = np.int32(nearest_even(scaled, element) >> 16)
    for k in range(len(n)):
        became[k] = block_value(magnitudes[k], down, up, element, decode)
    for k in range(len(n)):
        finite_counts[k] = n[k] if magnitudes[k] < INFINITY and became[k] < INFINITY else 0.0
    for k in range(len(n)):
        grid_counts[k] = finite_counts[k] if became[k] > 0 else 0.0
    if as_bits(as_float(min(highest, INFINITY)) * down) > quantizer.limit:
        _clip(magnitudes, n, down, quantizer.limit, became, part, grid_counts)
    zero, finite, lost = part[_ZERO], part[_FINITE], part[_LOST]
    for k in range(len(n)):
        lost[k] += n[k] if magnitudes[k] < INFINITY and became[k] >= INFINITY else 0.0
        became[k] = became[k] if became[k] < INFINITY else 0
    for k in range(len(n)):
        zero[k] += finite_counts[k] if became[k] == 0 else 0.0
    for k in range(len(n)):
        finite[k] += finite_counts[k]
    errors, distances, grid = part[_ERROR], part[_DISTANCE], part[_GRID]
    for k in range(len(n)):
        errors[k] += finite_counts[k] * _error(magnitudes[k], became[k])
    for k in range(len(n)):
        distances[k] += finite_counts[k] * abs(_error(magnitudes[k], became[k]))
    for k in range(len(n)):
        error = _error(magnitudes[k], became[k])
        grid[k] += grid_counts[k] * (error * error)
    for k in range(len(n)):
        error = abs(_error(magnitudes[k], became[k]))
        largest[k] = max(largest[k], error if finite_counts[k] > 0 else 0.0)
    results, result_squares = part[_BECAME], part[_BECAME_SQUARE]
    for k in range(len(n)):
        results[k] += finite_counts[k] * np.float64(as_float(became[k]))
    for k in range(len(n)):
        y = np.float64(as_float(became[k]))
        result_squares[k] += finite_counts[k] * (y * y)


@kernel
def _clip(
    magnitudes: Any, n: Any, down: Any, limit: Any, became: Any, part: Any, grid_counts: Any
) -> None:
    """Count the clipped values, sum their squared errors, and set their `grid_counts` to zero.

    A value whose scale is zero becomes zero and does not count as clipped. Each loop writes to only
    one array; `_tile` explains why.
    """
    clipped, clipping = part[_CLIPPED], part[_CLIPPING]
    for k in range(len(n)):
        beyond = as_bits(as_float(magnitudes[k]) * down) > limit and magnitudes[k] < INFINITY
        clipped[k] += n[k] if beyond and became[k] > 0 else 0.0
    for k in range(len(n)):
        beyond = as_bits(as_float(magnitudes[k]) * down) > limit and grid_counts[k] > 0
        error = _error(magnitudes[k], became[k] if beyond else np.int32(0))
        clipping[k] += (grid_counts[k] if beyond else 0.0) * (error * error)
    for k in range(len(n)):
        beyond = as_bits(as_float(magnitudes[k]) * down) > limit
        grid_counts[k] = 0.0 if beyond else grid_counts[k]


@inlined
def _error(magnitude: Any, became: Any) -> Any:
    """Return the magnitude of a quantized value minus the magnitude of the original value.

    A magnitude that is not finite counts as zero; the caller weights its error with zero.
    """
    x = np.float64(as_float(magnitude if magnitude < INFINITY else np.int32(0)))
    return np.float64(as_float(became)) - x


@kernel
def _to_binades(patterns: Any, by_pattern: Any, largest: Any, sums: Any) -> None:
    """Add each bit pattern's sums to the sums of its binade and of the whole tensor."""
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
        binade_counts[SATURATED, binade] += np.int64(by_pattern[_CLIPPED, k])
        binade_counts[OVERFLOW, binade] += np.int64(by_pattern[_LOST, k])
        binade_sums[GRID_ERROR, binade] += by_pattern[_GRID, k]
        binade_sums[CLIPPING_ERROR, binade] += by_pattern[_CLIPPING, k]
        binade_sums[UNDERFLOW_ERROR, binade] += by_pattern[_ZERO, k] * (x * x)
        binade_sums[MAGNITUDE_ERROR, binade] += error
        binade_sums[RELATIVE, binade] += by_pattern[_DISTANCE, k] / x
        totals[XX] += n * (x * x)
        totals[YY] += by_pattern[_BECAME_SQUARE, k]
        totals[XY] += x * by_pattern[_BECAME, k]
        totals[BIAS] += -error if patterns[k] < 0 else error
        totals[L1] += n * x
        totals[LARGEST_ERROR] = max(totals[LARGEST_ERROR], largest[k])


@kernel
def compare_counted_simd(
    patterns: Any,
    row_classes: Any,
    column_classes: Any,
    cells: Any,
    quantizer: Any,
    counts: Any,
    totals: Any,
) -> None:
    """Sum the squared differences between the row-wise and column-wise results of bfloat16 values.

    The format has block scales. Each difference is weighted by the number of values. The sums are
    the same as those of `compare_counted`.
    """
    magnitudes = np.empty(len(patterns), np.int32)
    for k in range(len(patterns)):
        magnitudes[k] = patterns[k] & MAGNITUDE
    differ, squares = np.zeros(len(patterns)), np.zeros(len(patterns))
    row_bits, column_bits = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    for pair in range(len(row_classes)):
        first, second = row_classes[pair], column_classes[pair]
        if quantizer.bytes[first] == quantizer.bytes[second]:
            continue
        downs, ups = (
            (quantizer.down[first], quantizer.down[second]),
            (quantizer.up[first], quantizer.up[second]),
        )
        if np.isnan(ups[0]) or np.isnan(ups[1]):
            for k in range(len(patterns)):
                if cells[pair, k] > 0:
                    n = np.int64(cells[pair, k])
                    compare_value(patterns[k], first, second, n, quantizer, counts, totals)
            continue
        for left in range(0, len(patterns), TILE):
            n, tile = cells[pair, left : left + TILE], magnitudes[left : left + TILE]
            total = 0.0
            for k in range(len(n)):
                total = max(total, n[k])
            if total > 0:
                counted, summed = differ[left : left + TILE], squares[left : left + TILE]
                _compare(tile, n, downs, ups, quantizer, row_bits, column_bits, counted, summed)
    for k in range(len(patterns)):
        counts[0] += np.int64(differ[k])
        totals[0] += squares[k]


@kernel
def _compare(
    magnitudes: Any,
    n: Any,
    downs: Any,
    ups: Any,
    quantizer: Any,
    row_bits: Any,
    column_bits: Any,
    differ: Any,
    squares: Any,
) -> None:
    """Quantize bit patterns with the scales of a row block and a column block; compare the results.

    Each loop writes to only one array; `_tile` explains why.

    Args:
        magnitudes: float32 bits of the patterns.
        n: number of values with each pattern and this pair of scale classes.
        downs, ups: scale factors of the block along the row and of the block along the column.
        row_bits, column_bits: output arrays for the results along the row and the column.
        differ: number of values with different results, updated in place.
        squares: sum of the squared differences, updated in place.
    """
    element, decode = quantizer.element, quantizer.rule.decode
    for k in range(len(n)):
        row_bits[k] = block_value(magnitudes[k], downs[0], ups[0], element, decode)
    for k in range(len(n)):
        column_bits[k] = block_value(magnitudes[k], downs[1], ups[1], element, decode)
    for k in range(len(n)):
        different = row_bits[k] != column_bits[k] and magnitudes[k] < INFINITY
        differ[k] += n[k] if different else 0.0
    for k in range(len(n)):
        both = row_bits[k] < INFINITY and column_bits[k] < INFINITY and magnitudes[k] < INFINITY
        a = np.float64(as_float(row_bits[k] if both else np.int32(0)))
        b = np.float64(as_float(column_bits[k] if both else np.int32(0)))
        squares[k] += n[k] * ((a - b) * (a - b))
