"""Draw the number of values in each binade, to show the exponent range that a format needs."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron.analysis.plots.style import (
    FILL,
    RULE,
    color_of,
    power,
    quiet,
    right_of_title,
    short_count,
)


def plot_magnitude_histogram(
    data: pd.DataFrame, *, title: str = "", note: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the number of values by exponent as one outline per group.

    If there are at most two groups, the area below the outlines is lightly filled.

    Args:
        data: table with columns `group`, `exponent` and `count`, which is the number of the group's
            values whose magnitude is at least 2**exponent and below 2**(exponent + 1). The
            exponents have no gaps and are the same for every group.
        note: text about values that the histogram does not show.
    """
    ax = plt.gca() if ax is None else ax
    groups = data["group"].nunique()
    for name, part in data.groupby("group", sort=False):
        exponents = part["exponent"].tolist()
        edges = [*exponents, exponents[-1] + 1]
        color = color_of(str(name))
        if groups <= 2:  # with more groups, overlapping colors would mix
            ax.stairs(part["count"], edges, fill=True, color=color, alpha=FILL)
        ax.stairs(part["count"], edges, color=color, linewidth=1.5, label=str(name))
    ax.set_xlim(data["exponent"].min(), data["exponent"].max() + 1)
    ax.set_ylim(0, 1.08 * max(float(data["count"].max()), 1.0))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: power(2, round(x))))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short_count(y)))
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set(xlabel="magnitude", ylabel="values per binade")
    ax.set_title(title, loc="left")
    if note:
        right_of_title(ax, note)
    return quiet(ax)
