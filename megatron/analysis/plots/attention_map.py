"""Draw one head's attention as an image."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from megatron.analysis.plots.style import RULE, text_size

EXTREME = 32.0  #: end of the color scale; it reaches from 1 / EXTREME to EXTREME


def plot_attention_map(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one pixel per pair of query (y-axis) and key (x-axis); masked pairs are gray.

    Args:
        data: probabilities divided by those of uniform attention over the visible keys, with the
            positions of queries as index and of keys as columns. Masked pairs are NaN; a
            probability of zero is drawn as the end of the color scale.
    """
    ax = plt.gca() if ax is None else ax
    values = data.to_numpy(dtype=float)
    shown = np.ma.masked_where(np.isnan(values), np.clip(values, 1 / EXTREME, EXTREME))
    colors = plt.get_cmap("RdBu_r").with_extremes(bad=RULE)
    at = [*data.columns], [*data.index]
    extent = (at[0][0] - 0.5, at[0][-1] + 0.5, at[1][-1] + 0.5, at[1][0] - 0.5)
    norm = LogNorm(1 / EXTREME, EXTREME)
    ax.imshow(shown, cmap=colors, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(title, loc="left", fontsize=text_size(9))
    return ax
