"""Add up the errors of a matmul's result, in one pass over the result and its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.fake_quant.fused.numba_bits import as_float

#: Positions in the result of `product_error_sums`: the number of compared values, the sums of x²,
#: x e, e² and e over them (x: reference, e: error), and the number of pairs that are not finite.
COUNT, XX, XE, EE, E, NONFINITE = range(6)
_LANES = 8  #: number of independent sums, so that the compiler can use vector instructions


def product_error_sums(result: Tensor, reference: Tensor) -> NDArray[np.float64]:
    """Return the sums of a result's errors, in float64.

    A pair in which either value is NaN or Inf is counted, but does not enter the sums.

    Args:
        result: result of a matmul in bfloat16, float16 or float32.
        reference: reference in float32, of the same shape.
    """
    x = reference.contiguous().view(-1).numpy()
    if result.dtype == torch.bfloat16:
        bits, shift = result.contiguous().view(torch.int16), 16
    else:
        bits, shift = result.float().contiguous().view(torch.int32), 0
    y = bits.view(-1).numpy()
    sums = np.zeros(6)
    _add(y, np.int32(shift), x, sums)
    if not np.isfinite(sums).all():
        sums[:] = 0
        _add_finite(y, np.int32(shift), x, sums)
    return sums


@kernel
def _add_finite(y: Any, shift: Any, x: Any, sums: Any) -> None:
    """Add the pairs of finite values to the sums, and count the other pairs."""
    for i in range(len(x)):
        a = np.float64(x[i])
        e = np.float64(as_float(np.int32(y[i]) << shift)) - a
        if np.isfinite(e):
            sums[0] += 1
            sums[1] += a * a
            sums[2] += a * e
            sums[3] += e * e
            sums[4] += e
        else:
            sums[5] += 1


@kernel
def _add(y: Any, shift: Any, x: Any, sums: Any) -> None:
    """Add all values to the sums; the bits in `y` become float32 after a shift to the left."""
    lanes = np.zeros((4, _LANES))
    whole = len(x) // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            a = np.float64(x[start + lane])
            e = np.float64(as_float(np.int32(y[start + lane]) << shift)) - a
            lanes[0, lane] += a * a
            lanes[1, lane] += a * e
            lanes[2, lane] += e * e
            lanes[3, lane] += e
    for row in range(4):
        for lane in range(_LANES):
            sums[1 + row] += lanes[row, lane]
    sums[0] += whole
    _add_finite(y[whole:], shift, x[whole:], sums)
