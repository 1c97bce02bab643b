"""Draw the figures in `overflow_analysis/`: values lost at both ends of a format's range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import (
    KINDS,
    FigureData,
    Make,
    NothingToDrawError,
    trimmed,
)
from megatron.analysis.figures.quantization_analysis import by_tensor
from megatron.analysis.figures.sheet import label_edges, legend, sheet, shown
from megatron.analysis.plots.error_by_magnitude import plot_error_by_magnitude
from megatron.analysis.plots.heatmap import plot_heatmap
from megatron.analysis.plots.stacked_shares import plot_stacked_shares
from megatron.analysis.plots.style import percent

#: Name and color of each cause of the squared error. The keys are the columns of
#: `FigureData.judged` that hold the shares of the causes.
CAUSES = {
    "grid_error": ("grid", "#c3ccd6"),
    "underflow_error": ("underflow", "#e0a458"),
    "clipping_error": ("clipping", "#7a1f4b"),
}


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures on underflow, saturation, causes of the error, and NaN and Inf values.

    They are "underflow", "saturation", "error_causes", "underflow_by_magnitude" and
    "special_values".

    Raises:
        NothingToDrawError: no format was requested.
    """
    if not figure_data.formats:
        raise NothingToDrawError("no format was requested; add one to --formats")
    for name, column, label, title in (
        (
            "underflow",
            "underflow",
            "share of nonzero values",
            "Underflow: values that are not zero and become zero",
        ),
        (
            "saturation",
            "saturated",
            "share of values",
            "Saturation: values beyond the overflow threshold",
        ),
    ):
        yield (
            name,
            partial(by_tensor, figure_data, column, xlabel=label, title=title, shares=True),
        )
    yield "error_causes", partial(error_causes, figure_data)
    yield "underflow_by_magnitude", partial(underflow_by_magnitude, figure_data)
    yield "special_values", partial(special_values, figure_data)


def error_causes(figure_data: FigureData) -> Figure:
    """Draw each cause's share of the squared error, by place (module and tensor name).

    The causes are the grid (rounding to a neighboring number), clipping and underflow. There is one
    panel per format that causes errors.
    """
    if figure_data.judged.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    uses = figure_data.judged.dropna(subset=list(CAUSES))
    formats = [name for name in figure_data.formats if (uses["quantized_format"] == name).any()]
    if not formats:
        raise NothingToDrawError("no format changes a value")
    places = [place for place in figure_data.places if (uses["place"] == place).any()]
    columns = 2 if len(formats) == 4 else min(3, len(formats))
    rows = -(-len(formats) // columns)
    figure, axes = sheet(
        4.6 * columns, (0.3 * len(places) + 1.1) * rows + 1, rows, columns, categories=True
    )
    axes = shown(axes, len(formats))
    for ax, name in zip(axes, formats, strict=True):
        part = uses[uses["quantized_format"] == name]
        data, colors = cause_shares(part, places), dict(CAUSES.values())
        title = f"{name}, median SQNR {part['sqnr_db'].median():.1f} dB"
        plot_stacked_shares(data, colors, title=title, xlabel="share of the squared error", ax=ax)
    label_edges(axes, y_ticks=True)
    legend(figure, axes)
    note = "a bar is the mean of its tensors; grid: rounding to a neighboring number; "
    figure_data.headline(figure, "Causes of the squared error", note + figure_data.judged_origin)
    return figure


def cause_shares(uses: pd.DataFrame, places: list[str]) -> pd.DataFrame:
    """Return a table for `plot_stacked_shares` with the mean of each cause's share of the error.

    Args:
        uses: rows of `FigureData.judged` for one format.
        places: module and tensor names, in the order of the bars.
    """
    means = uses.groupby("place", sort=False)[list(CAUSES)].mean().reindex(places)
    words = {column: word for column, (word, _) in CAUSES.items()}
    return (
        means.rename(columns=words)
        .rename_axis("name")
        .reset_index()
        .melt("name", var_name="part", value_name="share")
    )


def underflow_by_magnitude(figure_data: FigureData) -> Figure:
    """Draw, for each binade, the share of values that become zero; one panel per kind of tensor."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.6 * len(kinds), 4.2, 1, len(kinds), sharey=True)
    for ax, kind in zip(axes, kinds, strict=True):
        places = figure_data.judged_places(kind)
        chosen = trimmed(figure_data.sums.binades_of(set(places)))
        frames = []
        for name in figure_data.formats:
            total = figure_data.summed(name, places)
            if total is not None:
                values, lost = total.values[chosen], total.underflow[chosen]
                share = np.where(values > 0, lost / np.maximum(values, 1), np.nan)
                exponents = np.arange(255)[chosen] - 127
                frames.append(
                    pd.DataFrame({"format": name, "exponent": exponents, "relative_error": share})
                )
        plot_error_by_magnitude(pd.concat(frames), title=KINDS[kind], ax=ax)
        ax.set_yscale("linear")
        ax.set_ylim(-0.02, 1.05)
        ax.set_ylabel("share of values that become zero")
        ax.yaxis.set_major_formatter(lambda y, _: percent(y))
    label_edges(axes)
    legend(figure, axes)
    figure_data.headline(figure, "Underflow by magnitude", figure_data.judged_origin)
    return figure


def special_values(figure_data: FigureData) -> Figure:
    """Draw the number of NaN and Inf values by layer and place (module and tensor name)."""
    table = figure_data.tensors.assign(
        count=figure_data.tensors["nan"] + figure_data.tensors["inf"]
    )
    counts = table.groupby(["layer_idx", "place"])["count"].sum().reset_index()
    counts = counts[counts["count"] > 0]
    if counts.empty:
        raise NothingToDrawError("every value is finite")
    data = counts.rename(columns={"layer_idx": "row", "place": "column", "count": "value"})
    figure, axes = sheet(max(6.0, 2 + 0.5 * data["column"].nunique()), 4.0)
    plot_heatmap(data, label="NaN and Inf values", digits=".0f", cmap="Reds", ax=axes[0])
    axes[0].set_ylabel("layer")
    figure_data.headline(figure, "NaN and Inf", figure_data.origin)
    return figure
