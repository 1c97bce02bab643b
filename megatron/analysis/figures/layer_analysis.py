"""Draw the figures in `layer_analysis/`: statistics of the tensors by layer and iteration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    median_of,
    medians,
)
from megatron.analysis.figures.sheet import legend, sheet
from megatron.analysis.plots.lines import plot_lines

STATISTICS = (("rms", "root mean square"), ("amax", "largest magnitude"), ("kurtosis", "kurtosis"))


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "activations", "weights" and, for several iterations, "iterations".

    A kind of tensor that the dump lacks has no figure.

    Raises:
        NothingToDrawError: no tensor could be read.
    """
    table = figure_data.tensors
    if table.empty:
        raise NothingToDrawError("no tensor could be read")
    by = partial(statistics_by, figure_data)
    for kind, name, group in (
        ("forward", "activations", "tensor_name"),
        ("weight", "weights", "part"),
    ):
        rows = table[table["kind"] == kind]
        if not rows.empty:
            title = f"{name.title()} by layer"
            yield name, partial(by, rows, group=group, x="layer_idx", xlabel="layer", title=title)
    if table["iteration"].nunique() > 1:
        over_training = partial(by, table, group="tensor_name", x="iteration", xlabel="iteration")
        yield "iterations", partial(over_training, title="Values over training")


def statistics_by(
    figure_data: FigureData, table: pd.DataFrame, *, x: str, xlabel: str, group: str, title: str
) -> Figure:
    """Draw one panel for each of the `STATISTICS`, with one line per group of tensors.

    Args:
        table: rows of `FigureData.tensors`.
        x: name of the column on the x-axis.
        xlabel: label of the x-axis.
        group: name of the column with the groups.
        title: title of the figure.
    """
    figure, axes = sheet(13.5, 4.4, 1, len(STATISTICS))
    for ax, (column, label) in zip(axes, STATISTICS, strict=True):
        data = medians(table, group, x, column)
        plot_lines(data, xlabel=xlabel, ylabel=label, logarithmic=True, ax=ax)
    legend(figure, axes)
    note = f"{median_of(table, [group, x], 'point')}; {len(table):,} of {figure_data.origin}"
    figure_data.headline(figure, title, note)
    return figure
