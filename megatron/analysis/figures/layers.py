"""layer_analysis/ and gradients/: statistics of the values by layer and iteration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.distributions import REACH, exponent_shares
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    legend,
    median_of,
    medians,
    sheet,
)
from megatron.analysis.figures.ranges import format_ranges
from megatron.analysis.plots import plot_exponent_histogram, plot_lines
from megatron.analysis.plots.style import percent

STATISTICS = (("rms", "root mean square"), ("amax", "largest magnitude"), ("kurtosis", "kurtosis"))


def draw_layers(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """activations, weights, and iterations where there are several."""
    if figure_data.tensors.empty:
        raise NothingToDrawError("no tensor could be read")
    for kind, name in (("forward", "activations"), ("weight", "weights")):
        mine = figure_data.tensors[figure_data.tensors["kind"] == kind]
        if not mine.empty:
            group = "tensor_name" if kind == "forward" else "part"
            title = f"{name.title()} by layer"
            yield name, partial(by, mine, "layer_idx", "layer", group, title, figure_data)
    if figure_data.tensors["iteration"].nunique() > 1:
        title = "Values over training"
        yield (
            "iterations",
            partial(
                by, figure_data.tensors, "iteration", "iteration", "tensor_name", title, figure_data
            ),
        )


def draw_gradients(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """by_layer, exponents, underflow, and iterations where there are several."""
    mine = figure_data.tensors[figure_data.tensors["kind"] == "gradient"]
    if mine.empty:
        raise NothingToDrawError("no gradient was collected; collect backward operations too")
    title = "Gradients by layer"
    yield "by_layer", partial(by, mine, "layer_idx", "layer", "tensor_name", title, figure_data)
    yield "exponents", partial(exponents, figure_data)
    if figure_data.formats:
        yield "underflow", partial(underflow, figure_data)
    if mine["iteration"].nunique() > 1:
        title = "Gradients over training"
        make = partial(by, mine, "iteration", "iteration", "tensor_name", title, figure_data)
        yield "iterations", make


def by(
    table: pd.DataFrame, x: str, xlabel: str, group: str, title: str, figure_data: FigureData
) -> Figure:
    """Three statistics side by side, a line a group."""
    figure, axes = sheet(13.5, 4.4, 1, len(STATISTICS))
    for ax, (column, label) in zip(axes, STATISTICS, strict=True):
        data = medians(table, group, x, column)
        plot_lines(data, xlabel=xlabel, ylabel=label, logarithmic=True, ax=ax)
    legend(figure, axes)
    note = f"{median_of(table, [group, x], 'point')}; {len(table):,} of {figure_data.origin}"
    figure_data.headline(figure, title, note)
    return figure


def exponents(figure_data: FigureData) -> Figure:
    """Gradients by magnitude."""
    mine = figure_data.judged[figure_data.judged["kind"] == "gradient"]
    if mine.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    figure, axes = sheet(9.0, 5.2)
    ranges = format_ranges(figure_data.formats, mine)
    plot_exponent_histogram(exponent_shares(figure_data, "gradient"), ranges, ax=axes[0])
    legend(figure, axes)
    note = f"{REACH}; {figure_data.judged_origin}"
    figure_data.headline(figure, "Gradients by magnitude, and what the formats reach", note)
    return figure


def underflow(figure_data: FigureData) -> Figure:
    """What becomes zero, by layer."""
    mine = figure_data.judged[figure_data.judged["kind"] == "gradient"]
    if mine.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    figure, axes = sheet(9.0, 4.4, 1, 2)
    for ax, column, label in zip(
        axes, ("underflow", "sqnr_db"), ("share that becomes zero", "SQNR (dB)"), strict=True
    ):
        data = medians(mine, "quantized_format", "layer_idx", column)
        of_share = column == "underflow"
        plot_lines(data, xlabel="layer", ylabel=label, least=0.0 if of_share else 2.0, ax=ax)
        if of_share:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    legend(figure, axes)
    note = median_of(mine, ["quantized_format", "layer_idx"], "point")
    title = "Gradients in each format, by layer"
    figure_data.headline(figure, title, f"{note}; {figure_data.judged_origin}")
    return figure
