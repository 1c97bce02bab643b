"""Sum over an operand and its quantized values in one pass on the CPU.

torch needs eight passes and takes ten times as long as quantizing. The kernel adds the values of a
block in float32, in any order, and the blocks in float64.
"""

from pathlib import Path

import numpy as np
import torch

from megatron.fake_quant import fused
from megatron.fake_quant.fused import numba_threads
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.fused.numba_bits import MAGNITUDE, as_float, widen
from megatron.fake_quant.fused.numba_compile import kernel_compiler

BLOCK = 1024  #: number of values whose squares are added in float32
LEAST = 1 << 16  #: minimum number of values per thread
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  #: dtypes that the kernel accepts


def _sources() -> list[Path]:
    return [Path(__file__), *sorted(Path(fused.__file__).parent.glob("*.py"))]


kernel = kernel_compiler("operand-sums", Path(__file__).parent, _sources, reorder_sums=True)


@kernel
def sums(x, quantized, start, stop, totals):
    """Write the sums over `x[start:stop]` and `quantized[start:stop]` to `totals`.

    Args:
        x: bits of the values.
        quantized: bits of the quantized values.
        start: first index.
        stop: index after the last.
        totals: array of five float64 numbers: bits of the largest magnitude, sum of squares, number
            of nonzero values, sum of squared errors, number of nonzero quantized values.
    """
    largest = np.int32(0)
    squares, errors, nonzero, kept = 0.0, 0.0, 0, 0
    for begin in range(start, stop, BLOCK):
        square, error = np.float32(0), np.float32(0)
        count, left = np.int32(0), np.int32(0)
        values, others = x[begin : min(begin + BLOCK, stop)], quantized[begin:stop]
        for i in range(len(values)):
            bits, rounded = np.int32(widen(values[i])), np.int32(widen(others[i]))
            magnitude = np.int32(bits & MAGNITUDE)
            largest = max(largest, magnitude)
            value = as_float(bits)
            difference = np.float32(as_float(rounded) - value)
            square = np.float32(square + np.float32(value * value))
            error = np.float32(error + np.float32(difference * difference))
            count = np.int32(count + np.int32(magnitude != 0))
            left = np.int32(left + np.int32((rounded & MAGNITUDE) != 0))
        squares += square
        errors += error
        nonzero += count
        kept += left
    totals[0], totals[1], totals[2], totals[3], totals[4] = largest, squares, nonzero, errors, kept


def measure(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Return the five sums of `measure.measure` for float32 or bfloat16 tensors on the CPU."""
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
