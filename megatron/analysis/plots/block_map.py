"""The scales of a tensor's blocks as an image: tokens (or output units) down, blocks across."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron.analysis.plots.style import TRACK, power


def plot_block_map(
    data: pd.DataFrame, *, rows: str, columns: str, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw a pixel a block.

    Args:
        data: exponents of the scales; its index numbers the rows and its columns the first value of
            each block. NaN (a block of zeros, or without a scale) is grey.
        rows, columns: what these are.
    """
    ax = plt.gca() if ax is None else ax
    colours = plt.get_cmap("magma").with_extremes(bad=TRACK)
    image = ax.imshow(
        data.to_numpy(dtype=float), cmap=colours, aspect="auto", interpolation="nearest"
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.015, fraction=0.05)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda e, _: power(2, round(e))))
    bar.outline.set_visible(False)
    for axis, names in ((ax.yaxis, data.index), (ax.xaxis, data.columns)):
        numbers = [int(name) for name in names]
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set_major_formatter(FuncFormatter(_named(numbers)))
    ax.set(xlabel=columns, ylabel=rows)
    ax.set_title(title, loc="left", fontsize=9)
    return ax


def _named(numbers: list[int]):  # type: ignore[no-untyped-def]
    """Ticks say the number of the row or value, not of the pixel."""
    return lambda x, _: str(numbers[int(x)]) if 0 <= x < len(numbers) and x == int(x) else ""
