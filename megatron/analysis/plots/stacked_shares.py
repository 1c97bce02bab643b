"""Draw parts of a whole, such as the shares of values in regions of a format, as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import percent, quiet


def plot_stacked_shares(
    data: pd.DataFrame,
    colors: Mapping[str, str],
    *,
    title: str = "",
    xlabel: str = "share of values",
    ax: Axes | None = None,
) -> Axes:
    """Draw one stacked bar per name, with its parts in the order of `colors`.

    Args:
        data: table with columns `name`, `part` and `share`. The shares of a name add up to one.
        colors: color of each part.
    """
    ax = plt.gca() if ax is None else ax
    names = list(dict.fromkeys(data["name"]))
    table = data.pivot_table(index="name", columns="part", values="share", aggfunc="sum")
    table = table.reindex(index=names, columns=list(colors)).fillna(0.0)
    left = pd.Series(0.0, index=names)
    for part, color in colors.items():
        ax.barh(range(len(names)), table[part], 0.74, left=left, color=color, label=part)
        left = left + table[part]
    ax.set_yticks(range(len(names)), [str(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: percent(x)))
    ax.set_xlabel(xlabel)
    ax.set_title(title, loc="left")
    return quiet(ax)
