"""Draw one head's attention probabilities as an image."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from megatron.analysis.plots.style import TRACK, text_size

LOWEST = 1e-4  #: lowest probability on the color scale; smaller probabilities have the same color


def plot_attention_map(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one pixel per pair of query (y-axis) and key (x-axis); masked pairs are gray.

    Args:
        data: probabilities, with the positions of queries as index and of keys as columns. Masked
            pairs have the probability 0.
    """
    ax = plt.gca() if ax is None else ax
    values = data.to_numpy(dtype=float)
    shown = np.ma.masked_where(values <= 0, np.maximum(values, LOWEST))
    colors = plt.get_cmap("viridis").with_extremes(bad=TRACK)
    at = [*data.columns], [*data.index]
    extent = (at[0][0] - 0.5, at[0][-1] + 0.5, at[1][-1] + 0.5, at[1][0] - 0.5)
    norm = LogNorm(LOWEST, 1.0)
    ax.imshow(shown, cmap=colors, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(title, loc="left", fontsize=text_size(9))
    return ax
