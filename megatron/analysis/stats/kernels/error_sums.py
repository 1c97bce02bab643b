"""Adds up what a format does to values: counts by binade and code, and sums in float64.

`account` takes a value, what it becomes and how often the pair occurs. The loops around it go over
counted patterns (16-bit tensors), over single values (float32), or over pairs that were quantized
elsewhere (stochastic rounding and HiFloat4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.scalar_quantizer import quantized
from megatron.fake_quant.fused.numba_bits import INFINITY, MAGNITUDE, as_float

BINADES = 255
#: Rows of the counts by binade, of the sums by binade, and places in the other counts and sums.
VALUES, UNDERFLOW, SATURATED = 0, 1, 2
SQUARED, MAGNITUDE_ERROR, RELATIVE = 0, 1, 2
COMPARED, POISONED, LOST, COUNTS = 0, 1, 2, 3
XX, YY, XY, BIAS, L1, LARGEST_ERROR, SUMS = 0, 1, 2, 3, 4, 5, 6


@kernel
def account(bits: Any, result: Any, beyond: Any, n: Any, sums: Any) -> Any:
    """`n` values with these float32 bits become `result`; True if both are numbers.

    sums: counts [COUNTS], totals [SUMS], counts by binade [3, BINADES], sums by binade.
    """
    counts, totals, binade_counts, binade_sums = sums
    compared = False
    magnitude, became = np.int32(bits & MAGNITUDE), np.int32(result & MAGNITUDE)
    if magnitude < INFINITY:
        binade = magnitude >> 23
        if became > INFINITY:
            counts[POISONED] += n
        else:
            if beyond and became > 0:  # under a scale of zero it is not clipped, it underflows
                binade_counts[SATURATED, binade] += n
            if became == INFINITY:
                counts[LOST] += n
            else:
                compared = True
                counts[COMPARED] += n
                if magnitude > 0:
                    x, y = np.float64(as_float(magnitude)), np.float64(as_float(became))
                    error = y - x
                    binade_counts[VALUES, binade] += n
                    if became == 0:
                        binade_counts[UNDERFLOW, binade] += n
                    binade_sums[SQUARED, binade] += n * (error * error)
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
    """The code of an element's magnitude with the sign of `bits`."""
    return codes[(rounded >> 16) | (np.int32(0x8000) if bits < 0 else np.int32(0))]


@kernel
def account_cells(
    patterns: Any, classes: Any, cells: Any, coder: Any, sums: Any, code_counts: Any
) -> None:
    """Values counted by class and pattern.

    patterns: float32 bits; classes: of the rows of `cells` [classes, patterns], which count.
    """
    for row in range(len(classes)):
        class_ = classes[row]
        for k in range(len(patterns)):
            n = np.int64(cells[row, k])
            if n > 0:
                bits = patterns[k]
                result, rounded, beyond = quantized(bits, np.int64(class_), coder)
                if account(bits, result, beyond, np.int64(n), sums) and len(code_counts) > 0:
                    code_counts[code_of(rounded, bits, coder.codes)] += n


@kernel
def account_disagreement(
    patterns: Any,
    row_classes: Any,
    column_classes: Any,
    cells: Any,
    coder: Any,
    counts: Any,
    totals: Any,
) -> None:
    """Values that become one number with the class of their row and another with that of their
    column: their number (counts[0]) and the sum of the squared differences (totals[0]).

    Of values that become NaN along one axis only, the number.
    """
    for pair in range(len(row_classes)):
        first, second = row_classes[pair], column_classes[pair]
        if first != second:
            for k in range(len(patterns)):
                n = np.int64(cells[pair, k])
                if n > 0:
                    disagree(patterns[k], first, second, n, coder, counts, totals)


@kernel
def disagree(
    bits: Any, first: Any, second: Any, n: Any, coder: Any, counts: Any, totals: Any
) -> None:
    """One value with two classes."""
    if np.int32(bits & MAGNITUDE) < INFINITY:
        one = quantized(bits, np.int64(first), coder)[0]
        other = quantized(bits, np.int64(second), coder)[0]
        differ(one, other, np.int64(n), counts, totals)


@kernel
def differ(one: Any, other: Any, n: Any, counts: Any, totals: Any) -> None:
    """What one value became along both axes, in bits."""
    a, b = np.int32(one & MAGNITUDE), np.int32(other & MAGNITUDE)
    if a < INFINITY and b < INFINITY:
        if a != b:  # the sign is that of the value
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
    coder: Any,
    sums: Any,
    code_counts: Any,
) -> None:
    """Single values: float32 bits [outer, rows, columns], and the classes of their blocks."""
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
                result, rounded, beyond = quantized(bits, np.int64(class_), coder)
                if account(bits, result, beyond, np.int64(1), sums) and len(code_counts) > 0:
                    code_counts[code_of(rounded, bits, coder.codes)] += 1


@kernel
def disagree_values(
    piece: Any,
    row_classes: Any,
    column_classes: Any,
    size: Any,
    run: Any,
    coder: Any,
    counts: Any,
    totals: Any,
) -> None:
    """Single values with the classes of both their blocks, as `account_disagreement`."""
    blocks_in_run = (run + size - 1) // size
    for o in range(piece.shape[0]):
        for i in range(piece.shape[1]):
            values = piece[o, i]
            for j in range(len(values)):
                first = row_classes[o, i, j // run * blocks_in_run + j % run // size]
                second = column_classes[o, i // size, j]
                if first != second:
                    disagree(values[j], first, second, 1, coder, counts, totals)


@kernel
def account_pairs(
    values: Any, results: Any, beyond: Any, sums: Any, codes: Any, code_counts: Any
) -> None:
    """Values and what they became, as flat float32 bits; `codes` are counted."""
    for i in range(len(values)):
        if account(values[i], results[i], beyond[i], np.int64(1), sums) and len(code_counts) > 0:
            code_counts[codes[i]] += 1


@kernel
def disagree_pairs(rows: Any, columns: Any, values: Any, counts: Any, totals: Any) -> None:
    """What values became along both axes, as flat float32 bits."""
    for i in range(len(values)):
        if np.int32(values[i] & MAGNITUDE) < INFINITY:
            differ(rows[i], columns[i], np.int64(1), counts, totals)
