"""Draw the relative error of formats by the magnitude of the values."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from megatron.analysis.plots.style import color_of, guide, nothing, percent, powers_of_two, quiet


def plot_error_by_magnitude(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the mean relative error of the values in each binade, one step line per format.

    Args:
        data: table with columns `format`, `exponent` and `relative_error`. The exponents have no
            gaps; the error of a binade without values is NaN.
    """
    ax = plt.gca() if ax is None else ax
    if not data["relative_error"].notna().any():
        return nothing(ax, title)
    for name, part in data.groupby("format", sort=False):
        exponents = part["exponent"].tolist()
        ax.stairs(
            part["relative_error"],
            [*exponents, exponents[-1] + 1],
            baseline=None,
            color=color_of(str(name)),
            linewidth=1.5,
            label=str(name),
        )
    positive = data["relative_error"][data["relative_error"] > 0]
    # If no error is positive, all values are exact, and the limits of the y-axis do not matter.
    low, high = (positive.min(), positive.max()) if len(positive) else (0.01, 1.0)
    ax.set_ylim(0.7 * float(low), 1.5 * float(high))
    ax.set_yscale("log")
    ax.set_xlim(data["exponent"].min(), data["exponent"].max() + 1)
    powers_of_two(ax.xaxis)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    guide(ax, "both")
    ax.set(xlabel="magnitude", ylabel="mean |error| / |value|")
    ax.set_title(title, loc="left")
    return quiet(ax)
