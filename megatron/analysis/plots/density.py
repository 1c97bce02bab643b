"""Draw the density of values in units of their standard deviation, on a logarithmic y-axis."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import FAINT, FILL, color_of, decades, guide, nothing, quiet


def plot_density(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one density per group, with a normal distribution for comparison.

    Args:
        data: table with columns `group`, `left`, `right` (in standard deviations) and `density`.
            The bins are in ascending order.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    for name, part in data.groupby("group", sort=False):
        edges = [*part["left"], part["right"].iloc[-1]]
        color = color_of(str(name))
        ax.stairs(part["density"], edges, fill=True, color=color, alpha=FILL)
        ax.stairs(part["density"], edges, color=color, linewidth=1.2, label=str(name))
    low, high = float(data["left"].min()), float(data["right"].max())
    x = np.linspace(max(low, -6), min(high, 6), 200)
    ax.plot(x, np.exp(-x * x / 2) / math.sqrt(2 * math.pi), color=FAINT, linestyle=":", linewidth=1)
    positive = data["density"][data["density"] > 0]
    floor = float(positive.min()) if len(positive) else 1e-6
    ax.set_ylim(max(floor / 2, 1e-9), 3 * max(float(data["density"].max()), 0.4))
    ax.set_yscale("log")
    decades(ax.yaxis)
    ax.set_xlim(low, high)
    guide(ax)
    ax.set_title(title, loc="left")
    return quiet(ax)
