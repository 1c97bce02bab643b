"""Mergeable counts and sums of the errors that a format causes in a tensor.

The counts of a tensor are exactly the sums of the counts of its parts. The sums are stored in
float64 and agree to 1e-10, however the tensor is partitioned. The error metrics of the result are
computed from these counts and sums.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.kernels import error_sums
from megatron.analysis.stats.kernels.error_sums import (
    BIAS,
    BINADE_ROWS,
    BINADES,
    CAUSES,
    CLIPPING_ERROR,
    COMPARED,
    GRID_ERROR,
    L1,
    LARGEST_ERROR,
    POISONED,
    RELATIVE,
    SATURATED,
    UNDERFLOW,
    UNDERFLOW_ERROR,
    VALUES,
    XX,
    XY,
    YY,
)

#: Number of bins for the difference between two float32 exponents, which range from -149 to 127.
RANGES = 278
#: Headroom histogram: number of bins per binade, and lower edge of the first bin, in binades.
HEADROOM_STEPS, HEADROOM_FROM = 8, -1.0
HEADROOM_BINS = 25


class Errors:
    """Counts and sums of the errors of one format along one axis.

    All counts are stored in the array `ints` and all sums in the array `floats`; the other
    attributes are views of these two arrays. `kernels.error_sums` defines the positions in
    `counts`, `totals`, `binade_counts` and `binade_sums`.
    """

    def __init__(
        self,
        codes: int,
        ints: NDArray[np.int64] | None = None,
        floats: NDArray[np.float64] | None = None,
    ):
        by_binade_size = BINADE_ROWS * BINADES
        sizes = (error_sums.COUNTS, by_binade_size, 256, 3, RANGES, HEADROOM_BINS, 2, codes)
        self.ints = np.zeros(sum(sizes), np.int64) if ints is None else ints
        rows = CAUSES + 2  # number of rows of `binade_sums`
        self.floats = np.zeros(error_sums.SUMS + rows * BINADES + 2) if floats is None else floats
        ends = list(itertools.accumulate(sizes))
        parts = [self.ints[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.counts, by_binade, self.scales, self.blocks = parts[:4]
        self.block_range, self.headroom, self.disagreement, self.codes = parts[4:]
        self.binade_counts = by_binade.reshape(BINADE_ROWS, BINADES)
        self.totals = self.floats[: error_sums.SUMS]
        self.binade_sums = self.floats[error_sums.SUMS : -2].reshape(rows, BINADES)
        self.headroom_sum, self.disagreement_sum = self.floats[-2:-1], self.floats[-1:]

    def __iadd__(self, other: Errors) -> Errors:
        largest = max(self.totals[LARGEST_ERROR], other.totals[LARGEST_ERROR])
        self.ints += other.ints
        self.floats += other.floats
        self.totals[LARGEST_ERROR] = largest
        return self

    def copy(self) -> Errors:
        """Return a copy that shares no memory with this object."""
        return Errors(len(self.codes), self.ints.copy(), self.floats.copy())

    @property
    def sums(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Tuple of the four arrays that the kernels of `error_sums` update."""
        return self.counts, self.totals, self.binade_counts, self.binade_sums

    def numbers(self) -> dict[str, float]:
        """Return the error metrics of one row of `Statistics.formats`, such as MSE and SQNR.

        `result.FORMAT_COLUMNS` defines the metrics.
        """
        n, by_binade = int(self.counts[COMPARED]), self.binade_counts
        xx, yy, xy, bias, largest = (
            float(self.totals[i]) for i in (XX, YY, XY, BIAS, LARGEST_ERROR)
        )
        causes = self.binade_sums[:CAUSES].sum(1).tolist()
        squared = float(sum(causes))
        nonzero = int(by_binade[VALUES].sum())
        finite = n + int(self.counts[error_sums.LOST])
        return {
            "mse": _ratio(squared, n),
            "rmse": math.sqrt(_ratio(squared, n)),
            "sqnr_db": decibels(xx, squared) if nonzero else math.nan,
            "cosine": _ratio(xy, math.sqrt(xx) * math.sqrt(yy)),
            "bias": _ratio(bias, n),
            "relative_bias": _ratio(bias, float(self.totals[L1])),
            "gain": _ratio(xy, xx) - 1,
            "relative_error": _ratio(float(self.binade_sums[RELATIVE].sum()), nonzero),
            "max_error": largest if n else math.nan,
            "compared": n,
            "nonzero": nonzero,
            "poisoned": int(self.counts[POISONED]),
            "underflow": _ratio(int(by_binade[UNDERFLOW].sum()), nonzero),
            "saturated": _ratio(int(by_binade[SATURATED].sum()), finite),
            "clipping_error": _ratio(causes[CLIPPING_ERROR], squared),
            "underflow_error": _ratio(causes[UNDERFLOW_ERROR], squared),
            "grid_error": _ratio(causes[GRID_ERROR], squared),
            **self._code_numbers(),
            **self._disagreement_numbers(xx),
        }

    def _code_numbers(self) -> dict[str, float]:
        if not len(self.codes):
            return dict.fromkeys(("codes_used", "codes", "code_entropy"), math.nan)
        share = self.codes[self.codes > 0] / max(int(self.codes.sum()), 1)
        return {
            "codes_used": len(share),
            "codes": len(self.codes),
            "code_entropy": float(-(share * np.log2(share)).sum()) + 0.0,
        }

    def _disagreement_numbers(self, xx: float) -> dict[str, float]:
        differ, of = self.disagreement.tolist()
        if not of:
            return {"axis_disagreement": math.nan, "axis_sqnr_db": math.nan}
        return {
            "axis_disagreement": differ / of,
            "axis_sqnr_db": decibels(xx, float(self.disagreement_sum[0])) if xx else math.nan,
        }

    def block_numbers(self, exponents: NDArray[np.float64]) -> dict[str, float]:
        """Return the block statistics of one row of `Statistics.formats`, such as the headroom.

        Args:
            exponents: [256] base-2 logarithm of the scale that each byte encodes; NaN for bytes
                that encode no scale.
        """
        names = ("blocks", "zero_blocks", "nan_blocks")
        numbers: dict[str, float] = dict(zip(names, self.blocks.tolist(), strict=True))
        scales = self.scales.copy()
        scales[0] -= numbers["zero_blocks"]
        scales[~np.isfinite(exponents)] = 0
        used = np.flatnonzero(scales)
        ranges, usual = np.flatnonzero(self.block_range), int(self.block_range.sum())
        median = np.searchsorted(np.cumsum(scales[used]), scales.sum() / 2) if len(used) else 0
        total = float(self.block_range @ np.arange(RANGES))
        return numbers | {
            "scale_min": float(exponents[used[0]]) if len(used) else math.nan,
            "scale_max": float(exponents[used[-1]]) if len(used) else math.nan,
            "scale_median": float(exponents[used[median]]) if len(used) else math.nan,
            "scales_used": len(used),
            "block_range": _ratio(total, usual),
            "block_range_max": float(ranges[-1]) if usual else math.nan,
            "headroom": _ratio(float(self.headroom_sum[0]), usual),
        }


def headroom_bins(errors: Errors, room: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
    """Add the headroom of blocks to `errors.headroom` and `errors.headroom_sum`.

    Args:
        room: headroom in binades: log2(largest number * scale / largest magnitude).
        counts: number of blocks with each headroom.
    """
    room = np.maximum(room, -RANGES)  # the headroom is -inf if the scale underflowed to zero
    # a scale that is not a power of two is rounded, so the computed headroom may be slightly
    # negative where the exact one is 0
    bins = np.clip((np.round(room, 5) - HEADROOM_FROM) * HEADROOM_STEPS, 0, HEADROOM_BINS - 1)
    np.add.at(errors.headroom, bins.astype(np.int64), counts)
    errors.headroom_sum += (counts * room).sum()


def decibels(signal: float, noise: float) -> float:
    """Return `10 * log10(signal / noise)` in dB.

    The result is inf if `noise` is zero, and -inf if only `signal` is zero.
    """
    if not noise:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


#: Errors, keyed by format name and axis ("row", "column" or "all").
FormatErrors = dict[tuple[str, str], Errors]
