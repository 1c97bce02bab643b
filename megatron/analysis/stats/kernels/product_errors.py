"""Add up the errors of a matmul's result, in one pass over the result and its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats.kernels.compiled import kernel, sum_kernel
from megatron.fake_quant.fused.numba_bits import as_float, widen

#: Positions in the result of `product_error_sums`: the number of compared values, their sums of x²,
#: x e, e² and e (x: reference, e: error), and the number of pairs that are not finite.
COUNT, XX, XE, EE, E, NONFINITE = range(6)


def product_error_sums(result: Tensor, reference: Tensor) -> NDArray[np.float64]:
    """Return the sums of a result's errors, added in float64 in an arbitrary order.

    A pair in which either value is NaN or Inf is counted, but does not enter the sums.

    Args:
        result: result of a matmul in bfloat16, float16 or float32.
        reference: reference in float32, of the same shape.
    """
    x = reference.contiguous().view(-1).numpy()
    if result.dtype == torch.bfloat16:
        bits = result.contiguous().view(torch.int16)
    else:
        bits = result.float().contiguous().view(torch.int32)
    y = bits.view(-1).numpy()
    sums = np.zeros(6)
    _add(y, x, sums)
    if not np.isfinite(sums).all():
        sums[:] = 0
        _add_finite(y, x, sums)
    return sums


@kernel
def _add_finite(y: Any, x: Any, sums: Any) -> None:
    """Add the pairs of finite values to the sums, and count the other pairs."""
    for i in range(len(x)):
        a = np.float64(x[i])
        e = np.float64(as_float(widen(y[i]))) - a
        if np.isfinite(e):
            sums[0] += 1
            sums[1] += a * a
            sums[2] += a * e
            sums[3] += e * e
            sums[4] += e
        else:
            sums[5] += 1


@sum_kernel
def _add(y: Any, x: Any, sums: Any) -> None:
    """Set the first five elements of `sums` from all pairs, including those with NaN or Inf.

    `y` holds the bits of bfloat16 or float32 values.
    """
    xx, xe, ee, total = 0.0, 0.0, 0.0, 0.0
    for i in range(len(x)):
        a = np.float64(x[i])
        e = np.float64(as_float(widen(y[i]))) - a
        xx += a * a
        xe += a * e
        ee += e * e
        total += e
    sums[0], sums[1], sums[2], sums[3], sums[4] = len(x), xx, xe, ee, total
