"""Compute the sums for the statistics of an operand on the CPU, in one loop over its values.

torch needs several loops and takes ten times as long as quantizing. The kernel forms the squares
in float64, because those of a small gradient are too small for float32, and adds them in any order.
"""

from pathlib import Path

import numpy as np
import torch

from megatron.fake_quant import fused
from megatron.fake_quant.fused import numba_threads
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.fused.numba_bits import MAGNITUDE, as_float, widen
from megatron.fake_quant.fused.numba_compile import kernel_compiler

BLOCK = 1024  #: number of values that are counted in int32
LEAST = 1 << 16  #: minimum number of values per thread
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  #: dtypes that the kernel accepts


def _sources() -> list[Path]:
    return [Path(__file__), *sorted(Path(fused.__file__).parent.glob("*.py"))]


kernel = kernel_compiler("operand-sums", Path(__file__).parent, _sources, reorder_sums=True)


@kernel
def sums(x, quantized, start, stop, totals):
    """Write the amax, two sums and two counts of the values from `start` to `stop` to `totals`.

    Args:
        x: bits of the values.
        quantized: bits of the quantized values.
        start: first index.
        stop: index after the last.
        totals: array of five float64 numbers: bits of the largest magnitude, sum of squares, number
            of nonzero values, sum of squared errors, number of nonzero values quantized to zero.
    """
    largest = np.int32(0)
    squares, errors, nonzero, lost = 0.0, 0.0, 0, 0
    for begin in range(start, stop, BLOCK):
        count, zeros = np.int32(0), np.int32(0)
        values, others = x[begin : min(begin + BLOCK, stop)], quantized[begin:stop]
        for i in range(len(values)):
            bits, rounded = np.int32(widen(values[i])), np.int32(widen(others[i]))
            magnitude = np.int32(bits & MAGNITUDE)
            largest = max(largest, magnitude)
            value = np.float64(as_float(bits))
            difference = np.float64(as_float(rounded)) - value
            squares += value * value
            errors += difference * difference
            count = np.int32(count + np.int32(magnitude != 0))
            zeros = np.int32(zeros + np.int32((magnitude != 0) & ((rounded & MAGNITUDE) == 0)))
        nonzero += count
        lost += zeros
    totals[0], totals[1], totals[2], totals[3], totals[4] = largest, squares, nonzero, errors, lost


def measure(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Return what `measure.measure` returns, for float32 or bfloat16 tensors on the CPU."""
    x, order = without_gaps(x, in_order=False)
    if not quantized.permute(order).is_contiguous():
        x, order = x.contiguous(), list(range(x.ndim))
        quantized = quantized.contiguous()
    arrays = [
        tensor.permute(order).reshape(-1).view(BITS[tensor.dtype]).numpy()
        for tensor in (x, quantized)
    ]

    def work(start: int, stop: int) -> np.ndarray:
        totals = np.empty(5)
        sums(*arrays, start, stop, totals)
        return totals

    parts = np.stack(numba_threads.run(work, x.numel(), LEAST))
    bits = np.int32(parts[:, 0].max())
    totals = np.array([bits.view(np.float32), *parts[:, 1:].sum(0)], np.float64)
    return torch.from_numpy(totals)
