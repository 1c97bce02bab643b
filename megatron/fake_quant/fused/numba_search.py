"""Choose between two candidates for each block scale ("4/6"), in the CPU kernels.

Errors are computed for all values of a row at once. They are added in the order that
`float8_scales._error` defines: the values of a row of a block one by one, then the rows in halves.
The rows of a block run along the axis of the blocks, which is not always the last axis in memory.
"""

from typing import Any

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    MAGNITUDE,
    as_bits,
    as_float,
    nearest_even,
    widen,
)
from megatron.fake_quant.fused.numba_columns import TILE
from megatron.fake_quant.fused.numba_compile import called, inlined


@inlined
def errors(
    src: Any, down: Any, up: Any, amax: Any, out: Any, add: Any, element: Any, rule: Any
) -> Any:
    """Compute the error of each value of `src` under one candidate; see `float8_scales._error`.

    `down` and `up` are the factors applied to each value before and after rounding, and `amax` is
    the largest magnitude of the values that share its outer scale. If `add` is True, the errors are
    added to `out`; otherwise they replace it.
    """
    for j in range(len(src)):
        x = as_float(np.int32(widen(src[j]) & MAGNITUDE))
        scaled = min(as_bits(np.float32(x * down[j])), element.top)
        code = as_float(nearest_even(scaled, element))
        value = np.float32(np.float32(np.float32(code * up[j]) * amax[j]) / rule.target)
        difference = np.float32(value - x)
        error = np.float32(difference * difference) if rule.search == 2 else abs(difference)
        out[j] = np.float32(out[j] + error) if add else error


@inlined
def add_rows(values: Any, totals: Any, width: Any, count: Any) -> Any:
    """Add the `width` neighboring values of each block to the total of the block, one by one.

    A block whose width exceeds the length of `values` contains all of them.
    """
    for b in range(count):
        total = totals[b]
        for j in range(b * width, min((b + 1) * width, TILE)):
            total = np.float32(total + values[j])
        totals[b] = total


@inlined
def add_halves(totals: Any) -> Any:
    """Sum the rows of `totals` into row 0, by adding the second half to the first repeatedly.

    The number of rows must be a power of two.
    """
    half = len(totals) >> 1
    while half > 0:
        for i in range(half):
            for j in range(totals.shape[1]):
                totals[i, j] = np.float32(totals[i, j] + totals[i + half, j])
        half >>= 1


@inlined
def add_columns(totals: Any, width: Any, count: Any) -> Any:
    """Sum the totals of the `width` columns of each block, and move the sums to the front.

    The second half of the columns is added to the first half until one column is left.
    """
    for b in range(count):
        first, half = b * width, width >> 1
        while half > 0:
            for j in range(first, first + half):
                totals[j] = np.float32(totals[j] + totals[j + half])
            half >>= 1
        totals[b] = totals[first]


@called
def add_errors(
    matrix: Any,
    tile: Any,
    down: Any,
    up: Any,
    amax: Any,
    sums: Any,
    error: Any,
    tiling: Any,
    element: Any,
    rule: Any,
) -> Any:
    """Write the error of each block b of a tile under one candidate to `sums[0, b]`.

    If blocks run along the rows, `sums` needs one row per row of a block. Otherwise, it needs one
    column per column of the tile. `error` is an array for the errors of a row.
    """
    sums[:] = 0
    width = tiling.width
    for left in range(tile.left, tile.right, TILE):
        right, padded = min(left + TILE, tile.right), min(tile.blocks * width, TILE)
        for i in range(tile.first, tile.last):
            row = matrix[i, left:right]
            if tiling.along_rows:
                errors(row, down, up, amax, error, False, element, rule)
                error[right - left : padded] = 0
                add_rows(error, sums[i - tile.first], width, tile.blocks)
            else:
                total = sums[0, left - tile.left :]
                errors(row, down, up, amax, total, True, element, rule)
    if tiling.along_rows:
        add_halves(sums)
    else:
        add_columns(sums[0], width, tile.blocks)
