"""Draw box plots of magnitudes, one box per tensor, on an axis of powers of two."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import (
    INK,
    color_of,
    guide,
    lighter,
    nothing,
    powers_of_two,
    quiet,
)


def plot_boxes(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one horizontal box per row of the data.

    A box covers the middle half of the magnitudes and shows the median. The whiskers extend from
    the 1 % quantile to the 99 % quantile, and a tick marks the largest magnitude. If the 1 %
    quantile is zero, a triangle marks the left end of the whisker.

    Args:
        data: table with columns `name`, `group` (which determines the color), and the magnitudes
            `p1`, `p25`, `p50`, `p75`, `p99` and `largest`.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    columns = ["p1", "p25", "p50", "p75", "p99", "largest"]
    numbers = data[columns].to_numpy(dtype=float)
    positive = numbers[numbers > 0]
    floor = float(positive.min()) / 2 if positive.size else 0.5
    logs = np.log2(np.maximum(numbers, floor))
    for y, (row, values) in enumerate(zip(data.to_dict("records"), logs, strict=True)):
        _box(ax, y, str(row["group"]), dict(zip(columns, values, strict=True)))
        if row["p1"] == 0:
            color = color_of(str(row["group"]))
            ax.plot([np.log2(floor)], [y], "v", markersize=6, color=color, clip_on=False, zorder=4)
    ax.set_yticks(range(len(data)), [str(name) for name in data["name"]])
    ax.set_ylim(len(data) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.03)
    powers_of_two(ax.xaxis)
    guide(ax, "x")
    ax.set_xlabel("magnitude")
    ax.set_title(title, loc="left")
    return quiet(ax)


def _box(ax: Axes, y: int, group: str, at: dict[str, Any]) -> None:
    color = color_of(group)
    hatch = "////" if group.startswith("grad_") else None
    ax.plot([at["p1"], at["p99"]], [y, y], color=color, linewidth=1.2, zorder=1)
    ax.barh(
        y,
        at["p75"] - at["p25"],
        0.6,
        left=at["p25"],
        color=lighter(color, 0.6),
        edgecolor=color,
        hatch=hatch,
        zorder=2,
    )
    ax.plot([at["p50"], at["p50"]], [y - 0.3, y + 0.3], color=INK, linewidth=1.4, zorder=3)
    ax.plot([at["largest"]], [y], marker="|", markersize=8, color=color, zorder=3)
