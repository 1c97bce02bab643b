"""Mergeable counts and moments of values.

Counts and extremes are exact; moments are sums in float64. Each moment is a sum of powers of the
distance to the mean, because sums of powers of the values lose all precision if the spread is small
compared with the mean. Two sets are merged with the update formula of Chan, Golub and LeVeque and
its extension to higher powers (Pébay, SAND2008-6212). However the values are partitioned, mean, std
and rms agree to 1e-12, and skewness and kurtosis agree to 1e-9 of their scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel


@dataclass(frozen=True, slots=True)
class Moments:
    """Counts and moments of a set of values; the moments leave out NaN and Inf."""

    count: int = 0  #: number of values, including NaN and Inf
    nan: int = 0
    inf: int = 0
    zeros: int = 0  #: number of zeros of either sign
    negative_zeros: int = 0
    min: float = math.nan  #: minimum; NaN if no value is finite
    max: float = math.nan
    smallest: float = math.nan  #: smallest nonzero finite magnitude; NaN if there is none
    mean: float = math.nan
    squares: float = 0.0  #: sum of the squared distances from the mean
    cubes: float = 0.0  #: sum of the third powers of the distances from the mean
    fourths: float = 0.0  #: sum of the fourth powers of the distances from the mean
    l1: float = 0.0  #: sum of the magnitudes

    @property
    def finite(self) -> int:
        """Number of finite values, which the moments describe."""
        return self.count - self.nan - self.inf

    @property
    def std(self) -> float:
        """Population standard deviation, whose divisor is the number of finite values."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root mean square of the finite values."""
        return math.hypot(self.mean, self.std) if self.finite else math.nan

    @property
    def amax(self) -> float:
        """Largest finite magnitude."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.nan

    @property
    def skewness(self) -> float:
        """Third standardized moment; NaN if all values are equal or float64 overflows."""
        return self._standardized(self.cubes, 3)

    @property
    def kurtosis(self) -> float:
        """Fourth standardized moment; NaN if all values are equal or float64 overflows.

        The kurtosis of a normal distribution is 3.
        """
        return self._standardized(self.fourths, 4)

    def _standardized(self, powers: float, degree: int) -> float:
        scale = math.prod([self.std] * degree) if self.finite else 0.0
        if not (0 < scale < math.inf and math.isfinite(powers)):
            return math.nan
        return powers / self.finite / scale

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets of values taken together."""
        counts = (
            self.count + other.count,
            self.nan + other.nan,
            self.inf + other.inf,
            self.zeros + other.zeros,
            self.negative_zeros + other.negative_zeros,
        )
        if not (self.finite and other.finite):
            known = self if self.finite else other
            return Moments(
                *counts,
                known.min,
                known.max,
                known.smallest,
                known.mean,
                known.squares,
                known.cubes,
                known.fourths,
                known.l1,
            )
        a, b = self.finite, other.finite
        n, step = a + b, other.mean - self.mean
        # use shares instead of counts, because products of large counts would not be exact
        p, q = a / n, b / n
        # multiply, because `**` of floats raises an exception on overflow
        second = step * step
        third, fourth = second * step, second * second
        squares = self.squares + other.squares + second * (a * q)
        cubes = self.cubes + other.cubes + third * (a * q) * (p - q)
        cubes += 3 * step * (p * other.squares - q * self.squares)
        fourths = self.fourths + other.fourths + fourth * (a * q) * (p * p - p * q + q * q)
        fourths += 6 * second * (p * p * other.squares + q * q * self.squares)
        fourths += 4 * step * (p * other.cubes - q * self.cubes)
        return Moments(
            *counts,
            min(self.min, other.min),
            max(self.max, other.max),
            _least(self.smallest, other.smallest),
            self.mean + step * q,
            squares,
            cubes,
            fourths,
            self.l1 + other.l1,
        )


