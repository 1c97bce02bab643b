"""Histograms of values whose bins are the 65,536 bfloat16 bit patterns.

A value falls into the bin of its float32 pattern's upper half, that is, of itself rounded toward
zero to 8 significant bits. bfloat16 data are thus counted value by value, and since every bin edge
is a multiple of a power of two, the bins can be gathered afterwards into an evenly spaced histogram
whose counts are exact (`Histogram.rebin`). The range to draw need not be known before the values
are read. What it gives up: detail below 2^-7 of a value's magnitude.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 1 << 16  #: bfloat16 patterns
_INFINITY = 0x7F80  #: pattern of +inf; the ones above it are NaN


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each bfloat16 pattern occurs, finite values only."""

    counts: NDArray[np.int64]  #: [BINS], by pattern: 0x0000 up are positive, 0x8000 up negative

    @classmethod
    def empty(cls) -> Histogram:
        """Of no values."""
        return cls(np.zeros(BINS, dtype=np.int64))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    @property
    def total(self) -> int:
        """How many finite values there are."""
        return int(self.counts.sum())

    def magnitudes(self) -> NDArray[np.int64]:
        """[32640] counts by magnitude: element p belongs to pattern p, whatever the sign."""
        half = self.counts.reshape(2, BINS // 2)[:, :_INFINITY]
        summed: NDArray[np.int64] = half.sum(axis=0)
        return summed

    def quantile(self, share: float) -> float:
        """See `quantiles`."""
        return self.quantiles([share])[0]

    def magnitude_quantile(self, share: float) -> float:
        """See `magnitude_quantiles`."""
        return self.magnitude_quantiles([share])[0]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The values that these shares of all values do not exceed: of bfloat16 data order
        statistics, exact; of others the bin's edge toward zero, less than 2^-7 of the value away
        (as long as it is no subnormal float32). NaN without values.
        """
        present = np.flatnonzero(self.counts)
        below_zero = np.searchsorted(present, BINS // 2)
        ascending = np.concatenate([present[below_zero:][::-1], present[:below_zero]])
        return _quantiles(self.counts[ascending], _signed_edges()[ascending], shares)

    def magnitude_quantiles(self, shares: Sequence[float]) -> list[float]:
        """The same of the magnitudes."""
        present = np.flatnonzero(self.counts)
        magnitudes = present & (BINS // 2 - 1)
        order = np.argsort(magnitudes, kind="stable")
        edges = _lower_edges()[magnitudes[order]]
        return _quantiles(self.counts[present[order]], edges, shares)

    def octaves(self) -> NDArray[np.int64]:
        """[255] counts by power of two: element e + 127 has the magnitudes from 2**e up to below
        2**(e+1).

        Element 0 has what is smaller, but not zero: float32's subnormal numbers and what underflows
        to them.
        """
        counts = self.magnitudes()
        counts[0] = 0
        summed: NDArray[np.int64] = counts.reshape(-1, 1 << 7).sum(axis=1)
        return summed

    def rebin(self, grid: Grid) -> NDArray[np.int64]:
        """[2 n] counts of the evenly spaced bins of `grid`, exact for dtypes up to float32.

        A positive value is counted where a <= x < b, a negative one mirrored, zeros of either sign
        in the first bin right of zero. Values outside of the grid are in no bin.
        """
        positive, negative = self.counts.reshape(2, BINS // 2)[:, :_INFINITY].copy()
        positive[0] += negative[0]
        negative[0] = 0
        edges = _lower_edges()
        inside = edges < grid.limit
        index = np.floor(edges[inside] / grid.width).astype(np.int64)
        sides = [np.zeros(grid.bins_a_side, dtype=np.int64) for _ in range(2)]
        np.add.at(sides[0], index, negative[inside])
        np.add.at(sides[1], index, positive[inside])
        return np.concatenate([sides[0][::-1], sides[1]])


@dataclass(frozen=True, slots=True)
class Grid:
    """Even bins, symmetric to zero, whose edges are edges of a `Histogram` too."""

    width: float  #: a power of two
    bins_a_side: int

    @classmethod
    def reaching(cls, magnitude: float) -> Grid:
        """40 to 64 bins a side: the smallest such grid with `magnitude` inside."""
        if not (math.isfinite(magnitude) and magnitude > 0.0):
            magnitude = 0.75
        # magnitude < 2**exponent, where bfloat16 has a step of 2**(exponent - 8) at most
        exponent = math.frexp(magnitude)[1]
        eighths = math.floor(math.ldexp(magnitude, 3 - exponent)) + 1
        return cls(width=math.ldexp(1.0, exponent - 6), bins_a_side=8 * eighths)

    @property
    def limit(self) -> float:
        """The bins reach from -limit to limit."""
        return self.width * self.bins_a_side

    def edges(self) -> NDArray[np.float64]:
        """[2 n + 1] of the n bins a side."""
        steps = np.arange(-self.bins_a_side, self.bins_a_side + 1, dtype=np.float64)
        return np.multiply(steps, self.width, dtype=np.float64)


@functools.cache
def _lower_edges() -> NDArray[np.float64]:
    """[32640] magnitude of each non-negative finite bfloat16 pattern."""
    patterns = np.arange(_INFINITY, dtype=np.uint32) << np.uint32(16)
    edges: NDArray[np.float64] = patterns.view(np.float32).astype(np.float64)
    return edges


@functools.cache
def _signed_edges() -> NDArray[np.float64]:
    """[BINS] bin edge toward zero of each bfloat16 pattern; NaN for those of Inf and NaN."""
    edges = np.full((2, BINS // 2), math.nan)
    edges[0, :_INFINITY] = _lower_edges()
    edges[1, :_INFINITY] = -_lower_edges()
    return edges.ravel()


def _quantiles(
    counts: NDArray[np.int64], edges: NDArray[np.float64], shares: Sequence[float]
) -> list[float]:
    """Of bins in ascending order, none of them empty."""
    if not len(counts):
        return [math.nan] * len(shares)
    below = np.cumsum(counts)
    ranks = [max(math.ceil(share * int(below[-1])), 1) for share in shares]
    found: list[float] = edges[np.searchsorted(below, ranks)].tolist()
    return found
