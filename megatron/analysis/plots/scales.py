"""Draw the RMS and the range of magnitudes of each tensor, on an axis of powers of two."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import color_of, guide, nothing, powers_of_two, quiet


def plot_scales(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one row per tensor, with a dot at the RMS and a line for the range of magnitudes.

    The line goes from `low` to `high`. The dot is open for gradients.

    Args:
        data: table with columns `name`, `group` (which determines the color), `low`, `rms` and
            `high`. A zero or NaN is not drawn; a line without `low` begins at the RMS.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    numbers = data[["low", "rms", "high"]].astype(float)
    logs = np.log2(numbers.where(numbers > 0))
    for y, (group, row) in enumerate(zip(data["group"], logs.itertuples(index=False), strict=True)):
        color = color_of(str(group))
        left = row.low if np.isfinite(row.low) else row.rms
        ax.plot([left, row.high], [y, y], color=color, linewidth=1.4)
        fill = "white" if str(group).startswith("grad_") else color
        ax.plot([row.rms], [y], "o", markersize=6, color=color, markerfacecolor=fill)
    ax.set_yticks(range(len(data)), [str(name) for name in data["name"]])
    ax.set_ylim(len(data) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    powers_of_two(ax.xaxis)
    guide(ax, "x")
    ax.set_xlabel("magnitude")
    ax.set_title(title, loc="left")
    return quiet(ax)
