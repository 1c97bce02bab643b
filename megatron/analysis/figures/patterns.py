"""Quantiles and densities from counts of bfloat16 patterns: of any number of tensors, exact to a
bfloat16 step.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_PATTERNS = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
with np.errstate(invalid="ignore"):  # patterns of signaling NaN
    _VALUES = _PATTERNS.view(np.float32).astype(np.float64)
_FINITE = np.isfinite(_VALUES)
#: Finite patterns from the most negative value to the largest.
_RISING = np.flatnonzero(_FINITE)[np.argsort(_VALUES[_FINITE], kind="stable")]
REACH = 12.0  #: standard deviations that a histogram shows
BINS = 96


def magnitude_quantiles(patterns: NDArray[np.int64]) -> dict[str, float]:
    """1 %, 25 %, 50 %, 75 %, 99 % and the largest of the magnitudes; zeros count."""
    magnitudes = patterns[: 1 << 15] + patterns[1 << 15 :]
    total = int(magnitudes.sum())
    if not total:
        return dict.fromkeys(("p1", "p25", "p50", "p75", "p99", "largest"), np.nan)
    below = np.cumsum(magnitudes)
    shares = (("p1", 0.01), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p99", 0.99))
    at = {name: int(np.searchsorted(below, share * total)) for name, share in shares}
    at["largest"] = int(np.flatnonzero(magnitudes)[-1])
    return {name: float(_VALUES[place]) for name, place in at.items()}


def moments(patterns: NDArray[np.int64]) -> tuple[float, float]:
    """Mean and standard deviation."""
    counts, values = patterns[_FINITE].astype(np.float64), _VALUES[_FINITE]
    total = max(counts.sum(), 1.0)
    mean = float(counts @ values / total)
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / total))


def standard_quantiles(
    patterns: NDArray[np.int64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """In standard deviations from the mean; NaN for shares of less than one value."""
    counts = patterns[_RISING]
    mean, std = moments(patterns)
    total = int(counts.sum())
    if not total or not std > 0:
        return np.full(len(shares), np.nan)
    at = np.searchsorted(np.cumsum(counts), shares * total)
    found = (_VALUES[_RISING][np.minimum(at, len(_RISING) - 1)] - mean) / std
    enough = np.minimum(shares, 1 - shares) * total >= 1
    return np.where(enough, found, np.nan)


def density(patterns: NDArray[np.int64]) -> pd.DataFrame | None:
    """Even bins of values over the standard deviation; None where all values are one."""
    std = moments(patterns)[1]
    if not std > 0:
        return None
    counts, values = patterns[_RISING], _VALUES[_RISING] / std
    seen = np.flatnonzero(counts)
    reach = min(REACH, max(4.0, float(np.abs(values[seen]).max())))
    edges = np.linspace(-reach, reach, BINS + 1)
    binned, _ = np.histogram(values[seen], edges, weights=counts[seen])
    width, total = edges[1] - edges[0], counts.sum()
    return pd.DataFrame(
        {"left": edges[:-1], "right": edges[1:], "density": binned / (total * width)}
    )
