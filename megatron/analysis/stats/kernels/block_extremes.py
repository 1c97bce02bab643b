"""The blocks of a tensor: their largest and smallest magnitudes, and what follows for a format."""

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

Bits = NDArray[np.int32]  #: of float32


@dataclass
class Extremes:
    """Largest magnitude of each block, NaN and Inf included, and the smallest above zero.

    Of 16-bit values patterns (the smallest one too low, see `scan`), else float32 bits.
    """

    largest: NDArray[Any]
    smallest: NDArray[Any]
    half: torch.dtype | None  #: of the values, if of 16 bits

    def bits(self) -> Bits:
        """Of the largest."""
        if self.half == torch.bfloat16:
            return self.largest.astype(np.int32) << 16
        return self.largest if self.half is None else widened(self.half)[self.largest]


def block_extremes(
    piece: NDArray[Any], layout: MatrixView, size: int, axis: str, half: torch.dtype | None
) -> Extremes:
    """Of the blocks along rows [outer, rows, blocks], along columns [outer, blocks, columns], or
    of square ones (axis "all"): as along rows, `size` rows of which are the same then.
    """
    outer, rows, columns = piece.shape
    if axis == "column":
        shape = (outer, -(-rows // size), columns)
    else:
        shape = (outer, rows, columns // layout.run * -(-layout.run // size))
    largest, smallest = np.empty(shape, piece.dtype), np.empty(shape, piece.dtype)
    if axis == "column":
        (value_scan.column_extremes16 if half else value_scan.column_extremes32)(
            piece, size, largest, smallest
        )
    else:
        of_rows = value_scan.block_extremes16 if half else value_scan.block_extremes32
        of_rows(piece, size, layout.run, largest, smallest)
        if axis == "all":
            value_scan.square_extremes(largest, smallest, size)
    return Extremes(largest, smallest, half)


def classes_of(extremes: Extremes, group: Group, coder: ScalarQuantizer) -> NDArray[np.uint8]:
    """The class of each block."""
    return _classes(extremes.bits(), group, coder)


def _classes(amax: Bits, group: Group, coder: ScalarQuantizer) -> NDArray[np.uint8]:
    found = np.empty(amax.shape, np.uint8)
    element = coder.element._replace(emax=np.int32(group.emax))
    classify(amax.ravel(), element, coder.rule, found.ravel())
    return found


class BlockCounts:
    """What the blocks along one axis say of formats that give every block the same class.

    16-bit magnitudes are counted by pattern; those of float32 are too many to keep, and are
    evaluated piece by piece.
    """

    def __init__(
        self, group: Group, of: Sequence[tuple[Errors, ScalarQuantizer]], half: torch.dtype | None
    ):
        self._group, self._of, self._half = group, of, half
        self._ranges = np.zeros(RANGES, np.int64)  # blocks by difference of the exponents
        self._patterns = np.zeros(1 << 16 if half is not None else 0, np.int64)

    def add(self, extremes: Extremes) -> None:
        """The blocks of a piece; of a square one, the rows of which are the same, one row."""
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
            found, counts = value_scan.counted(largest)
            self._patterns[found] += counts

    def finish(self) -> None:
        """After the last piece."""
        if self._half is not None:
            found = np.flatnonzero(self._patterns)
            self._evaluate(widened(self._half)[found], self._patterns[found])
        for errors, _ in self._of:
            errors.block_range += self._ranges

    def _evaluate(self, bits: Bits, counts: NDArray[np.int64]) -> None:
        for errors, coder in self._of:
            add_blocks(errors, bits, counts, _classes(bits, self._group, coder), coder)


@kernel
def _count_ranges16(largest: Any, smallest: Any, exponents: Any, ranges: Any) -> None:
    """Blocks by exponent(largest) - exponent(smallest above zero); without zero and NaN ones."""
    for i in range(len(largest)):
        high = exponents[largest[i]]
        if high != UNUSUAL:
            ranges[high - exponents[smallest[i] + 1]] += 1


@kernel
def _count_ranges32(largest: Any, smallest: Any, ranges: Any) -> None:
    """As `_count_ranges16`, of float32 bits."""
    for i in range(len(largest)):
        high, low = largest[i], smallest[i]
        if 0 < high < INFINITY:
            ranges[_exponent(high) - _exponent(low)] += 1


@kernel
def _exponent(bits: Any) -> Any:
    """Of a positive number, plus 127."""
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
    coder: ScalarQuantizer,
) -> None:
    """What so many blocks with these largest magnitudes (float32 bits) say of one format."""
    np.add.at(errors.scales, coder.bytes[classes], counts)
    zero, unusual = bits == 0, (bits & MAGNITUDE) >= INFINITY
    errors.blocks += (counts.sum(), counts[zero].sum(), counts[unusual].sum())
    usual = ~zero & ~unusual
    amax = bits[usual].view(np.float32).astype(np.float64)
    top = float(np.int32(coder.element.top).view(np.float32)) * float(coder.rule.decode)
    scale = coder.up[classes[usual]].astype(np.float64)
    with np.errstate(divide="ignore"):  # a scale that underflows to zero
        room = np.log2(top * scale / amax)
    headroom_bins(errors, room, counts[usual])
