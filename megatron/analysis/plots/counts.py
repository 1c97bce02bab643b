"""Draw histograms of a property of blocks (headroom, range or scale), one per format."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import FILL, color_of, guide, nothing, percent, quiet


def plot_counts(
    data: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str = "share of blocks",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one histogram per format, of a property of its quantization blocks.

    Args:
        data: table with columns `format`, `left`, `right` and `count`. The bins are in ascending
            order without gaps.
    """
    ax = plt.gca() if ax is None else ax
    if not data["count"].any():
        return nothing(ax, title)
    for name, part in data.groupby("format", sort=False):
        shares = part["count"] / max(part["count"].sum(), 1)
        edges = [*part["left"], part["right"].iloc[-1]]
        ax.stairs(shares, edges, fill=True, color=color_of(str(name)), alpha=FILL)
        ax.stairs(shares, edges, color=color_of(str(name)), linewidth=1.5, label=str(name))
    ax.set_xlim(data["left"].min(), data["right"].max())
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    guide(ax)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, loc="left")
    return quiet(ax)
