"""Draw a histogram of values around zero, with a logarithmic axis for the counts."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import FAINT, color_of, decades, lighter, quiet, right_of_title

ALL = "all values"  #: name of the group that is drawn filled, behind the other groups


def plot_value_histogram(
    data: pd.DataFrame, *, title: str = "", note: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one outline per group over the filled histogram of all values.

    Args:
        data: table with columns `group`, `label` (name in the legend), `left`, `right` and `count`,
            one row per bin. The bins are in ascending order and the same for every group. The group
            `all values` is filled.
        note: text about values that the histogram does not show.
    """
    ax = plt.gca() if ax is None else ax
    for name, part in data.groupby("group", sort=False):
        edges = [*part["left"], part["right"].iloc[-1]]
        label = str(part["label"].iloc[0])
        if name == ALL:
            ax.stairs(
                part["count"], edges, fill=True, color=lighter(FAINT, 0.8), label=label, zorder=1
            )
        else:
            ax.stairs(
                part["count"],
                edges,
                color=color_of(str(name)),
                linewidth=1.5,
                label=label,
                zorder=3,
            )
    # The axis begins below 1, so that a bin with a single value is visible. The limits are set
    # before the scale, because Matplotlib warns if an axis without data becomes logarithmic.
    ax.set_ylim(0.7, 4.0 * max(float(data["count"].max()), 1.0))
    ax.set_yscale("log")
    decades(ax.yaxis)
    ax.set_xlim(data["left"].min(), data["right"].max())
    ax.set(xlabel="value", ylabel="values in a bin")
    ax.set_title(title, loc="left")
    ax.legend(loc="upper left", handlelength=1.4, borderaxespad=0.2)
    if note:
        right_of_title(ax, note)
    return quiet(ax)
