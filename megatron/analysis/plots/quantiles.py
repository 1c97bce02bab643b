"""Draw a Q-Q plot: quantiles of the values against quantiles of a normal distribution."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import FAINT, color_of, guide, nothing, quiet

LINEAR = 10.0  #: end of the linear part of the y-axis, in standard deviations
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))


def plot_quantiles(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one line per group, and a dotted diagonal on which normally distributed values lie.

    Groups with heavy tails leave the diagonal near its ends.

    Args:
        data: table with columns `group`, `normal` and `value`. The last two are quantiles, in
            standard deviations.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    ends = (float(data["normal"].min()), float(data["normal"].max()))
    ax.plot(ends, ends, color=FAINT, linewidth=1, linestyle=":", label="normal", zorder=1)
    drawn: dict[str, int] = {}  # number of lines in each color, to vary the dashes
    for name, part in data.groupby("group", sort=False):
        color = color_of(str(name).rpartition(" ")[2])
        dashes = DASHES[drawn.get(color, 0) % len(DASHES)]
        drawn[color] = drawn.get(color, 0) + 1
        ax.plot(
            part["normal"],
            part["value"],
            color=color,
            linestyle=dashes,
            linewidth=1.3,
            label=str(name),
        )
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    ax.set_yticks([-100, -30, -10, -5, 0, 5, 10, 30, 100])
    ax.set_yticks([], minor=True)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    reach = max(1.2 * float(data["value"].abs().max()), 6.0)
    ax.set_ylim(-reach, reach)
    ax.set_xlim(*ends)
    guide(ax, "both")
    ax.set(xlabel="quantile of a normal distribution (std)", ylabel="quantile of the values (std)")
    ax.set_title(title, loc="left")
    return quiet(ax)
