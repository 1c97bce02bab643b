"""How large the values of each tensor are: rms and range, on an axis of powers of two."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import colour_of, guide, nothing, powers_of_two, quiet


def plot_scales(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw a row a tensor: a dot at its rms, a line over its range; gradients have open dots.

    Args:
        data: columns `name`, `group` (its colour), `low`, `rms`, `high`; what is zero or NaN is
            left out.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    numbers = data[["low", "rms", "high"]].astype(float)
    logs = np.log2(numbers.where(numbers > 0))
    for y, (group, row) in enumerate(zip(data["group"], logs.itertuples(index=False), strict=True)):
        colour = colour_of(str(group))
        left = row.low if np.isfinite(row.low) else row.rms
        ax.plot([left, row.high], [y, y], color=colour, linewidth=1.4)
        fill = "white" if str(group).startswith("grad_") else colour
        ax.plot([row.rms], [y], "o", markersize=6, color=colour, markerfacecolor=fill)
    ax.set_yticks(range(len(data)), [str(name) for name in data["name"]])
    ax.set_ylim(len(data) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    powers_of_two(ax.xaxis)
    guide(ax, "x")
    ax.set_xlabel("magnitude")
    ax.set_title(title, loc="left")
    return quiet(ax)
