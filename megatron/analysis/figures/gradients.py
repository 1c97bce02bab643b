"""Draw the figures in `gradients/`: statistics of the gradients by layer, magnitude and format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.exponent_histograms import (
    RANGE_NOTE,
    bars_height,
    exponent_shares,
    format_ranges,
)
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    median_of,
    medians,
)
from megatron.analysis.figures.layer_analysis import statistics_by
from megatron.analysis.figures.sheet import legend, sheet
from megatron.analysis.plots.exponent_histogram import plot_exponent_histogram
from megatron.analysis.plots.lines import plot_lines
from megatron.analysis.plots.style import percent


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "by_layer" and "exponents" and, if possible, "underflow" and "iterations".

    "underflow" requires formats, and "iterations" requires gradients of several iterations.

    Raises:
        NothingToDrawError: the dump has no gradients.
    """
    gradients = figure_data.tensors[figure_data.tensors["kind"] == "gradient"]
    if gradients.empty:
        raise NothingToDrawError("no gradient was collected; collect backward operations too")
    by = partial(statistics_by, figure_data, gradients, group="tensor_name")
    yield "by_layer", partial(by, x="layer_idx", xlabel="layer", title="Gradients by layer")
    yield "exponents", partial(exponents, figure_data)
    if figure_data.formats:
        yield "underflow", partial(underflow, figure_data)
    if gradients["iteration"].nunique() > 1:
        title = "Gradients over training"
        yield "iterations", partial(by, x="iteration", xlabel="iteration", title=title)


def exponents(figure_data: FigureData) -> Figure:
    """Draw a histogram of gradient magnitudes, with the range of each format below it."""
    gradients = judged_gradients(figure_data)
    ranges = format_ranges(figure_data.formats, gradients)
    figure, axes = sheet(9.0, 5.2 + bars_height(ranges))
    plot_exponent_histogram(exponent_shares(figure_data, "gradient"), ranges, ax=axes[0])
    legend(figure, axes)
    note = f"{RANGE_NOTE}; {figure_data.origin_of(gradients)}"
    figure_data.headline(figure, "Gradients by magnitude, and the ranges of the formats", note)
    return figure


def underflow(figure_data: FigureData) -> Figure:
    """Draw the SQNR of gradients and the share of their values that become zero, by layer."""
    gradients = judged_gradients(figure_data)
    figure, axes = sheet(9.0, 4.4, 1, 2)
    for ax, column, label in zip(
        axes, ("underflow", "sqnr_db"), ("share that becomes zero", "SQNR (dB)"), strict=True
    ):
        data = medians(gradients, "quantized_format", "layer_idx", column)
        is_share = column == "underflow"
        plot_lines(data, xlabel="layer", ylabel=label, least=0.0 if is_share else 2.0, ax=ax)
        if is_share:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    legend(figure, axes)
    note = median_of(gradients, ["quantized_format", "layer_idx"], "point")
    title = "Gradients in each format, by layer"
    figure_data.headline(figure, title, f"{note}; {figure_data.origin_of(gradients)}")
    return figure


def judged_gradients(figure_data: FigureData) -> pd.DataFrame:
    """Return the rows of `FigureData.judged` (quantization errors) that belong to gradients.

    Raises:
        NothingToDrawError: no quantization error of a gradient is known.
    """
    gradients = figure_data.judged[figure_data.judged["kind"] == "gradient"]
    if gradients.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    return gradients
