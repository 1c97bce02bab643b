"""Draw a heatmap over two categories, such as layer and tensor, or layer and iteration."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize

from megatron.analysis.plots.style import FAINT, INK, TRACK, decades, nothing, text_size
from megatron.analysis.plots.text import brief

LETTER = 0.62  #: width of a digit and its margin, as a fraction of the font size
LEGIBLE = 4.5  #: smallest font size of the values in the cells, in points
MAP = 0.65  #: approximate width of the cells together, as a fraction of the width for the axes
MOST_NUMBERS = 700  #: values are written into the cells of heatmaps with at most this many cells


def plot_heatmap(
    data: pd.DataFrame,
    *,
    label: str,
    title: str = "",
    digits: str = ".1f",
    cmap: str = "viridis",
    norm: Normalize | None = None,
    bar: bool = True,
    numbers: bool = True,
    longest: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw one cell per row of `data`, colored by the value and labeled with it if space allows.

    Args:
        data: table with columns `row`, `column` and `value`. Rows and columns are drawn in the
            order of their first appearance. A cell is gray if it is missing or NaN; infinity has
            the color of the largest value.
        label: label of the color bar: the quantity and its unit.
        digits: format specification of the labels, such as ".1f".
        cmap: name of the colormap.
        norm: normalization of the colors; None adapts it to the finite values.
        bar: whether to draw a color bar.
        numbers: whether to write the values into the cells, unless there are too many cells.
        longest: maximum length of a column's name; a longer name is shortened.

    Raises:
        ValueError: a cell has more than one value.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    if (twice := data.duplicated(["row", "column"])).any():
        row, column = data.loc[twice, ["row", "column"]].iloc[0]
        raise ValueError(
            f"{int(twice.sum())} rows repeat a cell, such as {row!r}, {column!r}; give one row "
            "per cell, as groupby(['row', 'column']).median() does"
        )
    rows, columns = list(dict.fromkeys(data["row"])), list(dict.fromkeys(data["column"]))
    cells = np.full((len(rows), len(columns)), np.nan)
    place = {name: i for i, name in enumerate(rows)}, {name: i for i, name in enumerate(columns)}
    for row, column, value in data[["row", "column", "value"]].itertuples(index=False):
        cells[place[0][row], place[1][column]] = value
    finite = cells[np.isfinite(cells)]
    if norm is None:
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        norm = Normalize(low, high if high > low else low + 1)
    colors = plt.get_cmap(cmap).with_extremes(bad=TRACK)
    shown = np.ma.masked_invalid(np.where(cells == np.inf, norm.vmax or 1.0, cells))
    mesh = ax.pcolormesh(shown, cmap=colors, norm=norm, edgecolors="white", linewidth=0.6)
    ax.invert_yaxis()
    names = columns if longest is None else [brief(str(name), longest) for name in columns]
    _label_cells(ax, rows, names)
    if numbers and cells.size <= MOST_NUMBERS:
        _write(ax, cells, digits, lambda value: colors(norm(value)))
    if bar:
        _add_bar(ax, mesh, label)
    ax.spines[:].set_visible(False)
    ax.set_title(title, loc="left")
    return ax


def _add_bar(ax: Axes, mesh: QuadMesh, label: str) -> None:
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.012, fraction=0.03, aspect=25)
    bar.set_label(label)
    if isinstance(mesh.norm, LogNorm):
        decades(bar.ax.yaxis)
    bar.outline.set_visible(False)


def _label_cells(ax: Axes, rows: list[object], columns: list[object]) -> None:
    """Label the rows and columns of the heatmap, or only some of them if there are many."""
    for names, setter, most in ((rows, ax.set_yticks, 40), (columns, ax.set_xticks, 60)):
        every = math.ceil(len(names) / most)
        chosen = range(0, len(names), every)
        setter([i + 0.5 for i in chosen], [str(names[i]) for i in chosen])
    ax.tick_params(length=0)
    if max((len(str(name)) for name in columns), default=0) > 4:
        plt.setp(ax.get_xticklabels(), rotation=40, ha="right", rotation_mode="anchor")


def _cell_width(ax: Axes, cells: np.ndarray) -> float:
    """Return the approximate width of a cell in points."""
    place, figure = ax.get_subplotspec(), ax.figure.figure
    assert figure is not None
    side_by_side = 1 if place is None else place.get_gridspec().ncols
    return float(72 * MAP * figure.get_figwidth() / side_by_side / cells.shape[1])


def _write(ax: Axes, cells: np.ndarray, digits: str, color: object) -> None:
    """Write the values into the cells, unless the cells are too narrow for legible text."""
    texts = np.array(["exact" if x == np.inf else f"{x:{digits}}" for x in cells.flat])
    texts = texts.reshape(cells.shape)
    longest = max(map(len, texts[~np.isnan(cells)]), default=1)
    size = min(
        text_size(8 if cells.shape[1] <= 30 else 6), _cell_width(ax, cells) / longest / LETTER
    )
    if size < LEGIBLE:
        return
    for (i, j), value in np.ndenumerate(cells):
        if np.isnan(value):
            ax.text(j + 0.5, i + 0.5, "-", ha="center", va="center", color=FAINT, fontsize=size)
            continue
        text = texts[i, j]
        red, green, blue, _ = color(min(value, 1e300))  # type: ignore[operator]
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ink = "white" if dark else INK
        ax.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=ink, fontsize=size)
