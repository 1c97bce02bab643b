"""Mergeable counts and moments of values.

Counts and extremes are exact; moments are sums in float64. Each moment is a sum of powers of the
distance to the mean, because sums of plain powers lose all precision if the spread is small
compared with the mean. Two sets are merged by the update of Chan, Golub and LeVeque and its
extension to higher powers (Pébay, SAND2008-6212). For every partition, mean, std and rms agree to
1e-12, skewness and kurtosis to 1e-9 of their scale.
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
    """Counts and moments of a set of values; NaN and Inf are counted and otherwise left out."""

    count: int = 0  #: all values, NaN and Inf included
    nan: int = 0
    inf: int = 0
    zeros: int = 0  #: zeros of either sign
    negative_zeros: int = 0
    min: float = math.nan  #: NaN if no value is finite, like max, smallest and mean
    max: float = math.nan
    smallest: float = math.nan  #: smallest magnitude above zero; NaN if all values are zero
    mean: float = math.nan
    squares: float = 0.0  #: sum of the squared distances to the mean
    cubes: float = 0.0  #: sum of the third powers of the distances
    fourths: float = 0.0  #: sum of the fourth powers of the distances
    l1: float = 0.0  #: sum of the magnitudes

    @property
    def finite(self) -> int:
        """Return the number of finite values, which the moments describe."""
        return self.count - self.nan - self.inf

    @property
    def std(self) -> float:
        """Return the standard deviation of the population (divided by n)."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Return the root of the mean square."""
        return math.hypot(self.mean, self.std) if self.finite else math.nan

    @property
    def amax(self) -> float:
        """Return the largest magnitude."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.nan

    @property
    def skewness(self) -> float:
        """Return the third standardized moment; NaN for a constant, or if float64 overflows."""
        return self._standardized(self.cubes, 3)

    @property
    def kurtosis(self) -> float:
        """Return the fourth standardized moment, 3 for a normal distribution; NaN like skewness."""
        return self._standardized(self.fourths, 4)

    def _standardized(self, powers: float, degree: int) -> float:
        scale = math.prod([self.std] * degree) if self.finite else 0.0
        if not (0 < scale < math.inf and math.isfinite(powers)):
            return math.nan
        return powers / self.finite / scale

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets together."""
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
        p, q = a / n, b / n  # shares of the values; products of large ints would not be exact
        # products, because the power of a float raises an exception on overflow
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
    """Return the moments of all sets together."""
    return sum(parts, start=Moments())


def _least(one: float, other: float) -> float:
    return one if math.isnan(other) else other if math.isnan(one) else min(one, other)


def of_counted(values: NDArray[np.float64], counts: NDArray[np.int64]) -> Moments:
    """Return the moments of values that each occur `counts` times.

    The only error is the rounding of a sum with one term per value, which are a few thousand.
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
    """Return the moments of float32 or float64 values in one dimension."""
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
    """Return the sum of the finite magnitudes."""
    total = 0.0
    for i in range(len(values)):
        x = abs(np.float64(values[i]))
        total += x if x < np.inf else 0.0
    return total


@kernel
def _moments(values: Any, counts: Any, numbers: Any) -> None:
    """Write the counts and the moments of values to two arrays.

    counts: all, nan, inf, zeros, negative zeros
    numbers: min, max, smallest, mean, and the sums of the squares, cubes and fourth powers of the
        distance to the mean
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
