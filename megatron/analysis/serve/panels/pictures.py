"""Draw a tensor, or the attention of a head, as an image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.plots.attention_map import EXTREME
from megatron.analysis.serve import charts
from megatron.analysis.serve.address import DIFFERENCE, ERRORS, MAGNITUDES
from megatron.analysis.serve.charts import Figure, array, axis, color_bar, layout
from megatron.analysis.serve.contents import Attention, NotShownError, head_numbers
from megatron.analysis.serve.panels.subject import Shown, Subject
from megatron.analysis.serve.pixels import WIDTH, Image, Region, reduce


def image(subject: Subject) -> Shown:
    """Draw an image of the tensor, its magnitudes, its error, or a second tensor minus this one."""
    address, catalog = subject.address, subject.catalog
    table, _ = subject.contents.view(catalog, subject.tensor)
    region = Region.within(table.shape[0], table.shape[1], address.region)
    fmt = address.format
    if address.image == ERRORS:
        rounded = subject.contents.quantized(catalog, subject.tensor, fmt, subject.axis)
        picture = reduce(rounded, region, minus=table)
        title = f"error in {fmt}"
    elif address.image == DIFFERENCE:
        if subject.beside is None:
            raise NotShownError("choose a second tensor to see the difference")
        other, _ = subject.contents.view(catalog, subject.beside)
        if other.shape != table.shape:
            raise NotShownError(
                f"the second tensor has shape {list(other.shape)}, this one {list(table.shape)}"
            )
        picture, title = reduce(other, region, minus=table), "difference"
    else:
        picture, title = reduce(table, region), "value"
    figure = _image_figure(picture, title, subject.row_name, magnitudes=address.image == MAGNITUDES)
    step = picture.step
    if step == (1, 1):
        note = "Every pixel is one value."
    else:
        note = f"A pixel is the largest magnitude of {step[0]} x {step[1]} values. Drag to zoom in."
    rows, columns = table.shape
    note = f"{rows:,} x {columns:,} values. {note}"
    return Shown(figure, note, _image_table(picture))


def _image_table(picture: Image) -> pd.DataFrame:
    rows, columns = picture.values.shape
    return pd.DataFrame(
        picture.values,
        index=pd.Index(picture.region.top + np.arange(rows) * picture.step[0], name="row"),
        columns=picture.region.left + np.arange(columns) * picture.step[1],
    )


def _image_figure(picture: Image, title: str, row_name: str, *, magnitudes: bool) -> Figure:
    values = picture.values.astype(float)
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 1.0
    colors: dict[str, Any]
    if magnitudes:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log2(np.abs(values))
        shown[np.isneginf(shown)] = np.nan
        known = shown[np.isfinite(shown)]
        low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 0.0)
        low = max(low, high - 24)
        colors = {"zmin": low, "zmax": high, "colorscale": charts.MAGNITUDES}
        colors["colorbar"] = color_bar("magnitude", charts.power_ticks(low, high, 6))
    else:
        # Outliers saturate the colors, so that the other values can be told apart.
        limit = float(np.quantile(np.abs(finite), 0.999)) if finite.size else 1.0
        limit = limit or largest or 1.0
        shown = values
        colors = _around_zero(limit, color_bar(title))
    region = picture.region
    hover = "row %{y:.0f}, column %{x:.0f}: %{z:.4g}<extra></extra>"
    trace = _heat_map(picture, shown, hovertemplate=hover, **colors)
    if shown is not values:
        trace["customdata"] = array(values)
        trace["hovertemplate"] = hover.replace("z:", "customdata:")
    return {
        "data": [trace],
        "layout": layout(
            420,
            uirevision=f"{region}",
            xaxis=axis("channel", showgrid=False, range=[region.left - 0.5, region.right - 0.5]),
            yaxis=axis(row_name, showgrid=False, range=[region.bottom - 0.5, region.top - 0.5]),
        ),
    }


def attention(subject: Subject) -> Shown:
    """Draw the attention of a head compared with uniform attention, and its change in a format."""
    address = subject.address
    found = subject.contents.attention(
        subject.catalog, subject.tensor, address.format, address.head, address.sequence
    )
    relative = found.probabilities * found.visible.sum(-1, keepdim=True)
    region = Region.within(relative.shape[0], relative.shape[1])
    first = reduce(relative, region, width=WIDTH, height=WIDTH)
    visible = reduce(found.visible.float(), region, width=WIDTH, height=WIDTH).values > 0
    size, second = relative.shape[0], None
    if found.change is not None:
        change = reduce(found.change, region, width=WIDTH, height=WIDTH)
        second = _square(_change_trace(change, visible), size)
    figure = _square(_attention_trace(first, visible), size)
    return Shown(figure, _attention_note(found), _image_table(first), second)


def _square(trace: dict[str, Any], size: int) -> Figure:
    """Return a square figure of an image, with queries as rows and keys as columns."""
    return {
        "data": [trace],
        "layout": layout(
            400,
            xaxis=axis("key", showgrid=False),
            yaxis=axis("query", showgrid=False, range=[size - 0.5, -0.5]),
        ),
    }


def _attention_note(found: Attention) -> str:
    numbers = head_numbers(found)
    note = f"Mean entropy of a query: {numbers['entropy']:.2f} bits."
    if "sqnr" in numbers:
        sqnr = numbers["sqnr"]
        exact = "exact" if math.isinf(sqnr) else f"{sqnr:.1f} dB"
        note += f" SQNR of this head: {exact}, largest change {numbers['largest']:.3g}."
    note += f" {found.how}"
    return f"{note} First figure: probability times the number of visible keys; 1 is uniform."


def _attention_trace(picture: Image, visible: NDArray[np.bool_]) -> dict[str, Any]:
    values = picture.values.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(visible, np.log2(np.clip(values, 1 / EXTREME, EXTREME)), np.nan)
    limit = math.log2(EXTREME)
    ticks = {
        "tickvals": [-5, -3, -1, 0, 1, 3, 5],
        "ticktext": ["1/32", "1/8", "1/2", "1", "2", "8", "32"],
    }
    return _heat_map(
        picture,
        shown,
        customdata=array(values),
        hovertemplate="query %{y:.0f}, key %{x:.0f}: %{customdata:.3g}<extra></extra>",
        **_around_zero(limit, color_bar("times uniform", ticks)),
    )


def _change_trace(picture: Image, visible: NDArray[np.bool_]) -> dict[str, Any]:
    values = picture.values.astype(float)
    finite = np.abs(values[np.isfinite(values)])
    limit = (float(np.quantile(finite, 0.999)) if finite.size else 1.0) or 1e-12
    return _heat_map(
        picture,
        np.where(visible, values, np.nan),
        hovertemplate="query %{y:.0f}, key %{x:.0f}: %{z:.3g}<extra></extra>",
        **_around_zero(limit, color_bar("change of the probability")),
    )


def _heat_map(picture: Image, values: NDArray[Any], **more: Any) -> dict[str, Any]:
    """Return a heat map with one of `values` at the position of each pixel of `picture`."""
    return {
        "type": "heatmap",
        "z": array(values),
        "x0": picture.x0,
        "dx": picture.step[1],
        "y0": picture.y0,
        "dy": picture.step[0],
        "hoverongaps": False,
        **more,
    }


def _around_zero(limit: float, bar: dict[str, Any]) -> dict[str, Any]:
    """Return colors from `-limit` to `limit` with a color bar."""
    return {"zmin": -limit, "zmax": limit, "colorscale": charts.DIVERGING, "colorbar": bar}
