"""A quantity by layer or iteration, one line a group."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron.analysis.plots.style import colour_of, guide, nothing, quiet

NARROW = 8.0  #: largest over smallest value, from which on a logarithmic axis is one


def plot_lines(
    data: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logarithmic: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw a line through the values of each group; what is not finite is left out.

    Args:
        data: columns `group`, `x` (whole numbers), `value`.
    """
    ax = plt.gca() if ax is None else ax
    if not np.isfinite(data["value"].astype(float)).any():
        return nothing(ax, title)
    for name, part in data.groupby("group", sort=False):
        part = part[np.isfinite(part["value"].astype(float))].sort_values("x")
        if logarithmic:
            part = part[part["value"] > 0]
        dashed = "--" if str(name).startswith("grad_") else "-"
        ax.plot(
            part["x"], part["value"], color=colour_of(str(name)), linestyle=dashed, marker="o",
            markersize=3.5, linewidth=1.4, label=str(name),
        )  # fmt: skip
    if logarithmic:
        ax.set_yscale("log")
        low, high = (data["value"][data["value"] > 0].agg(["min", "max"])).fillna(1.0)
        if high < NARROW * low:  # decades would leave no tick
            ax.set_yscale("linear")
            ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useOffset=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0.04, y=0.08)
    guide(ax)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, loc="left")
    return quiet(ax)
