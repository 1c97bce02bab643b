"""Draw the block scales of a tensor as an image; each pixel row shows one row of the tensor."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from megatron.analysis.plots.style import TRACK, power, text_size


def plot_block_map(
    data: pd.DataFrame,
    *,
    rows: str,
    columns: str,
    title: str = "",
    powers: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw one pixel per block, colored by the block's scale.

    Args:
        data: base-2 logarithms of the scales. The index is the row number, and a column's name is
            the position of the block's first value. NaN (a block of zeros, or without a scale) is
            gray.
        rows: label of the y-axis.
        columns: label of the x-axis.
        powers: if True, label the color bar with powers of two; otherwise, with scales that occur.
    """
    ax = plt.gca() if ax is None else ax
    colors = plt.get_cmap("magma").with_extremes(bad=TRACK)
    image = ax.imshow(
        data.to_numpy(dtype=float), cmap=colors, aspect="auto", interpolation="nearest"
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.015, fraction=0.05)
    if powers:
        bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda e, _: power(2, round(e))))
    else:
        ticks = scale_ticks(data.to_numpy(dtype=float))
        bar.set_ticks([tick for tick, _ in ticks], labels=[name for _, name in ticks])
        bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    for axis, names in ((ax.yaxis, data.index), (ax.xaxis, data.columns)):
        numbers = [int(name) for name in names]
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set_major_formatter(FuncFormatter(_named(numbers)))
    ax.set(xlabel=columns, ylabel=rows)
    ax.set_title(title, loc="left", fontsize=text_size(9))
    return ax


def scale_ticks(logarithms: NDArray[np.float64], most: int = 6) -> list[tuple[float, str]]:
    """Return the positions and labels of at most `most` ticks of the color bar.

    The ticks are scales that occur, spread about evenly over the color bar.
    """
    scales = np.unique(logarithms[np.isfinite(logarithms)])
    if not len(scales):
        return []
    even = np.linspace(scales[0], scales[-1], most)
    nearest = np.unique([np.abs(scales - position).argmin() for position in even])
    return [(float(scales[i]), f"{2 ** scales[i]:.3g}") for i in nearest]


def _named(numbers: list[int]):  # type: ignore[no-untyped-def]
    """Return a tick formatter that labels the pixel at index `i` with `numbers[i]`."""
    return lambda x, _: str(numbers[int(x)]) if 0 <= x < len(numbers) and x == int(x) else ""
