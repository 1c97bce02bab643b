"""Draw the figures in `heatmaps/`: one number per layer and tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    file_name,
    layer_name,
    median_of,
)
from megatron.analysis.figures.sheet import sheet
from megatron.analysis.judged import OPERANDS
from megatron.analysis.plots.heatmap import plot_heatmap


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "sqnr_<format>", "amax", "rms" and "kurtosis".

    Raises:
        NothingToDrawError: no tensor could be read.
    """
    if figure_data.tensors.empty:
        raise NothingToDrawError("no tensor could be read")
    norm = sqnr_norm(figure_data)
    for name in figure_data.formats:
        yield f"sqnr_{file_name(name)}", partial(layer_by_tensor_sqnr, figure_data, name, norm)
    for column, title, label in (
        ("amax", "Largest magnitude", "amax"),
        ("rms", "Root mean square", "rms"),
        ("kurtosis", "Kurtosis (3: normal)", "kurtosis"),
    ):
        yield column, partial(layer_by_tensor_value, figure_data, column, title, label)


def cells(table: pd.DataFrame, value: str, column: str, order: list[object]) -> pd.DataFrame:
    """Return a table for `plot_heatmap`: the medians of `value` by layer and `column`.

    Args:
        value: name of the column whose median is computed.
        column: name of the column whose values are the columns of the heatmap; its rows are layers.
        order: columns of the heatmap from left to right.
    """
    values = table.groupby(["layer_idx", column])[value].median()
    layers = sorted(table["layer_idx"].unique())
    index = pd.MultiIndex.from_product([layers, order], names=["layer", "column"])
    data = values.reindex(index).rename("value").reset_index()
    return data.assign(row=data["layer"].map(layer_name))


def sqnr_norm(figure_data: FigureData) -> Normalize:
    """Return the color scale of the SQNR, which is the same for the figures of all formats."""
    finite = figure_data.judged["sqnr_db"].replace([np.inf, -np.inf], np.nan).dropna()
    if finite.empty:
        return Normalize(0, 40)
    low, high = np.floor(finite.quantile(0.01)), np.ceil(finite.quantile(0.99))
    return Normalize(float(low), float(max(high, low + 1)))


def layer_by_tensor_sqnr(figure_data: FigureData, fmt: str, norm: Normalize) -> Figure:
    """Draw the SQNR of one format by layer and place (module and tensor name)."""
    uses = figure_data.judged[figure_data.judged["quantized_format"] == fmt]
    figure_data.kinds(uses)  # this call raises NothingToDrawError if there are no rows
    data = cells(uses, "sqnr_db", "place", list(figure_data.judged_places()))
    figure, axes = _sheet_for(data)
    plot_heatmap(data, label="SQNR (dB)", norm=norm, ax=axes[0])
    note = f"{median_of(uses, ['layer_idx', 'place'], 'cell')}; {figure_data.judged_origin}; "
    note += (
        "blocks run as in the first GEMM that takes the operand"
        if figure_data.judge == OPERANDS
        else "blocks run along the last dimension"
    )
    figure_data.headline(figure, f"{fmt}: signal to quantization noise", note)
    return figure


def layer_by_tensor_value(figure_data: FigureData, column: str, title: str, label: str) -> Figure:
    """Draw a statistic by layer and place (module and tensor name) on a logarithmic color scale."""
    data = cells(figure_data.tensors, column, "place", list(figure_data.places_apart))
    data = data.assign(column=data["column"].map(figure_data.label))
    positive = data["value"][data["value"] > 0]
    norm = (
        LogNorm(positive.min(), max(positive.max(), positive.min() * 2)) if len(positive) else None
    )
    figure, axes = _sheet_for(data)
    plot_heatmap(data, label=label, digits=".2g", cmap="cividis", norm=norm, ax=axes[0])
    note = median_of(figure_data.tensors, ["layer_idx", "place"], "cell")
    figure_data.headline(figure, title, f"{note}; {figure_data.origin}")
    return figure


def _sheet_for(data: pd.DataFrame) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes; the figure's size depends on the number of heatmap cells."""
    columns, rows = data["column"].nunique(), min(data["row"].nunique(), 60)
    width, height = max(7.0, 2.2 + 0.48 * columns), max(3.2, 2.3 + 0.32 * rows)
    return sheet(min(width, 26.0), min(height, 20.0), categories=True)
