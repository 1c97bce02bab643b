"""Compute the statistics of one operand without waiting for the device.

The sums stay on the device, so that all operands of an iteration need a single transfer. On a CPU,
`kernel.py` computes them in one pass.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16)  #: dtypes for which there is a CPU kernel
PART = 1 << 23  #: maximum number of values that are converted to float64 at a time


class Sums(NamedTuple):
    """Sums over an operand, or over its shards on several ranks."""

    values: int  #: number of values
    amax: float  #: largest magnitude; NaN or Inf if a value is not finite
    square: float  #: sum of squares
    nonzero: float  #: number of values that are not zero
    error: float  #: sum of the squared quantization errors
    lost: float  #: number of values that are not zero and are quantized to zero


class Statistics(NamedTuple):
    """Statistics of one operand; those of the quantization error are None without a format."""

    values: int  #: number of values
    nonzero: int  #: number of values that are not zero
    amax: float  #: largest magnitude; NaN or Inf if a value is not finite
    rms: float  #: root mean square
    sqnr_db: float | None  #: signal-to-quantization-noise ratio in dB; Inf without an error
    underflow: float | None  #: share of the nonzero values that the format rounds to zero


def measure(x: torch.Tensor, quantized: torch.Tensor | None = None) -> torch.Tensor:
    """Return all fields of `Sums` except `values`, as a float64 tensor on the operand's device.

    Args:
        x: the operand before quantization, with at least one value and one dimension.
        quantized: the quantized values; None if the operand is not quantized.
    """
    other = x if quantized is None else quantized
    with torch.no_grad():
        if x.device.type == "cpu" and x.dtype == other.dtype and x.dtype in KERNEL_DTYPES:
            from megatron.collection.statistics import kernel

            return kernel.measure(x, other)
        size = max(1, PART * len(x) // x.numel())
        parts = x.split(size)
        others = (None,) * len(parts) if quantized is None else quantized.split(size)
        rows = torch.stack([_measure(*pair) for pair in zip(parts, others, strict=True)])
        return torch.cat([rows[:, :1].amax(0), rows[:, 1:].sum(0)])


def _measure(x: torch.Tensor, quantized: torch.Tensor | None) -> torch.Tensor:
    wide = x.double()  # the squares of a small gradient are too small for float32
    amax = torch.linalg.vector_norm(wide, math.inf)
    square = torch.linalg.vector_norm(wide).square()
    nonzero = torch.count_nonzero(x).double()
    error = lost = square.new_zeros(())
    if quantized is not None:
        lost = torch.count_nonzero((x != 0) & (quantized == 0)).double()
        error = torch.linalg.vector_norm(wide.sub(quantized)).square()
    return torch.stack([amax, square, nonzero, error, lost])


def joined(shards: Iterable[Sums]) -> Sums:
    """Combine the sums over the shards of an operand into the sums over the whole operand."""
    values, amaxes, *columns = zip(*shards, strict=True)
    amax = math.nan if any(map(math.isnan, amaxes)) else max(amaxes)
    return Sums(sum(values), amax, *map(sum, columns))


def statistics(sums: Sums, *, quantized: bool) -> Statistics:
    """Compute the statistics of an operand from its sums."""
    sqnr = underflow = None
    if quantized:
        underflow = sums.lost / sums.nonzero if sums.nonzero else 0.0
        if sums.error == 0:
            sqnr = math.inf
        else:
            sqnr = math.nan
            if 0 < sums.square < math.inf and sums.error < math.inf:
                sqnr = 10 * math.log10(sums.square / sums.error)
    rms = math.sqrt(sums.square / sums.values)
    return Statistics(sums.values, int(sums.nonzero), sums.amax, rms, sqnr, underflow)
