"""Where values become another number along the other axis, for scales of which there are too many
to count their pairs: nvfp4. Every value is quantized twice, eight at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.error_sums import disagree_values
from megatron.analysis.stats.kernels.error_sums_simd import block_value
from megatron.analysis.stats.kernels.half_tables import widened
from megatron.analysis.stats.kernels.scalar_quantizer import NAN_E4M3, ScalarQuantizer
from megatron.fake_quant.fused.numba_bits import MAGNITUDE, as_float

STRETCH = 512  #: columns at a time


def disagree_scaled(
    piece: NDArray[np.uint16],
    dtype: torch.dtype,
    classes: dict[str, NDArray[np.uint8]],
    size: int,
    run: int,
    coder: ScalarQuantizer,
    errors: Errors,
) -> None:
    """Add the values of a piece of a 16-bit tensor that differ to `errors`."""
    rows, columns = classes["row"], classes["column"]
    highest = max(int(rows.max()), int(columns.max()))
    usual = dtype == torch.bfloat16 and highest < NAN_E4M3
    if usual:
        count, total = _disagree(piece, rows, columns, size, run, coder)
        errors.disagreement[0] += count
        errors.disagreement_sum += total
    else:  # NaN in some block, or float16, whose rounding has branches
        bits = widened(dtype)[piece]
        disagree_values(
            bits, rows, columns, size, run, coder, errors.disagreement, errors.disagreement_sum
        )


@kernel
def _disagree(piece: Any, rows: Any, columns: Any, size: Any, run: Any, coder: Any) -> Any:
    """How many values differ, and the sum of the squared differences. Stretches of columns are
    long, so that what it costs to enter a loop counts little, and each column has its own sum.
    """
    blocks_in_run = (run + size - 1) // size
    count, total = 0, 0.0
    element, decode = coder.element, coder.rule.decode
    downs, ups = np.empty(STRETCH, np.float32), np.empty(STRETCH, np.float32)
    down, up = np.empty(STRETCH, np.float32), np.empty(STRETCH, np.float32)
    one, other = np.empty(STRETCH, np.int32), np.empty(STRETCH, np.int32)
    counts, totals = np.zeros(STRETCH, np.int32), np.zeros(STRETCH)
    for o in range(piece.shape[0]):
        for left in range(0, piece.shape[2], STRETCH):
            right = min(left + STRETCH, piece.shape[2])
            for top in range(0, piece.shape[1], size):
                counts[:], totals[:] = 0, 0.0
                classes = columns[o, top // size, left:right]
                for j in range(len(classes)):
                    downs[j], ups[j] = coder.down[classes[j]], coder.up[classes[j]]
                for i in range(top, min(top + size, piece.shape[1])):
                    _spread(rows[o, i], left, right, size, run, blocks_in_run, coder, down, up)
                    values = piece[o, i, left:right]
                    _values(values, down, up, element, decode, one)
                    _values(values, downs, ups, element, decode, other)
                    n = len(values)
                    _compare(one[:n], other[:n], counts[:n], totals[:n])
                for j in range(len(classes)):
                    count += counts[j]
                    total += totals[j]
    return count, total


@kernel
def _spread(
    classes: Any,
    left: Any,
    right: Any,
    size: Any,
    run: Any,
    blocks_in_run: Any,
    coder: Any,
    down: Any,
    up: Any,
) -> None:
    """The scales of a row's blocks, for each column from left to right."""
    place = left % run  # within a run
    block = left // run * blocks_in_run + place // size
    first, end = left, left - place + run
    last = min(left - place % size + size, end)
    while first < right:
        one, other = coder.down[classes[block]], coder.up[classes[block]]
        # counting from 0 saves a check for negative indices
        downs = down[first - left : min(last, right) - left]
        ups = up[first - left : min(last, right) - left]
        for j in range(len(downs)):
            downs[j] = one
        for j in range(len(ups)):
            ups[j] = other
        first, block = last, block + 1
        if last == end:
            end += run
        last = min(last + size, end)


@kernel
def _values(values: Any, down: Any, up: Any, element: Any, decode: Any, results: Any) -> None:
    """What a row becomes, in float32 bits."""
    for j in range(len(values)):
        magnitude = np.int32(np.int32(np.int32(values[j]) << 16) & MAGNITUDE)
        results[j] = block_value(magnitude, down[j], up[j], element, decode)


@kernel
def _compare(one: Any, other: Any, counts: Any, totals: Any) -> None:
    """Loops that write one array each: with more, the compiler cannot rule out that they overlap,
    and gives up on vectors.
    """
    for j in range(len(counts)):
        counts[j] += np.int32(1) if one[j] != other[j] else np.int32(0)
    for j in range(len(totals)):
        difference = np.float64(as_float(one[j])) - np.float64(as_float(other[j]))
        totals[j] += difference * difference
