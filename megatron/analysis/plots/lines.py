"""Draw a quantity by layer or iteration, one line per group."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron.analysis.plots.style import (
    colors_of,
    decades,
    guide,
    nothing,
    quiet,
    right_of_title,
)

EXACT, ZERO = "▴ infinite", "▾ zero"  #: explanations of the marks at the two ends of the y-axis
NOISE = 0.1  #: half of the minimum span of a linear axis, as a fraction of the median value
NARROW = 8.0  #: default minimum ratio of largest to smallest value for a logarithmic axis


def plot_lines(
    data: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logarithmic: bool = False,
    least: float = 0.0,
    narrow: float = NARROW,
    ax: Axes | None = None,
) -> Axes:
    """Draw the values of each group as one line.

    Infinity is marked at the upper end of the y-axis, and zero at the lower end if the axis is
    logarithmic. NaN is omitted.

    Args:
        data: table with columns `group`, `x` (integers) and `value`.
        logarithmic: if True, use a logarithmic y-axis. If the largest positive value is less than
            `narrow` times the smallest, the axis stays linear and extends at least a tenth of the
            median value above and below the middle.
        least: minimum span of a linear y-axis, so that noise does not fill it.
        narrow: minimum ratio of the largest to the smallest value for a logarithmic axis; 1 for a
            logarithmic axis in any case.
    """
    ax = plt.gca() if ax is None else ax
    if not np.isfinite(data["value"].astype(float)).any():
        return nothing(ax, title)
    numbers = data["value"].astype(float)
    positive = numbers[np.isfinite(numbers) & (numbers > 0)]
    # A logarithmic axis that spans less than a decade might have no labeled tick.
    log = logarithmic and len(positive) > 0 and positive.max() >= narrow * positive.min()
    if logarithmic and not log and len(positive):
        least = max(least, 2 * NOISE * float(positive.median()))
    colors = colors_of(dict.fromkeys(map(str, data["group"])))
    for name, part in data.groupby("group", sort=False):
        color = colors[str(name)]
        part = part.sort_values("x")
        values = part["value"].astype(float)
        drawn = part[np.isfinite(values) & ((values > 0) if log else True)]
        dashed = "--" if str(name).startswith("grad_") else "-"
        ax.plot(
            drawn["x"],
            drawn["value"],
            color=color,
            linestyle=dashed,
            marker="o",
            markersize=3.5,
            linewidth=1.4,
            label=str(name),
        )
        _at_the_edge(ax, part["x"][values == np.inf], color, top=True)
        if log:
            _at_the_edge(ax, part["x"][values == 0], color, top=False)
    marks = [EXACT] if (numbers == np.inf).any() else []
    marks += [ZERO] if log and (numbers == 0).any() else []
    if marks:
        right_of_title(ax, ", ".join(marks))
    if log:
        ax.set_yscale("log")
        decades(ax.yaxis)
    elif logarithmic:
        # The default formatter may write a factor such as 1e6 above the axes and push the title up.
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.4g}"))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0.04, y=0.08)
    if logarithmic and positive.empty and not (numbers < 0).any():
        ax.set_ylim(-0.05, 1)  # all are zero or infinite; ticks below zero would be impossible
        ax.set_yticks([0])
    elif not log:
        _widen(ax, numbers[np.isfinite(numbers)], least)
    guide(ax)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, loc="left")
    return quiet(ax)


def _widen(ax: Axes, values: pd.Series[float], least: float) -> None:
    """Widen the y-axis to a span of at least `least`, centered between the extreme values."""
    low, high = ax.get_ylim()
    if high - low < least and len(values):
        middle = (float(values.min()) + float(values.max())) / 2
        ax.set_ylim(middle - least / 2, middle + least / 2)


def _at_the_edge(ax: Axes, x: pd.Series, color: str, *, top: bool) -> None:
    """Draw a mark at each `x`, at the upper or lower end of the y-axis."""
    if x.empty:  # an empty line has no extent, which breaks the layout of the figure
        return
    ax.plot(
        x,
        [0.985 if top else 0.015] * len(x),
        linestyle="",
        marker="^" if top else "v",
        markersize=5,
        color=color,
        transform=ax.get_xaxis_transform(),
        clip_on=False,
    )
