"""Add up the errors that a format causes: counts by binade and code, and sums in float64.

`account` adds the error of a value, given its quantized result and the number of occurrences. The
`account_*` functions call it for counted patterns (16-bit tensors), for single values (float32), or
for pairs of values and results that were computed elsewhere (stochastic rounding and HiFloat4). The
`compare_*` functions add up the differences between the results along the two axes of a tensor.

Values and results are float32 bits. `sums` is the tuple `Errors.sums` of four arrays:

    counts          [COUNTS] number of values by outcome: COMPARED, POISONED or LOST
    totals          [SUMS] sums over all compared values: XX, YY, ...
    binade_counts   [4, BINADES] rows VALUES, UNDERFLOW, SATURATED and OVERFLOW, by binade
    binade_sums     [CAUSES + 2, BINADES] rows GRID_ERROR, CLIPPING_ERROR, UNDERFLOW_ERROR,
                    MAGNITUDE_ERROR and RELATIVE, by binade of the value

The first three rows of `binade_sums` split the squared error by cause. The error of a value that
becomes zero is due to underflow. The error of any other value above the overflow threshold, which
would round to more than the largest number, is due to clipping. All other values are rounded to a
neighboring number of the format; their error is due to the grid of these numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.scalar_quantizer import quantized
from megatron.fake_quant.fused.numba_bits import INFINITY, MAGNITUDE, as_float

BINADES = 255
#: Rows of `binade_counts`: nonzero values whose result is finite, nonzero values that become zero,
#: clipped values, and values that become Inf. BINADE_ROWS is the number of rows.
VALUES, UNDERFLOW, SATURATED, OVERFLOW, BINADE_ROWS = 0, 1, 2, 3, 4
#: Rows of `binade_sums`, for values x and results y: sums of (y - x)^2, in one row per cause; sums
#: of |y| - |x|; and sums of |y - x| / |x|. CAUSES is the number of causes.
GRID_ERROR, CLIPPING_ERROR, UNDERFLOW_ERROR, CAUSES = 0, 1, 2, 3
MAGNITUDE_ERROR, RELATIVE = CAUSES, CAUSES + 1
#: Positions in `counts`: numbers of finite values whose result is finite, NaN and Inf,
#: respectively. COUNTS is the length of `counts`.
COMPARED, POISONED, LOST, COUNTS = 0, 1, 2, 3
#: Positions in `totals`, for values x and results y: sums of x^2, y^2, x y, y - x and |x|, and the
#: largest |y - x|. SUMS is the length of `totals`.
XX, YY, XY, BIAS, L1, LARGEST_ERROR, SUMS = 0, 1, 2, 3, 4, 5, 6


@kernel
def account(bits: Any, result: Any, clipped: Any, n: Any, sums: Any) -> Any:
    """Add to `sums` the error of a value that occurs `n` times.

    Args:
        clipped: whether the value would round to more than the format's largest number.

    Returns:
        True if both the value and its quantized result are finite.
    """
    counts, totals, binade_counts, binade_sums = sums
    compared = False
    magnitude, became = np.int32(bits & MAGNITUDE), np.int32(result & MAGNITUDE)
    if magnitude < INFINITY:
        binade = magnitude >> 23
        if became > INFINITY:
            counts[POISONED] += n
        else:
            # a clipped value whose scale is zero becomes zero and counts as underflow
            if clipped and became > 0:
                binade_counts[SATURATED, binade] += n
            if became == INFINITY:
                counts[LOST] += n
                binade_counts[OVERFLOW, binade] += n
            else:
                compared = True
                counts[COMPARED] += n
                if magnitude > 0:
                    x, y = np.float64(as_float(magnitude)), np.float64(as_float(became))
                    error = y - x
                    binade_counts[VALUES, binade] += n
                    cause = CLIPPING_ERROR if clipped else GRID_ERROR
                    if became == 0:
                        binade_counts[UNDERFLOW, binade] += n
                        cause = UNDERFLOW_ERROR
                    binade_sums[cause, binade] += n * (error * error)
                    binade_sums[MAGNITUDE_ERROR, binade] += n * error
                    binade_sums[RELATIVE, binade] += n * (abs(error) / x)
                    totals[XX] += n * (x * x)
                    totals[YY] += n * (y * y)
                    totals[XY] += n * (x * y)
                    totals[BIAS] += -(n * error) if bits < 0 else n * error
                    totals[L1] += n * x
                    totals[LARGEST_ERROR] = max(totals[LARGEST_ERROR], abs(error))
    return compared


@kernel
def code_of(rounded: Any, bits: Any, codes: Any) -> Any:
    """Return the code of the element value with magnitude `rounded` and the sign of `bits`."""
    return codes[(rounded >> 16) | (np.int32(0x8000) if bits < 0 else np.int32(0))]


@kernel
def account_counted(
    patterns: Any, classes: Any, cells: Any, quantizer: Any, sums: Any, code_counts: Any
) -> None:
    """Quantize values that were counted by bit pattern and scale class, and sum their errors.

    Args:
        patterns: [patterns] values, as float32 bits.
        classes: [classes] scale class of the blocks for each row of `cells`.
        cells: [classes, patterns] number of values.
        code_counts: number of values by code, updated in place; empty if codes are not counted.
    """
    for row in range(len(classes)):
        class_ = classes[row]
        for k in range(len(patterns)):
            n = np.int64(cells[row, k])
            if n > 0:
                bits = patterns[k]
                result, rounded, clipped = quantized(bits, np.int64(class_), quantizer)
                if account(bits, result, clipped, np.int64(n), sums) and len(code_counts) > 0:
                    code_counts[code_of(rounded, bits, quantizer.codes)] += n


@kernel
def compare_counted(
    patterns: Any,
    row_classes: Any,
    column_classes: Any,
    cells: Any,
    quantizer: Any,
    counts: Any,
    totals: Any,
) -> None:
    """Sum the squared differences between the row-wise and column-wise results of counted values.

    A value has one result with the scale of its row block and one with the scale of its column
    block. Their difference is weighted by the number of values. A value that becomes NaN or Inf
    along only one axis is counted, but does not enter the sum.

    Args:
        patterns: [patterns] values, as float32 bits.
        row_classes, column_classes: [pairs] scale classes of the row and the column blocks.
        cells: [pairs, patterns] number of values.
        counts: `counts[0]` is the number of values with different results, updated in place.
        totals: `totals[0]` is the sum of the squared differences, updated in place.
    """
    for pair in range(len(row_classes)):
        first, second = row_classes[pair], column_classes[pair]
        if first != second:
            for k in range(len(patterns)):
                n = np.int64(cells[pair, k])
                if n > 0:
                    compare_value(patterns[k], first, second, n, quantizer, counts, totals)


@kernel
def compare_value(
    bits: Any, first: Any, second: Any, n: Any, quantizer: Any, counts: Any, totals: Any
) -> None:
    """Quantize a value row-wise and column-wise, and call `compare_results` with both results."""
    if np.int32(bits & MAGNITUDE) < INFINITY:
        along_row = quantized(bits, np.int64(first), quantizer)[0]
        along_column = quantized(bits, np.int64(second), quantizer)[0]
        compare_results(along_row, along_column, np.int64(n), counts, totals)


@kernel
def compare_results(along_row: Any, along_column: Any, n: Any, counts: Any, totals: Any) -> None:
    """Add to `totals` the squared difference of a finite value's row-wise and column-wise results.

    `compare_counted` describes the arguments.
    """
    a, b = np.int32(along_row & MAGNITUDE), np.int32(along_column & MAGNITUDE)
    if a < INFINITY and b < INFINITY:
        if a != b:  # a and b have the same sign, so compare magnitudes
            counts[0] += n
            difference = np.float64(as_float(a)) - np.float64(as_float(b))
            totals[0] += n * (difference * difference)
    elif (a > INFINITY) != (b > INFINITY) or (a == INFINITY) != (b == INFINITY):
        counts[0] += n


@kernel
def account_values(
    piece: Any,
    classes: Any,
    size: Any,
    run: Any,
    along_rows: Any,
    quantizer: Any,
    sums: Any,
    code_counts: Any,
) -> None:
    """Quantize the values of a chunk one by one, and sum their errors.

    Args:
        piece: [outer, rows, columns] values of the chunk, as float32 bits.
        classes: scale classes of the blocks along rows or along columns.
        size: number of values per block.
        run: number of values in a run; no block along a row crosses its boundary.
        along_rows: whether the blocks run along rows.
    """
    blocks_in_run = (run + size - 1) // size
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            values = piece[o, i]
            for j in range(len(values)):
                bits = values[j]
                if along_rows:
                    class_ = classes[o, i, j // run * blocks_in_run + j % run // size]
                else:
                    class_ = classes[o, i // size, j]
                result, rounded, clipped = quantized(bits, np.int64(class_), quantizer)
                if account(bits, result, clipped, np.int64(1), sums) and len(code_counts) > 0:
                    code_counts[code_of(rounded, bits, quantizer.codes)] += 1


@kernel
def compare_values(
    piece: Any,
    row_classes: Any,
    column_classes: Any,
    size: Any,
    run: Any,
    quantizer: Any,
    counts: Any,
    totals: Any,
) -> None:
    """Sum the squared differences between a chunk's values quantized row-wise and column-wise.

    `compare_counted` describes the results.
    """
    blocks_in_run = (run + size - 1) // size
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            values = piece[o, i]
            for j in range(len(values)):
                first = row_classes[o, i, j // run * blocks_in_run + j % run // size]
                second = column_classes[o, i // size, j]
                if first != second:
                    compare_value(values[j], first, second, 1, quantizer, counts, totals)


@kernel
def account_pairs(
    values: Any, results: Any, clipped: Any, sums: Any, codes: Any, code_counts: Any
) -> None:
    """Sum the errors of values whose results are given, and count the codes of the results.

    All arrays are one-dimensional.
    """
    for i in range(len(values)):
        if account(values[i], results[i], clipped[i], np.int64(1), sums) and len(code_counts) > 0:
            code_counts[codes[i]] += 1


@kernel
def compare_pairs(rows: Any, columns: Any, values: Any, counts: Any, totals: Any) -> None:
    """Sum the squared differences between row-wise and column-wise results of the same values.

    `compare_counted` describes `counts` and `totals`.
    """
    for i in range(len(values)):
        if np.int32(values[i] & MAGNITUDE) < INFINITY:
            compare_results(rows[i], columns[i], np.int64(1), counts, totals)
