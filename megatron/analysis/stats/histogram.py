"""Histograms with one bin for each of the 65,536 bfloat16 bit patterns.

A value belongs to the bin given by the upper half of its float32 pattern, which is the value
rounded toward zero to 8 significant bits. bfloat16 data are therefore counted exactly. Every bin
edge is a multiple of a power of two, so the bins can later be merged into evenly spaced bins with
exact counts (`Histogram.rebin`). The range of a plot need not be known before the values are read.
Differences below 2^-7 of a value's magnitude are lost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 1 << 16  #: number of bfloat16 bit patterns
_INFINITY = 0x7F80  #: bit pattern of +Inf; patterns between it and 0x8000 are NaN


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of finite values with each bfloat16 bit pattern."""

    counts: NDArray[np.int64]  #: counts by bit pattern, shape [BINS]

    @classmethod
    def empty(cls) -> Histogram:
        """Return an empty histogram."""
        return cls(np.zeros(BINS, dtype=np.int64))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    @property
    def total(self) -> int:
        """Number of finite values."""
        return int(self.counts.sum())

    def magnitudes(self) -> NDArray[np.int64]:
        """Return the number of values with each magnitude, with shape [32640].

        Element p counts the pattern p with either sign.
        """
        half = self.counts.reshape(2, BINS // 2)[:, :_INFINITY]
        summed: NDArray[np.int64] = half.sum(axis=0)
        return summed

    def quantile(self, share: float) -> float:
        """Return one quantile of the values; see `quantiles`."""
        return self.quantiles([share])[0]

    def magnitude_quantile(self, share: float) -> float:
        """Return one quantile of the magnitudes; see `magnitude_quantiles`."""
        return self.magnitude_quantiles([share])[0]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return quantiles of the values; they are NaN if the histogram is empty.

        For bfloat16 data, the quantiles are exact order statistics. For other data, each quantile
        is the edge of its bin toward zero; the error is less than 2^-7 of the value (except for
        subnormal float32 numbers).
        """
        present = np.flatnonzero(self.counts)
        below_zero = np.searchsorted(present, BINS // 2)
        ascending = np.concatenate([present[below_zero:][::-1], present[:below_zero]])
        return _quantiles(self.counts[ascending], _signed_edges()[ascending], shares)

    def magnitude_quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return quantiles of the magnitudes; see `quantiles`."""
        present = np.flatnonzero(self.counts)
        magnitudes = present & (BINS // 2 - 1)
        order = np.argsort(magnitudes, kind="stable")
        edges = _lower_edges()[magnitudes[order]]
        return _quantiles(self.counts[present[order]], edges, shares)

    def binades(self) -> NDArray[np.int64]:
        """Return the number of values in each binade, with shape [255].

        Element e + 127 counts the magnitudes in [2**e, 2**(e+1)). Element 0 counts all smaller
        magnitudes except zero, which are the subnormal float32 numbers.
        """
        counts = self.magnitudes()
        counts[0] = 0
        summed: NDArray[np.int64] = counts.reshape(-1, 1 << 7).sum(axis=1)
        return summed

    def rebin(self, grid: Grid) -> NDArray[np.int64]:
        """Return the number of values in each bin of `grid`, with shape [2 * bins_per_side].

        The counts are exact for dtypes up to float32. A positive value x is counted in the bin with
        a <= x < b, and a negative value in the mirrored bin. Zeros of either sign are counted in
        the first bin to the right of zero. Values outside the grid are not counted.
        """
        positive, negative = self.counts.reshape(2, BINS // 2)[:, :_INFINITY].copy()
        positive[0] += negative[0]
        negative[0] = 0
        edges = _lower_edges()
        inside = edges < grid.limit
        index = np.floor(edges[inside] / grid.width).astype(np.int64)
        sides = [np.zeros(grid.bins_per_side, dtype=np.int64) for _ in range(2)]
        np.add.at(sides[0], index, negative[inside])
        np.add.at(sides[1], index, positive[inside])
        return np.concatenate([sides[0][::-1], sides[1]])


@dataclass(frozen=True, slots=True)
class Grid:
    """Evenly spaced bins, symmetric about zero; each edge is also a bin edge of a `Histogram`."""

    width: float  #: width of each bin, which is a power of two
    bins_per_side: int  #: number of bins on each side of zero

    @classmethod
    def reaching(cls, magnitude: float) -> Grid:
        """Return the smallest grid that contains `magnitude` and has 40 to 64 bins per side."""
        if not (math.isfinite(magnitude) and magnitude > 0.0):
            magnitude = 0.75
        # magnitude < 2**exponent, and bfloat16 numbers below 2**exponent are at most
        # 2**(exponent - 8) apart
        exponent = math.frexp(magnitude)[1]
        eighths = math.floor(math.ldexp(magnitude, 3 - exponent)) + 1
        return cls(width=math.ldexp(1.0, exponent - 6), bins_per_side=8 * eighths)

    @property
    def limit(self) -> float:
        """Largest bin edge; the bins span -limit to limit."""
        return self.width * self.bins_per_side

    def edges(self) -> NDArray[np.float64]:
        """Return the edges of all bins, with shape [2 * bins_per_side + 1]."""
        steps = np.arange(-self.bins_per_side, self.bins_per_side + 1, dtype=np.float64)
        return np.multiply(steps, self.width, dtype=np.float64)


@functools.cache
def _lower_edges() -> NDArray[np.float64]:
    """Return the number that each nonnegative finite bit pattern represents, with shape [32640]."""
    patterns = np.arange(_INFINITY, dtype=np.uint32) << np.uint32(16)
    edges: NDArray[np.float64] = patterns.view(np.float32).astype(np.float64)
    return edges


@functools.cache
def _signed_edges() -> NDArray[np.float64]:
    """Return, for each bin, the edge closer to zero; NaN for the bins of Inf and NaN."""
    edges = np.full((2, BINS // 2), math.nan)
    edges[0, :_INFINITY] = _lower_edges()
    edges[1, :_INFINITY] = -_lower_edges()
    return edges.ravel()


def _quantiles(
    counts: NDArray[np.int64], edges: NDArray[np.float64], shares: Sequence[float]
) -> list[float]:
    """Return the quantiles of a histogram whose bins are nonempty and in ascending order."""
    if not len(counts):
        return [math.nan] * len(shares)
    below = np.cumsum(counts)
    ranks = [max(math.ceil(share * int(below[-1])), 1) for share in shares]
    quantiles: list[float] = edges[np.searchsorted(below, ranks)].tolist()
    return quantiles
