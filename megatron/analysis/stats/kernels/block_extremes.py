"""Find the largest and the smallest magnitude of each block, and compute block statistics.

The largest magnitude determines the scale class of the block (see `scalar_quantizer`) and its
headroom; both magnitudes together determine its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.errors import RANGES, Errors, headroom_bins
from megatron.analysis.stats.format_groups import Group
from megatron.analysis.stats.kernels import value_scan
from megatron.analysis.stats.kernels.compiled import kernel
from megatron.analysis.stats.kernels.half_tables import UNUSUAL, exponents, widened
from megatron.analysis.stats.kernels.scalar_quantizer import ScalarQuantizer, classify
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant.fused.numba_bits import INFINITY, MAGNITUDE

Bits = NDArray[np.int32]  #: float32 numbers, stored as int32 bit patterns


@dataclass
class Extremes:
    """Largest magnitude and smallest nonzero magnitude of each block.

    The largest magnitude may be NaN or Inf. The magnitudes of 16-bit dtypes are bit patterns, and
    the pattern of the smallest magnitude is reduced by one; see `value_scan.block_extremes16`. The
    magnitudes of float32 are float32 bits.
    """

    largest: NDArray[Any]
    smallest: NDArray[Any]
    half: torch.dtype | None  #: dtype of the values if it has 16 bits; None for float32

    def bits(self) -> Bits:
        """Return the largest magnitude of each block as float32 bits."""
        if self.half == torch.bfloat16:
            return self.largest.astype(np.int32) << 16
        return self.largest if self.half is None else widened(self.half)[self.largest]


def block_extremes(
    piece: NDArray[Any], matrix: MatrixView, size: int, axis: str, half: torch.dtype | None
) -> Extremes:
    """Return the largest and smallest magnitudes of all blocks of a chunk along one axis.

    The arrays have the shape [outer, rows, blocks] for axis "row" and [outer, blocks, columns] for
    axis "column". For square blocks (axis "all"), they have the same shape as for axis "row", and
    all rows of a block have equal entries.

    Args:
        size: number of values per block.
        half: dtype of the values if it has 16 bits; None for float32.
    """
    outer, rows, columns = piece.shape
    if axis == "column":
        shape = (outer, -(-rows // size), columns)
    else:
        shape = (outer, rows, columns // matrix.run * -(-matrix.run // size))
    largest, smallest = np.empty(shape, piece.dtype), np.empty(shape, piece.dtype)
    if axis == "column":
        (value_scan.column_extremes16 if half else value_scan.column_extremes32)(
            piece, size, largest, smallest
        )
    else:
        of_rows = value_scan.block_extremes16 if half else value_scan.block_extremes32
        of_rows(piece, size, matrix.run, largest, smallest)
        if axis == "all":
            value_scan.square_extremes(largest, smallest, size)
    return Extremes(largest, smallest, half)


def classes_of(extremes: Extremes, group: Group, quantizer: ScalarQuantizer) -> NDArray[np.uint8]:
    """Return the scale class of each block; see `scalar_quantizer`."""
    return _classes(extremes.bits(), group, quantizer)


def _classes(amax: Bits, group: Group, quantizer: ScalarQuantizer) -> NDArray[np.uint8]:
    classes = np.empty(amax.shape, np.uint8)
    element = quantizer.element._replace(emax=np.int32(group.emax))
    classify(amax.ravel(), element, quantizer.rule, classes.ravel())
    return classes


class BlockCounts:
    """Statistics of the blocks along one axis, for one group of formats.

    In 16-bit tensors, the largest magnitudes of the blocks are counted by bit pattern and evaluated
    at the end. In float32 tensors, they are evaluated chunk by chunk, because there are too many to
    store.
    """

    def __init__(
        self, group: Group, of: Sequence[tuple[Errors, ScalarQuantizer]], half: torch.dtype | None
    ):
        self._group, self._of, self._half = group, of, half
        self._ranges = np.zeros(
            RANGES, np.int64
        )  # number of blocks with each exponent(largest) - exponent(smallest)
        self._patterns = np.zeros(1 << 16 if half is not None else 0, np.int64)

    def add(self, extremes: Extremes) -> None:
        """Add the blocks of a chunk, given their largest and smallest magnitudes.

        The rows of a square block have equal entries, so only its first row is added.
        """
        largest, smallest = extremes.largest, extremes.smallest
        if self._group.square:
            every = slice(None, None, self._group.size)
            largest, smallest = (np.ascontiguousarray(x[:, every]) for x in (largest, smallest))
        largest, smallest = largest.ravel(), smallest.ravel()
        if self._half is None:
            _count_ranges32(largest, smallest, self._ranges)
            self._evaluate(largest, np.ones(len(largest), np.int64))
        else:
            _count_ranges16(largest, smallest, exponents(self._half), self._ranges)
            patterns, counts = value_scan.counted(largest)
            self._patterns[patterns] += counts

    def finish(self) -> None:
        """Complete the statistics of the blocks once all chunks have been added."""
        if self._half is not None:
            patterns = np.flatnonzero(self._patterns)
            self._evaluate(widened(self._half)[patterns], self._patterns[patterns])
        for errors, _ in self._of:
            errors.block_range += self._ranges

    def _evaluate(self, bits: Bits, counts: NDArray[np.int64]) -> None:
        for errors, quantizer in self._of:
            add_blocks(errors, bits, counts, _classes(bits, self._group, quantizer), quantizer)


@kernel
def _count_ranges16(largest: Any, smallest: Any, exponents: Any, ranges: Any) -> None:
    """Count blocks of 16-bit values by dynamic range: exponent(largest) - exponent(smallest).

    Blocks of zeros and blocks with NaN or Inf are left out. The patterns in `smallest` are reduced
    by one.
    """
    for i in range(len(largest)):
        high = exponents[largest[i]]
        if high != UNUSUAL:
            ranges[high - exponents[smallest[i] + 1]] += 1


@kernel
def _count_ranges32(largest: Any, smallest: Any, ranges: Any) -> None:
    """Count blocks of float32 values by dynamic range: exponent(largest) - exponent(smallest)."""
    for i in range(len(largest)):
        high, low = largest[i], smallest[i]
        if 0 < high < INFINITY:
            ranges[_exponent(high) - _exponent(low)] += 1


@kernel
def _exponent(bits: Any) -> Any:
    """Return the biased exponent (exponent + 127) of a positive float32.

    The result is less than 1 if the number is subnormal.
    """
    exponent = bits >> 23
    if exponent == 0:
        exponent = 1
        while bits < (1 << 23):
            bits = bits << 1
            exponent -= 1
    return exponent


def add_blocks(
    errors: Errors,
    bits: Bits,
    counts: NDArray[np.int64],
    classes: NDArray[np.uint8],
    quantizer: ScalarQuantizer,
) -> None:
    """Add the scales and the headroom of blocks in one format to `errors`.

    Args:
        bits: distinct largest magnitudes of the blocks, as float32 bits.
        counts: number of blocks with each largest magnitude.
        classes: scale class of the blocks with each largest magnitude.
    """
    np.add.at(errors.scales, quantizer.bytes[classes], counts)
    zero, unusual = bits == 0, (bits & MAGNITUDE) >= INFINITY
    errors.blocks += (counts.sum(), counts[zero].sum(), counts[unusual].sum())
    usual = ~zero & ~unusual
    amax = bits[usual].view(np.float32).astype(np.float64)
    top = float(np.int32(quantizer.element.top).view(np.float32)) * float(quantizer.rule.decode)
    scale = quantizer.up[classes[usual]].astype(np.float64)
    with np.errstate(divide="ignore"):  # the logarithm of a scale that underflowed to zero is -inf
        room = np.log2(top * scale / amax)
    headroom_bins(errors, room, counts[usual])
