"""Draw how often each code of a format occurs, in the order of the represented numbers."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import (
    ALARM,
    color_of,
    guide,
    percent,
    power,
    quiet,
    right_of_title,
    text_size,
)


def plot_code_usage(
    data: pd.DataFrame, *, title: str = "", scaled: bool = True, ax: Axes | None = None
) -> Axes:
    """Draw one bar per code, sorted by the represented number, and mark unused codes in red.

    Args:
        data: table with columns `format` (the same in all rows), `value` (in ascending order, with
            -0 before 0) and `count`.
        scaled: whether the format multiplies the numbers by a scale.
    """
    ax = plt.gca() if ax is None else ax
    counts = data["count"].to_numpy(dtype=float)
    shares = counts / max(counts.sum(), 1.0)
    x = np.arange(len(shares))
    color = color_of(data["format"].iloc[0])
    if len(x) > 64:  # the bars touch, so one outline replaces them and is drawn much faster
        ax.stairs(shares, np.arange(len(x) + 1) - 0.5, fill=True, color=color)
    else:
        ax.bar(x, shares, width=0.85, color=color)
    unused = x[counts == 0]
    if len(unused):
        ax.plot(
            unused,
            np.full(len(unused), 0.015),
            "|",
            color=ALARM,
            markersize=5,
            transform=ax.get_xaxis_transform(),
            label="never used",
        )
    every = 1 if len(x) <= 16 else len(x) // 8
    ticks = [*range(0, len(x), every)]
    values = data["value"].to_numpy(dtype=float)
    ax.set_xticks(ticks, [_number(values[i]) for i in ticks])
    plt.setp(ax.get_xticklabels(), fontsize=text_size(8))
    ax.set_xlim(-0.8, len(x) - 0.2)
    ax.set_ylim(0, 1.08 * max(float(shares.max()), 1e-9))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    guide(ax)
    of_scale = " (before the scale)" if scaled else ""
    ax.set(xlabel=f"number that the code stands for{of_scale}", ylabel="share of values")
    ax.set_title(title, loc="left")
    right_of_title(ax, f"{int((counts > 0).sum())} of {len(counts)} codes used")
    return quiet(ax)


def _number(value: float) -> str:
    if value == 0:
        return "-0" if np.signbit(value) else "0"
    mantissa, exponent = np.frexp(abs(value))
    sign = "-" if value < 0 else ""
    if 0.01 <= abs(value) < 10000:
        return f"{value:.4g}"
    factor = "" if mantissa == 0.5 else f"{2 * mantissa:.3g}·"
    return f"{sign}{factor}{power(2, exponent - 1)}"
