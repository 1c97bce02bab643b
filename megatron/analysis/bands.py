"""Find the tensors whose statistics left their usual range during a run.

An operand has three numbers per measured iteration: the binary logarithms of its amax and of its
rms, and its SQNR in dB. The band of such a number is the range of its last 32 values, widened on
both sides by the width of this range, or by a factor of 4 (amax, rms) or 6 dB (SQNR) if that is
more. A number outside its band has left it. So has an amax that is not finite, at any time. An amax
or rms of zero has no logarithm. It leaves the band if none of the previous values in the window is
zero.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from megatron.analysis.statistics_history import OPERAND

WINDOW = 32  #: number of previous values from whose range a band is computed
ENOUGH = 8  #: minimum number of previous values for a band
#: minimum distance from the range of the previous values to the ends of the band, by statistic: in
#: powers of two for amax and rms, in dB for sqnr_db
LEAST = {"amax": 2.0, "rms": 2.0, "sqnr_db": 6.0}


def excursions(table: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics that left their bands, in the order of iterations and matmuls.

    Args:
        table: the statistics, from `read_statistics`.

    Returns:
        The columns that identify the operand, `iteration`, `statistic`, `value`, `low` and `high`
        (the ends of the band, NaN if there is none), and `distance`: how far the number is outside
        the band, in widths of the band; Inf if the number is zero or not finite.
    """
    numbered = table.assign(order=table.groupby(["iteration", "rank"]).cumcount())
    # The separator is not a zero byte, because pandas 2 compares strings only up to such a byte.
    keys = numbered[OPERAND].astype(str).agg("\x1f".join, axis=1)
    parts = []
    for statistic, least in LEAST.items():
        grid = numbered.assign(key=keys).pivot_table(
            index="iteration", columns="key", values=statistic, aggfunc="last", dropna=False
        )
        values = grid.to_numpy(np.float64)
        broken = ~np.isfinite(values) & (statistic == "amax") & _present(numbered, keys, grid)
        if statistic != "sqnr_db":
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log2(values)
        low, high = _bands(np.where(np.isfinite(values), values, np.nan), least)
        with np.errstate(invalid="ignore"):
            beyond = np.maximum(values - high, low - values) / (high - low)
            outside = np.isfinite(values) & (beyond > 0)
        zero = np.isneginf(values)  # the logarithm of zero; no SQNR is -Inf
        outside |= zero & np.isfinite(low) & ~_in_window(zero)
        rows, columns = np.nonzero(outside | broken)
        ends = (low, high) if statistic == "sqnr_db" else (np.exp2(low), np.exp2(high))
        parts.append(
            pd.DataFrame(
                {
                    "iteration": grid.index.to_numpy()[rows],
                    "key": grid.columns.to_numpy()[columns],
                    "statistic": statistic,
                    "value": grid.to_numpy(np.float64)[rows, columns],
                    "low": ends[0][rows, columns],
                    "high": ends[1][rows, columns],
                    "distance": np.where(broken, np.inf, beyond)[rows, columns],
                }
            )
        )
    places = numbered.assign(key=keys)[["iteration", "key", "order", *OPERAND]]
    found = pd.concat(parts).merge(places, on=["iteration", "key"], how="left")
    found = found.sort_values(["iteration", "order"], kind="stable", ignore_index=True)
    return found[["iteration", *OPERAND, "statistic", "value", "low", "high", "distance"]]


def _present(numbered: pd.DataFrame, keys: pd.Series, grid: pd.DataFrame) -> np.ndarray:
    """Return which operands were measured in which iterations, in the layout of `grid`."""
    counts = pd.crosstab(numbered["iteration"], keys)
    present: np.ndarray = counts.reindex(index=grid.index, columns=grid.columns).to_numpy() > 0
    return present


def _in_window(marked: np.ndarray) -> np.ndarray:
    """Return a mask of the values that have a marked value at most `WINDOW` rows above them."""
    found = np.zeros_like(marked)
    for row in range(1, len(marked)):
        found[row] = marked[max(0, row - WINDOW) : row].any(0)
    return found


def _bands(values: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper end of each value's band, from the values in the rows above."""
    low, high = np.full_like(values, np.nan), np.full_like(values, np.nan)
    for row in range(ENOUGH, len(values)):
        before = values[max(0, row - WINDOW) : row]
        enough = np.isfinite(before).sum(0) >= ENOUGH
        if enough.any():
            smallest, largest = np.nanmin(before[:, enough], 0), np.nanmax(before[:, enough], 0)
            margin = np.maximum(largest - smallest, least)
            low[row, enough], high[row, enough] = smallest - margin, largest + margin
    return low, high
