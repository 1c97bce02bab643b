"""How many values lie in each octave of magnitude: where a format's exponent range would have to
be.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron.analysis.plots.style import (
    FILL,
    RULE,
    colour_of,
    power,
    quiet,
    right_of_title,
    short_count,
)


def plot_magnitude_histogram(
    data: pd.DataFrame, *, title: str = "", note: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one outline a group, lightly filled, over the exponents of two.

    Args:
        data: columns `group`, `exponent`, `count`: how many values of the group have a magnitude
            from 2**exponent up to below 2**(exponent + 1); exponents without gaps, the same for
            every group.
        note: about what the picture does not show.
    """
    ax = plt.gca() if ax is None else ax
    crowd = data["group"].nunique()
    for name, part in data.groupby("group", sort=False):
        exponents = part["exponent"].tolist()
        edges = [*exponents, exponents[-1] + 1]
        colour = colour_of(str(name))
        if crowd <= 2:  # more fills over each other would mix into a colour of nothing
            ax.stairs(part["count"], edges, fill=True, color=colour, alpha=FILL)
        ax.stairs(part["count"], edges, color=colour, linewidth=1.5, label=str(name))
    ax.set_xlim(data["exponent"].min(), data["exponent"].max() + 1)
    ax.set_ylim(0, 1.08 * max(float(data["count"].max()), 1.0))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: power(2, round(x))))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short_count(y)))
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set(xlabel="magnitude", ylabel="values in an octave")
    ax.set_title(title, loc="left")
    if note:
        right_of_title(ax, note)
    return quiet(ax)
