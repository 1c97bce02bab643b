"""Statistics of paired runs: confidence intervals for mean differences and rank correlations.

Only NumPy is needed. The tests compare the functions with published tables, and with SciPy where it
is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95  #: confidence level of all intervals
FEWEST_PAIRS = 6  #: smallest number of pairs for which a correlation has an interval
RESAMPLES = 10_000  #: number of bootstrap samples
_SEED = 20_260_101  #: seed of the bootstrap samples; fixed, so that intervals are reproducible
_CHUNK = 1 << 22  #: maximum number of comparisons in memory at a time

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate with its confidence interval; the ends are NaN if they cannot be computed."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        """True if zero is outside of the interval; False if there is no interval."""
        return self.low > 0 or self.high < 0


def student_probability(t: float, degrees: int) -> float:
    """Return the probability that a variable with Student's t distribution is between -t and t.

    Args:
        t: limit, at least 0.
        degrees: degrees of freedom, at least 1.
    """
    # Abramowitz and Stegun, 26.7.3 and 26.7.4
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which P(|T| <= t) = `confidence`, where T has Student's t distribution.

    Raises:
        ValueError: if there is no degree of freedom, or the confidence is not between 0 and 1.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"{degrees} degrees of freedom and a confidence of {confidence}; at least 1 degree and "
            "a confidence between 0 and 1 are required"
        )
    low, high = 0.0, 1.0
    while student_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(100):  # each step halves the interval; 100 steps reach full precision
        middle = (low + high) / 2
        if student_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def standard_error(differences: Sequence[float]) -> float:
    """Return the standard error of the mean of the differences; NaN for fewer than two."""
    count = len(differences)
    return float(np.std(differences, ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def mean_interval(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of paired differences with its interval from Student's t distribution.

    A single difference has no interval, and no difference has no mean.
    """
    if not differences:
        return Interval(math.nan)
    mean = float(np.mean(differences))
    if len(differences) == 1:
        return Interval(mean)
    error = standard_error(differences)
    half = student_quantile(len(differences) - 1, confidence) * error
    return Interval(mean, mean - half, mean + half)


def ranks(values: Array) -> Array:
    """Return ranks from 1 along the last axis of `values`; equal values share their mean rank."""
    below = values[..., None, :] < values[..., :, None]
    equal = values[..., None, :] == values[..., :, None]
    total: Array = below.sum(-1) + (equal.sum(-1) + 1) / 2
    return total


def _correlations(x: Array, y: Array) -> Array:
    """Return Pearson's correlation of x and y along the last axis; NaN if x or y is constant."""
    x = x - x.mean(-1, keepdims=True)
    y = y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.where(scale > 0, (x * y).sum(-1) / scale, math.nan)
    return result


def spearman(x: Sequence[float], y: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return Spearman's rank correlation of x and y with a bootstrap percentile interval.

    Infinite values are allowed, because only their order counts. Bootstrap samples in which x or y
    is constant are left out. The result is NaN for fewer than three pairs. There is no interval for
    fewer than `FEWEST_PAIRS` pairs: unrelated values are then often in perfect order.

    Raises:
        ValueError: if x and y differ in length, or a value is NaN.
    """
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(
            f"x has the shape {first.shape} and y {second.shape}; give two vectors of equal length"
        )
    if np.isnan(first).any() or np.isnan(second).any():
        raise ValueError("a value is NaN, which has no rank; leave its pair out")
    count = len(first)
    if count < 3:
        return Interval(math.nan)
    value = float(_correlations(ranks(first), ranks(second)))
    if count < FEWEST_PAIRS:
        return Interval(value)
    generator = np.random.default_rng(_SEED)
    samples = generator.integers(0, count, (RESAMPLES, count))
    step = max(1, _CHUNK // count**2)
    values = np.concatenate(
        [
            _correlations(ranks(first[part]), ranks(second[part]))
            for part in (samples[at : at + step] for at in range(0, RESAMPLES, step))
        ]
    )
    values = values[~np.isnan(values)]
    if math.isnan(value) or not len(values):
        return Interval(value)
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value, float(low), float(high))
