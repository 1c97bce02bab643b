"""Draw the figures in `quantization_analysis/`: the errors of all formats on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.figure_data import (
    KINDS,
    FigureData,
    Make,
    NothingToDrawError,
    median_of,
    trimmed,
)
from megatron.analysis.figures.sheet import legend, share_y, sheet
from megatron.analysis.plots.dots import plot_dots
from megatron.analysis.plots.error_by_magnitude import plot_error_by_magnitude
from megatron.analysis.plots.style import percent


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures that show quantization errors by tensor and magnitude.

    They are "sqnr_by_tensor", "error_by_magnitude", "bias", "gain" and "row_against_column".

    Raises:
        NothingToDrawError: no format was requested.
    """
    if not figure_data.formats:
        raise NothingToDrawError("no format was requested; add one to --formats")
    by = partial(by_tensor, figure_data)
    yield (
        "sqnr_by_tensor",
        partial(by, "sqnr_db", xlabel="SQNR (dB)", title="SQNR of each tensor"),
    )
    yield "error_by_magnitude", partial(error_by_magnitude, figure_data)
    title = "Bias: mean error over mean magnitude (zero: errors cancel)"
    yield "bias", partial(by, "relative_bias", xlabel="mean error / mean magnitude", title=title)
    yield "gain", partial(gain, figure_data)
    title = "Values that differ between row-wise and column-wise blocks"
    yield (
        "row_against_column",
        partial(by, "axis_disagreement", xlabel="share of values", title=title, shares=True),
    )


def by_tensor(
    figure_data: FigureData, column: str, *, xlabel: str, title: str, shares: bool = False
) -> Figure:
    """Draw the median of an error metric as one dot per place and format.

    There is one row per place (module and tensor name).

    Args:
        column: column of `FigureData.judged` that holds the metric.
        xlabel: label of the x-axis.
        title: title of the figure.
        shares: if True, the values are shares, shown as percentages.
    """
    uses = figure_data.judged.dropna(subset=[column])
    if uses.empty:
        raise NothingToDrawError(
            "none of the formats has blocks that run along either axis"
            if column == "axis_disagreement" and not figure_data.judged.empty
            else figure_data.nothing_judged
        )
    order = [place for place in figure_data.places if place in set(uses["place"])]
    values = uses.groupby(["quantized_format", "place"], sort=False)[column].median()
    data = values.rename("value").reset_index()
    data = data.rename(columns={"quantized_format": "group", "place": "name"})
    data = data.assign(at=data["name"].map({place: i for i, place in enumerate(order)}))
    figure, axes = sheet(9.0, 0.32 * len(order) + 2.2, categories=True)
    data = data.sort_values("at", kind="stable")
    formats = pd.Categorical(data["group"], list(figure_data.formats))
    data = data.assign(group=formats.astype(str), rank=formats.codes)
    plot_dots(data.sort_values(["at", "rank"]), xlabel=xlabel, shares=shares, ax=axes[0])
    legend(figure, axes)
    note = median_of(uses, ["quantized_format", "place"], "dot")
    figure_data.headline(figure, title, f"{note}; {figure_data.judged_origin}")
    return figure


def gain(figure_data: FigureData) -> Figure:
    """Draw the gain of each format: by how much the format shrinks or enlarges the tensors."""
    title = "Gain: by how much rounding shrinks (below 0) or enlarges a tensor"
    xlabel = "Σxy / Σx² - 1 (y: the quantized x)"
    figure = by_tensor(figure_data, "gain", xlabel=xlabel, title=title)
    figure.axes[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: percent(x)))
    return figure


def magnitude_errors(figure_data: FigureData, kind: str) -> pd.DataFrame:
    """Return a table for `plot_error_by_magnitude`: the mean relative error per binade and format.

    The lowest binades, which together contain at most 0.1 % of the values, are left out.
    """
    places = figure_data.judged_places(kind)
    chosen = trimmed(figure_data.sums.binades_of(set(places)), 1e-3)
    frames = []
    for name in figure_data.formats:
        total = figure_data.summed(name, places)
        if total is None:
            continue
        values = total.values[chosen]
        error = np.where(values > 0, total.relative_error[chosen] / np.maximum(values, 1), np.nan)
        exponents = np.arange(255)[chosen] - 127
        frames.append(
            pd.DataFrame({"format": name, "exponent": exponents, "relative_error": error})
        )
    columns = ["format", "exponent", "relative_error"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def error_by_magnitude(figure_data: FigureData) -> Figure:
    """Draw the relative error of each format by magnitude, one panel per kind of tensor."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.6 * len(kinds), 4.4, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        plot_error_by_magnitude(magnitude_errors(figure_data, kind), title=KINDS[kind], ax=ax)
    share_y(axes)
    legend(figure, axes)
    note = "100 %: the value becomes zero; the lowest 0.1 % of the values are left out; "
    figure_data.headline(figure, "Relative error by magnitude", note + figure_data.judged_origin)
    return figure
