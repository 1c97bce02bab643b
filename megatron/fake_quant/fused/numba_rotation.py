"""CPU kernels for the Hadamard transform.

They make one pass over memory and add in the same order as the reference implementation.
"""

from typing import Any

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    as_bits,
    as_float,
    kernel,
    narrow,
    widen,
)
from megatron.fake_quant.fused.numba_compile import inlined

COLUMNS = 256  #: number of columns in a tile


@inlined
def finished(total: Any, factor: Any) -> Any:
    """Return the float32 bits of `total * factor`; every NaN becomes the canonical NaN."""
    bits = as_bits(np.float32(total * factor))
    return NAN if np.int32(bits & MAGNITUDE) > INFINITY else bits


@kernel
def rows(src: Any, dst: Any, matrix: Any, factor: Any, start: Any, stop: Any) -> None:
    """Multiply a `[blocks, d]` array by a `[d, d]` matrix and by `factor`.

    Only blocks `start` to `stop - 1` are computed.
    """
    size = matrix.shape[0]
    total = np.empty(size, np.float32)
    for block in range(start, stop):
        read, written = src[block], dst[block]
        for j in range(size):
            total[j] = as_float(widen(read[0])) * matrix[0, j]
        for i in range(1, size):
            x = as_float(widen(read[i]))
            for j in range(size):
                total[j] += np.float32(x * matrix[i, j])
        for j in range(size):
            written[j] = narrow(finished(total[j], factor), written[j])


@kernel
def columns(src: Any, dst: Any, matrix: Any, factor: Any, start: Any, stop: Any) -> None:
    """Multiply a `[blocks, d, inner]` array along the middle axis; see `rows`."""
    size, inner = matrix.shape[0], src.shape[2]
    total = np.empty(COLUMNS, np.float32)
    for block in range(start, stop):
        for left in range(0, inner, COLUMNS):
            right = min(left + COLUMNS, inner)
            for j in range(size):
                read = src[block, 0, left:right]
                for c in range(len(read)):
                    total[c] = as_float(widen(read[c])) * matrix[0, j]
                for i in range(1, size):
                    read = src[block, i, left:right]
                    for c in range(len(read)):
                        total[c] += np.float32(as_float(widen(read[c])) * matrix[i, j])
                written = dst[block, j, left:right]
                for c in range(len(written)):
                    written[c] = narrow(finished(total[c], factor), written[c])
