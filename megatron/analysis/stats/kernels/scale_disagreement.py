"""Compare quantization along rows with quantization along columns, for the two-level format nvfp4.

E4M3 scales form too many pairs to count the values by pair of scale classes. Each value is
therefore quantized twice, eight values at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.error_sums import compare_values
from megatron.analysis.stats.kernels.error_sums_simd import block_value
from megatron.analysis.stats.kernels.half_tables import widened
from megatron.analysis.stats.kernels.scalar_quantizer import NAN_E4M3, ScalarQuantizer
from megatron.fake_quant.fused.numba_bits import MAGNITUDE, as_float

STRETCH = 512  #: number of columns that each loop processes


def compare_two_level(
    piece: NDArray[np.uint16],
    dtype: torch.dtype,
    classes: dict[str, NDArray[np.uint8]],
    size: int,
    run: int,
    quantizer: ScalarQuantizer,
    errors: Errors,
) -> None:
    """Quantize 16-bit values along rows and along columns, and add the disagreement to `errors`.

    Args:
        classes: scale classes of the blocks, keyed by axis ("row" and "column").
        size: number of values per block.
        run: number of values in a run; no block along a row crosses its boundary.
    """
    rows, columns = classes["row"], classes["column"]
    highest = max(int(rows.max()), int(columns.max()))
    usual = dtype == torch.bfloat16 and highest < NAN_E4M3
    if usual:
        count, total = _disagree(piece, rows, columns, size, run, quantizer)
        errors.disagreement[0] += count
        errors.disagreement_sum += total
    else:  # a block has NaN or Inf, or the dtype is float16, which needs branches for rounding
        bits = widened(dtype)[piece]
        compare_values(
            bits, rows, columns, size, run, quantizer, errors.disagreement, errors.disagreement_sum
        )


@kernel
def _disagree(piece: Any, rows: Any, columns: Any, size: Any, run: Any, quantizer: Any) -> Any:
    """Compare a chunk quantized along rows with the same chunk quantized along columns.

    Columns are processed in stretches that are long enough to make the cost of starting a loop
    small. Each column has its own sum, so that additions need not wait for each other.

    Returns:
        Number of values whose results differ, and sum of the squared differences.
    """
    blocks_in_run = (run + size - 1) // size
    count, total = 0, 0.0
    element, decode = quantizer.element, quantizer.rule.decode
    downs, ups = np.empty(STRETCH, np.float32), np.empty(STRETCH, np.float32)
    down, up = np.empty(STRETCH, np.float32), np.empty(STRETCH, np.float32)
    along_rows, along_columns = np.empty(STRETCH, np.int32), np.empty(STRETCH, np.int32)
    counts, totals = np.zeros(STRETCH, np.int32), np.zeros(STRETCH)
    for o in range(piece.shape[0]):
        for left in range(0, piece.shape[2], STRETCH):
            right = min(left + STRETCH, piece.shape[2])
            for top in range(0, piece.shape[1], size):
                counts[:], totals[:] = 0, 0.0
                classes = columns[o, top // size, left:right]
                for j in range(len(classes)):
                    downs[j], ups[j] = quantizer.down[classes[j]], quantizer.up[classes[j]]
                for i in range(top, min(top + size, piece.shape[1])):
                    _spread(rows[o, i], left, right, size, run, blocks_in_run, quantizer, down, up)
                    values = piece[o, i, left:right]
                    _quantize(values, down, up, element, decode, along_rows)
                    _quantize(values, downs, ups, element, decode, along_columns)
                    n = len(values)
                    _compare(along_rows[:n], along_columns[:n], counts[:n], totals[:n])
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
    quantizer: Any,
    down: Any,
    up: Any,
) -> None:
    """Write the scale factors of the blocks in one row, repeated for each column of a block.

    Only the columns from `left` to `right` - 1 are included.

    Args:
        classes: scale classes of the blocks in the row.
        down, up: output arrays for the factors of each column before and after rounding.
    """
    # distance of column `left` from the start of its run (a head, or the whole row)
    offset = left % run
    block = left // run * blocks_in_run + offset // size
    first, end = left, left - offset + run
    last = min(left - offset % size + size, end)
    while first < right:
        down_scale, up_scale = quantizer.down[classes[block]], quantizer.up[classes[block]]
        # the loops start at 0, so that numba compiles no check for negative indices
        downs = down[first - left : min(last, right) - left]
        ups = up[first - left : min(last, right) - left]
        for j in range(len(downs)):
            downs[j] = down_scale
        for j in range(len(ups)):
            ups[j] = up_scale
        first, block = last, block + 1
        if last == end:
            end += run
        last = min(last + size, end)


@kernel
def _quantize(values: Any, down: Any, up: Any, element: Any, decode: Any, results: Any) -> None:
    """Quantize bfloat16 values, and write the result magnitudes to `results` as float32 bits."""
    for j in range(len(values)):
        magnitude = np.int32(np.int32(np.int32(values[j]) << 16) & MAGNITUDE)
        results[j] = block_value(magnitude, down[j], up[j], element, decode)


@kernel
def _compare(along_rows: Any, along_columns: Any, counts: Any, totals: Any) -> None:
    """Compare two rows of results; add to each column's count and sum of squared differences.

    Each loop writes to only one array. If a loop wrote to several arrays, the compiler could not
    rule out that they overlap, and would not vectorize the loop.
    """
    for j in range(len(counts)):
        counts[j] += np.int32(1) if along_rows[j] != along_columns[j] else np.int32(0)
    for j in range(len(totals)):
        difference = np.float64(as_float(along_rows[j])) - np.float64(as_float(along_columns[j]))
        totals[j] += difference * difference