def merge(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all sets of values in `parts` taken together."""
    return sum(parts, start=Moments())


def _least(one: float, other: float) -> float:
    return one if math.isnan(other) else other if math.isnan(one) else min(one, other)


def of_counted(values: NDArray[np.float64], counts: NDArray[np.int64]) -> Moments:
    """Return the moments of distinct values, given the number of occurrences of each.

    Rounding errors arise only in the sums, which have one term per distinct value and thus a few
    thousand terms.
    """
    nan, inf = np.isnan(values), np.isinf(values)
    keep = (counts > 0) & ~nan & ~inf
    v, n = values[keep], counts[keep]
    zero = v == 0
    known = dict(
        count=int(counts.sum()),
        nan=int(counts[nan].sum()),
        inf=int(counts[inf].sum()),
        zeros=int(n[zero].sum()),
        negative_zeros=int(n[zero & np.signbit(v)].sum()),
    )
    if not len(v):
        return Moments(**known)
    mean = float((n * v).sum() / n.sum())
    distance = v - mean
    squares = n * distance**2
    magnitudes = np.abs(v[~zero])
    return Moments(
        **known,
        min=float(v.min()),
        max=float(v.max()),
        smallest=float(magnitudes.min()) if len(magnitudes) else math.nan,
        mean=mean,
        squares=float(squares.sum()),
        cubes=float((squares * distance).sum()),
        fourths=float((squares * distance**2).sum()),
        l1=float((n * np.abs(v)).sum()),
    )


def of_values(values: NDArray[Any]) -> Moments:
    """Return the moments of a one-dimensional array of float32 or float64 values."""
    counts, numbers = np.zeros(5, np.int64), np.zeros(7)
    _moments(values, counts, numbers)
    known = dict(zip(("nan", "inf", "zeros", "negative_zeros"), counts[1:].tolist(), strict=True))
    if counts[0] == counts[1] + counts[2]:
        return Moments(count=len(values), **known)
    low, high, smallest, mean, squares, cubes, fourths = numbers.tolist()
    finite = counts[0] - counts[1] - counts[2]
    l1 = _l1(values)
    return Moments(
        count=len(values),
        **known,
        min=low,
        max=high,
        smallest=smallest if finite > counts[3] else math.nan,
        mean=mean,
        squares=squares,
        cubes=cubes,
        fourths=fourths,
        l1=l1,
    )


@kernel
def _l1(values: Any) -> Any:
    """Return the sum of all finite magnitudes."""
    total = 0.0
    for i in range(len(values)):
        x = abs(np.float64(values[i]))
        total += x if x < np.inf else 0.0
    return total


@kernel
def _moments(values: Any, counts: Any, numbers: Any) -> None:
    """Compute counts and moments of the values, and write them to `counts` and `numbers`.

    Args:
        counts: output array for the number of all values, NaN, Inf, zeros and negative zeros.
        numbers: output array for min, max, smallest, mean, and the sums of the squares, cubes and
            fourth powers of the distances from the mean.
    """
    low, high, smallest, total = np.inf, -np.inf, np.inf, 0.0
    for i in range(len(values)):
        x = np.float64(values[i])
        if np.isnan(x):
            counts[1] += 1
        elif np.isinf(x):
            counts[2] += 1
        else:
            low, high = min(low, x), max(high, x)
            total += x
            if x == 0:
                counts[3] += 1
                if np.signbit(x):
                    counts[4] += 1
            else:
                smallest = min(smallest, abs(x))
    counts[0] = len(values)
    finite = counts[0] - counts[1] - counts[2]
    mean = total / finite if finite > 0 else np.nan
    squares = cubes = fourths = 0.0
    for i in range(len(values)):
        distance = np.float64(values[i]) - mean
        if abs(distance) < np.inf:
            square = distance * distance
            squares += square
            cubes += square * distance
            fourths += square * square
    numbers[0], numbers[1], numbers[2], numbers[3] = low, high, smallest, mean
    numbers[4], numbers[5], numbers[6] = squares, cubes, fourths
