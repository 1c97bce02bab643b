"""Statistics of a tensor that can be merged: one pass over the values, in bounded memory, in
float64.

`Summary` holds counts and moments, `Histogram` counts values in fixed bins. Both of a whole equal
the merged ones of its parts, so that tensors are read in parallel, in any order, a piece at a time.

The bins are the 65,536 bfloat16 bit patterns: a value falls into the bin of its float32 pattern's
upper half, that is, of itself rounded toward zero to 8 significant bits. bfloat16 data are thus
counted value by value, and since every bin edge is a multiple of a power of two, the bins can be
gathered afterwards into an evenly spaced histogram whose counts are exact (`Histogram.rebin`). The
range to draw need not be known before the values are read. What it gives up: detail below 2^-7 of a
value's magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1 << 20  #: values converted at a time; bounds memory at about 40 MB a worker
BINS = 1 << 16  #: bfloat16 patterns
_INFINITY = 0x7F80  #: pattern of +inf; the ones above it are NaN
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and moments of a set of values; NaN and Inf are counted and else left out."""

    count: int = 0  #: all values, NaN and Inf included
    nan: int = 0
    inf: int = 0
    zeros: int = 0  #: of either sign
    min: float = math.nan  #: NaN where there is no finite value, as all below
    max: float = math.nan
    mean: float = math.nan
    squares: float = 0.0  #: sum of squared distances to the mean

    @property
    def finite(self) -> int:
        """How many values the moments describe."""
        return self.count - self.nan - self.inf

    @property
    def std(self) -> float:
        """Standard deviation of the population (divided by n)."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        if not self.finite:
            return math.nan
        return math.hypot(self.mean, self.std)

    @property
    def amax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.nan

    def __add__(self, other: Summary) -> Summary:
        """The summary of both sets together (moments by Chan, Golub and LeVeque's update)."""
        if not (self.finite and other.finite):
            known = self if self.finite else other
            low, high, mean, squares = known.min, known.max, known.mean, known.squares
        else:
            low, high = min(self.min, other.min), max(self.max, other.max)
            total, step = self.finite + other.finite, other.mean - self.mean
            mean = self.mean + step * (other.finite / total)
            squares = self.squares + other.squares
            squares += step * step * (self.finite * (other.finite / total))
        return Summary(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            inf=self.inf + other.inf,
            zeros=self.zeros + other.zeros,
            min=low,
            max=high,
            mean=mean,
            squares=squares,
        )


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

    def magnitude_quantile(self, share: float) -> float:
        """The lower edge of the bin that `share` of the magnitudes do not exceed; NaN without
        values.
        """
        counts = self.magnitudes()
        total = int(counts.sum())
        if not total:
            return math.nan
        pattern = int(np.searchsorted(np.cumsum(counts), math.ceil(share * total)))
        return float(_lower_edges()[min(pattern, _INFINITY - 1)])

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


def measure(tensor: Tensor) -> tuple[Summary, Histogram]:
    """Summary and histogram of a tensor of any real dtype, read a piece at a time.

    Raises:
        TypeError: the dtype is complex or has no conversion to float64.
    """
    if tensor.is_complex():
        raise TypeError(f"complex values ({tensor.dtype}) have no order to make a histogram of")
    summary, counts = Summary(), np.zeros(BINS, dtype=np.int64)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        summary += _summarize(flat[start : start + CHUNK], counts)
    return summary, Histogram(counts)


def summarize(tensor: Tensor) -> Summary:
    """The summary alone."""
    return measure(tensor)[0]


def merge(summaries: Iterable[Summary]) -> Summary:
    """The summary of all the sets together."""
    return sum(summaries, start=Summary())


def _summarize(piece: Tensor, counts: NDArray[np.int64]) -> Summary:
    """The summary of one non-empty piece; its finite values are added to `counts`."""
    values = piece.to(torch.float64)
    nan = int(values.isnan().sum())
    inf = int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or inf else values
    common = {"count": piece.numel(), "nan": nan, "inf": inf}
    if not finite.numel():
        return Summary(**common)
    # float64 beyond float32's range is rare and belongs to the last bin, not to infinity
    pattern = finite.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).to(torch.float32).view(torch.int32)
    counts += torch.bincount(pattern >> 16 & 0xFFFF, minlength=BINS).numpy()
    low, high = finite.aminmax()
    mean = finite.mean()
    return Summary(
        **common,
        zeros=finite.numel() - int(finite.count_nonzero()),
        min=low.item(),
        max=high.item(),
        mean=mean.item(),
        squares=(finite - mean).square_().sum().item(),
    )


def _lower_edges() -> NDArray[np.float64]:
    """[32640] magnitude of each non-negative finite bfloat16 pattern."""
    patterns = np.arange(_INFINITY, dtype=np.uint32) << np.uint32(16)
    edges: NDArray[np.float64] = patterns.view(np.float32).astype(np.float64)
    return edges
