"""Draw each group's share of the tensors and of the values as labeled bars."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import (
    FAINT,
    INK,
    TRACK,
    color_of,
    lighter,
    percent,
    short_count,
    text_size,
)

MOST = 8  #: maximum number of rows; further rows are summed into the last one
HEIGHT = 0.36  #: height of a bar, relative to the distance between rows


def plot_shares(data: pd.DataFrame, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw two bars per group: its share of all tensors and its share of all values.

    Unlike a pie chart, bars keep small shares readable and allow comparing two quantities.

    Args:
        data: table with columns `name`, `tensors` and `values`. Rows are drawn from top to bottom.
    """
    ax = plt.gca() if ax is None else ax
    rows = _fold(data)
    for position, row in enumerate(rows.to_dict("records")):
        color = color_of(str(row["name"]))
        for column, offset, fill, ink in (
            ("tensors", -HEIGHT / 2, color, INK),
            ("values", HEIGHT / 2, lighter(color, 0.5), FAINT),
        ):
            share = int(row[column]) / max(int(data[column].sum()), 1)
            y, thickness = position + offset, 0.86 * HEIGHT
            ax.barh(y, 1.0, thickness, color=TRACK)
            ax.barh(y, share, thickness, color=fill)
            _label(ax, 1.03, y, percent(share), ink)
            _label(ax, 1.24, y, f"{short_count(int(row[column]))} {column}", ink)
    ax.set_yticks(range(len(rows)), [str(name) for name in rows["name"]])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, 1.66)  # leave space for two columns of labels to the right of the bars
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)
    ax.set_title(title, loc="left")
    return ax


def _label(ax: Axes, x: float, y: float, text: str, ink: str) -> None:
    ax.text(x, y, text, va="center", color=ink, fontsize=text_size(9))


def _fold(data: pd.DataFrame) -> pd.DataFrame:
    """Return at most `MOST` rows of `data`; if it has more, the last row is the sum of the rest."""
    if len(data) <= MOST:
        return data
    head, rest = data.iloc[: MOST - 1], data.iloc[MOST - 1 :]
    other = {
        "name": f"{len(rest)} others",
        "tensors": rest["tensors"].sum(),
        "values": rest["values"].sum(),
    }
    return pd.concat([head, pd.DataFrame([other])], ignore_index=True)
