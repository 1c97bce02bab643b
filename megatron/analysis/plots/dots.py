"""Draw a quantity as dots, with one row per name and one dot per group in each row."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import (
    RULE,
    color_of,
    guide,
    nothing,
    percent,
    quiet,
    right_of_title,
)

ZERO = "0"  #: label of the tick that represents zero on a logarithmic axis


def plot_dots(
    data: pd.DataFrame,
    *,
    xlabel: str,
    title: str = "",
    shares: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw one row of dots per name, from top to bottom in the order of first appearance.

    Infinite values are marked at the right end of the axis.

    Args:
        data: table with columns `group`, `name` and `value`.
        shares: if True, the values are shares, drawn on a logarithmic axis. The tick at the left
            end of the axis represents zero.
    """
    ax = plt.gca() if ax is None else ax
    if not np.isfinite(data["value"].astype(float)).any():
        return nothing(ax, title)
    names = list(dict.fromkeys(data["name"]))
    place = {name: i for i, name in enumerate(names)}
    values = data["value"].astype(float)
    floor = _floor(values) if shares else None
    for name in names:
        ax.axhline(place[name], color=RULE, linewidth=0.6, zorder=0)
    groups = list(data.groupby("group", sort=False))
    for lane, (name, part) in enumerate(groups):
        x = part["value"].astype(float).to_numpy()
        keep = np.isfinite(x)
        if floor is not None:
            x = np.where(x == 0, floor, x)
        shift = 0.11 * (lane - (len(groups) - 1) / 2)
        y = np.array([place[row] for row in part["name"]]) + shift
        if (beyond := x == np.inf).any():
            ax.plot(
                np.full(beyond.sum(), 0.992),
                y[beyond],
                ">",
                color=color_of(str(name)),
                markersize=5,
                transform=ax.get_yaxis_transform(),
                clip_on=False,
            )
        ax.scatter(
            x[keep],
            y[keep],
            s=26,
            color=color_of(str(name)),
            edgecolors="white",
            linewidths=0.5,
            label=str(name),
            zorder=3,
        )
    ax.set_yticks(range(len(names)), [str(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    if floor is not None:
        _share_axis(ax, floor, float(np.nanmax(values)) if values.notna().any() else 1.0)
    if (values == np.inf).any():
        right_of_title(ax, "▸ infinite")
    guide(ax, "x")
    ax.set_xlabel(xlabel)
    ax.set_title(title, loc="left")
    return quiet(ax)


def _floor(values: pd.Series[float]) -> float:
    """Return where to draw zero on a logarithmic axis: below the smallest positive share."""
    positive = values[values > 0]
    smallest = float(positive.min()) if len(positive) else 1e-3
    return float(10.0 ** (np.floor(np.log10(smallest)) - 1))


def _share_axis(ax: Axes, floor: float, largest: float) -> None:
    """Make the x-axis logarithmic; label decades as percentages, and `floor` as zero."""
    ax.set_xscale("log")
    ax.set_xlim(floor / 1.6, max(2 * largest, 20 * floor))
    first, last = round(np.log10(floor)) + 1, int(np.floor(np.log10(ax.get_xlim()[1])))
    every = max(1, (last - first) // 6 + 1)
    ax.set_xticks([floor, *(10.0**e for e in range(first, last + 1, every))])
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: ZERO if x <= floor else percent(x)))
