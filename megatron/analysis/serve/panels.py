"""Draw the panels of a tensor: each function returns a figure, a note and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.figures.exponent_histograms import format_ranges
from megatron.analysis.figures.figure_data import trimmed
from megatron.analysis.plots.attention_map import EXTREME
from megatron.analysis.plots.block_map import scale_ticks
from megatron.analysis.plots.style import ALARM, color_of, power
from megatron.analysis.serve import charts
from megatron.analysis.serve.address import DIFFERENCE, ERRORS, MAGNITUDES, Address
from megatron.analysis.serve.catalog import AXES, Catalog
from megatron.analysis.serve.charts import Figure, array, axis, layout, plain
from megatron.analysis.serve.contents import (
    Attention,
    Contents,
    NotShownError,
    Profile,
    codes_in_order,
    head_numbers,
)
from megatron.analysis.serve.measuring import Answer
from megatron.analysis.serve.pixels import WIDTH, Image, Region, reduce
from megatron.analysis.stats.result import FormatArrays, TensorArrays
from megatron.fake_quant import get_format

POINTS = 1500  #: maximum number of points of a profile
_OTHER = "#c4587c"  #: color of the second tensor
_CLIPPED = "#e08a1e"


@dataclass(frozen=True)
class Shown:
    """A panel that is ready to be shown."""

    figure: Figure | None
    note: str = ""
    table: pd.DataFrame | None = None  #: numbers for the download
    second: Figure | None = None  #: figure beside the first one


@dataclass(frozen=True)
class Subject:
    """A tensor and what is needed to draw it."""

    catalog: Catalog
    contents: Contents
    tensor: int
    beside: int | None  #: tensor to compare with
    address: Address
    formats: tuple[str, ...]  #: formats to compare; the chosen one is among them

    @property
    def axis(self) -> str:
        """Axis along which the blocks of the tensor run: row or column."""
        at = int(self.catalog.axis_in(self.address.gemm)[self.tensor])
        return AXES[max(at, 0)]

    def answer(self, tensor: int | None = None) -> Answer:
        """Return the statistics of the tensor, or of another one."""
        return self.contents.answer(
            self.catalog, self.tensor if tensor is None else tensor, self.formats
        )

    def arrays(self, tensor: int | None = None) -> TensorArrays:
        """Return the histograms of the tensor, or of another one."""
        arrays = self.answer(tensor).arrays
        assert arrays is not None
        return arrays

    def in_format(self, fmt: str) -> FormatArrays | None:
        """Return the histograms of the tensor in a format; None if there are none."""
        formats = self.arrays().formats
        return formats.get((fmt, self.axis), formats.get((fmt, "all")))

    def numbers(self, fmt: str, tensor: int | None = None) -> dict[str, float]:
        """Return the errors of the tensor in a format; empty if there are none."""
        own = self.answer(tensor).formats
        return own.get((fmt, self.axis), own.get((fmt, "all"), {}))

    def label(self, tensor: int) -> str:
        """Return a name that tells the two tensors apart."""
        catalog = self.catalog
        run = next(r for r in catalog.runs if r["code"] == catalog.run[tensor])
        return f"{catalog.name(tensor)}, {run['type']}, iteration {int(catalog.iteration[tensor])}"


def histogram(subject: Subject) -> Shown:
    """Draw the values by power of two: kept, lost and clipped, above the ranges of the formats."""
    arrays, fmt = subject.arrays(), subject.address.format
    counts = arrays.positive + arrays.negative
    if not counts.any():
        raise NotShownError("all values are zero or not finite")
    shown = trimmed(counts)
    exponents, total = np.arange(255)[shown] - 127, max(int(counts.sum()), 1)
    part = subject.in_format(fmt)
    lost = part.underflow[shown] if part is not None else np.zeros(len(exponents))
    clipped = part.saturated[shown] if part is not None else np.zeros(len(exponents))
    kept = counts[shown] - lost - clipped
    color = color_of(fmt)
    bars = [("kept", kept, color), ("becomes zero", lost, ALARM), ("clipped", clipped, _CLIPPED)]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": (exponents + 0.5).tolist(),
            "y": array(100 * np.asarray(values) / total),
            "width": 0.94,
            "marker": {"color": shade, "line": {"width": 0}},
            "customdata": [power(2, int(e)) for e in exponents],
            "hovertemplate": f"%{{customdata}}: %{{y:.3g}} % {name}<extra></extra>",
        }
        for name, values, shade in bars
        if np.any(values)
    ]
    if subject.beside is not None:
        data.append(_outline(subject, shown, exponents))
    ranges = _ranges(subject)
    data += _range_traces(ranges)
    low, high = float(exponents[0]), float(exponents[-1] + 1)
    figure = {
        "data": data,
        "layout": layout(
            350,
            barmode="stack",
            bargap=0,
            showlegend=True,
            margin={"t": 30},
            xaxis=axis(
                "magnitude",
                range=[low - 0.5, high + 0.5],
                anchor="y2",
                **charts.power_ticks(low, high),
            ),
            yaxis=axis("% of the nonzero values", domain=[0.3, 1], rangemode="tozero"),
            yaxis2=axis(
                "",
                domain=[0, 0.24],
                tickfont={"size": 10},
                range=[len(ranges) - 0.4, -0.6],
                showgrid=False,
                ticks="",
                tickvals=[*range(len(ranges))],
                ticktext=[plain(n) for n in ranges["format"]],
                fixedrange=True,
            ),
        ),
    }
    smaller = int(counts[: shown.start].sum())
    note = "Bars below: range of each format for a block with the median scale; line: all scales."
    if smaller:
        note += f" {smaller:,} smaller values are not shown."
    table = pd.DataFrame(
        {"exponent": exponents, "count": counts[shown], "zero": lost, "clipped": clipped}
    )
    return Shown(figure, note, table)


def _outline(subject: Subject, shown: slice, exponents: NDArray[np.int64]) -> dict[str, Any]:
    """Return the histogram of the second tensor as an outline."""
    assert subject.beside is not None
    arrays = subject.arrays(subject.beside)
    other = arrays.positive + arrays.negative
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(subject.label(subject.beside)),
        "x": [*exponents.tolist(), int(exponents[-1]) + 1],
        "y": array(100 * np.append(other[shown], 0) / max(int(other.sum()), 1)),
        "line": {"shape": "hv", "color": _OTHER, "width": 2},
    }


def _ranges(subject: Subject) -> pd.DataFrame:
    names: list[str] = []
    rows: list[dict[str, Any]] = []
    amax = float(np.max(subject.arrays().channel_amax, initial=0.0))
    for name in subject.formats:
        numbers = subject.numbers(name)
        if numbers:
            scales = {key: numbers[f"scale_{key}"] for key in ("median", "min", "max")}
            names.append(name)
            rows.append(
                {"quantized_format": name, "amax": amax}
                | {f"scale_{key}": value for key, value in scales.items()}
            )
    columns = ["quantized_format", "amax", "scale_median", "scale_min", "scale_max"]
    return format_ranges(names, pd.DataFrame(rows, columns=columns))


def _range_traces(ranges: pd.DataFrame) -> list[dict[str, Any]]:
    traces = []
    for lane, row in enumerate(ranges.to_dict("records")):
        color, name = color_of(row["format"]), plain(row["format"])
        spans = (
            ("all scales", row["lowest"], row["highest"], 1.5),
            ("subnormal", row["smallest"], row["normal"], 4),
            ("normal", row["normal"], row["largest"], 9),
        )
        traces += [
            {
                "type": "scatter",
                "mode": "lines",
                "x": [low, high],
                "y": [lane, lane],
                "yaxis": "y2",
                "line": {"color": color, "width": width},
                "name": f"{name} {what}",
                "hovertemplate": f"{name}, {what}: 2^{low:.1f} to 2^{high:.1f}<extra></extra>",
                "showlegend": False,
            }
            for what, low, high, width in spans
            if math.isfinite(low) and math.isfinite(high)
        ]
    return traces


def errors(subject: Subject) -> Shown:
    """Draw the mean relative error by magnitude, one line per format."""
    counts = subject.arrays().positive + subject.arrays().negative
    if not counts.any():
        raise NotShownError("all values are zero or not finite")
    shown = trimmed(counts)
    exponents = np.arange(255)[shown] - 127
    data, columns = [], {"exponent": exponents}
    for name in subject.formats:
        part = subject.in_format(name)
        if part is None:
            continue
        values = part.values[shown]
        error = np.where(values > 0, part.relative_error[shown] / np.maximum(values, 1), np.nan)
        columns[name] = error
        chosen = name == subject.address.format
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(name),
                "x": (exponents + 0.5).tolist(),
                "y": array(np.clip(100 * error, 1e-3, None)),
                "line": {"color": color_of(name), "width": 3 if chosen else 1.5},
                "marker": {"size": 5 if chosen else 3},
                "customdata": [power(2, int(e)) for e in exponents],
                "hovertemplate": f"{plain(name)}, %{{customdata}}: %{{y:.3g}} %<extra></extra>",
            }
        )
    if not data:
        raise NotShownError("no format was computed for these values")
    low, high = float(exponents[0]), float(exponents[-1] + 1)
    figure = {
        "data": data,
        "layout": layout(
            350,
            showlegend=True,
            margin={"t": 30},
            xaxis=axis("magnitude", range=[low - 0.5, high + 0.5], **charts.power_ticks(low, high)),
            yaxis=axis(
                "relative error",
                type="log",
                tickvals=[0.01, 0.1, 1, 10, 100],
                ticktext=["0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
                range=[-2, 2.1],
            ),
        ),
    }
    return Shown(figure, "100 %: these values become zero.", pd.DataFrame(columns))


def channels(subject: Subject) -> Shown:
    """Draw the largest magnitude and the rms of each channel."""
    return _profile(subject, 0, "channel")


def tokens(subject: Subject) -> Shown:
    """Draw the largest magnitude and the rms of each token or row."""
    return _profile(subject, 1, "row (output unit)" if _is_weight(subject) else "token")


def _is_weight(subject: Subject) -> bool:
    return bool(subject.catalog.field(subject.tensor, "tensor_name") == "weight")


def _profile(subject: Subject, number: int, what: str) -> Shown:
    own = subject.contents.profiles(subject.catalog, subject.tensor)[number]
    data = _profile_traces(own, "largest magnitude", "rms", "#1f7a7a", "#8bb8b8")
    if subject.beside is not None:
        other = subject.contents.profiles(subject.catalog, subject.beside)[number]
        data += _profile_traces(
            other, "largest magnitude, second", "rms, second", _OTHER, "#e3b1c1"
        )
    values = np.concatenate([own.amax, own.rms])
    positive = values[(values > 0) & np.isfinite(values)]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    median = float(np.median(own.amax[own.amax > 0])) if (own.amax > 0).any() else 0.0
    outliers = int((own.amax > 6 * median).sum()) if median else 0
    figure = {
        "data": data,
        "layout": layout(
            270,
            showlegend=True,
            margin={"t": 30},
            hovermode="x unified",
            xaxis=axis(what),
            yaxis=charts.log_axis("magnitude", low, high),
        ),
    }
    dead = int((own.amax == 0).sum())
    note = f"{len(own.amax):,} {what.partition(' ')[0]}s; {outliers} above 6 times the median"
    note += f"; {dead} hold only zeros." if dead else "."
    if len(own.amax) > POINTS:
        note += f" Each point is the largest of {-(-len(own.amax) // POINTS)} values."
    table = pd.DataFrame({"index": np.arange(len(own.amax)), "amax": own.amax, "rms": own.rms})
    return Shown(figure, note, table)


def _profile_traces(own: Profile, first: str, second: str, dark: str, pale: str) -> list[Any]:
    traces = []
    for name, values, color in ((second, own.rms, pale), (first, own.amax, dark)):
        x, y = _thinned(values)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": x.tolist(),
                "y": array(np.where(y > 0, y, np.nan)),
                "line": {"color": color, "width": 1.3},
                "hovertemplate": f"%{{y:.4g}} {name}<extra></extra>",
            }
        )
    return traces


def _thinned(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return at most `POINTS` values, each the largest of its neighbors, and their positions."""
    step = -(-len(values) // POINTS)
    if step <= 1:
        return np.arange(len(values)), values
    padded = np.pad(values, (0, -len(values) % step), constant_values=0).reshape(-1, step)
    best = padded.argmax(1)
    return np.arange(len(padded)) * step + best, padded[np.arange(len(padded)), best]


def scales(subject: Subject) -> Shown:
    """Draw the block scales of a format as an image."""
    fmt = subject.address.format
    table = subject.contents.scales(subject.catalog, subject.tensor, fmt)
    values = table.to_numpy(dtype=float)
    known = get_format(fmt)
    if known.block_scale == "E8M0":
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0, 1)
        ticks = charts.power_ticks(float(low), float(high), 6)
    else:
        pairs = scale_ticks(values)
        ticks = {"tickvals": [p for p, _ in pairs], "ticktext": [t for _, t in pairs]}
    rows, size = [int(i) for i in table.index], int(known.block_size or 1)
    trace = {
        "type": "heatmap",
        "z": array(values),
        "x0": size / 2 - 0.5,
        "dx": size,
        "y0": 0,
        "dy": rows[1] - rows[0] if len(rows) > 1 else 1,
        "colorscale": charts.MAGMA,
        "colorbar": _bar("scale", ticks),
        "hovertemplate": "row %{y}, from column %{x}: 2^%{z:.2f}<extra></extra>",
        "hoverongaps": False,
    }
    figure = {
        "data": [trace],
        "layout": layout(
            300,
            xaxis=axis("position along the row", showgrid=False),
            yaxis=axis("row", autorange="reversed", showgrid=False),
        ),
    }
    note = f"Blocks of {known.block_size} values along the rows; empty: blocks of zeros."
    if len(rows) > 1 and rows[1] - rows[0] > 1:
        note += f" One in {rows[1] - rows[0]} rows is shown."
    return Shown(figure, note, table)


def _bar(title: str, ticks: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "title": {"text": title, "side": "right", "font": {"size": 12}},
        "thickness": 12,
        "outlinewidth": 0,
        **(ticks or {}),
    }


def codes(subject: Subject) -> Shown:
    """Draw how often each code occurs, sorted by the numbers that the codes stand for."""
    fmt = subject.address.format
    order, values = codes_in_order(fmt)
    part = subject.in_format(fmt)
    if not len(order) or part is None or not part.codes.any():
        raise NotShownError(f"the codes of {fmt} are not counted")
    counts = part.codes[order]
    shares = 100 * counts / max(int(part.codes.sum()), 1)
    names = ["-0" if v == 0 and np.signbit(v) else f"{v:.4g}" for v in values]
    unused = np.flatnonzero(counts == 0)
    positions = np.arange(len(order))
    every = 1 if len(order) <= 16 else len(order) // 8
    figure = {
        "data": [
            {
                "type": "bar",
                "x": positions.tolist(),
                "y": array(shares),
                "marker": {"color": color_of(fmt), "line": {"width": 0}},
                "customdata": names,
                "hovertemplate": "%{customdata}: %{y:.3g} %<extra></extra>",
                "name": "share",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "x": unused.tolist(),
                "y": [0] * len(unused),
                "marker": {"color": ALARM, "symbol": "line-ns-open", "size": 8},
                "customdata": [names[i] for i in unused],
                "hovertemplate": "%{customdata}: never used<extra></extra>",
                "name": "never used",
            },
        ],
        "layout": layout(
            270,
            bargap=0.08 if len(order) <= 64 else 0,
            xaxis=axis(
                "number before the scale" if get_format(fmt).scaling is not None else "number",
                tickvals=positions[::every].tolist(),
                ticktext=names[::every],
            ),
            yaxis=axis("% of the values", rangemode="tozero"),
        ),
    }
    note = f"{int((counts > 0).sum())} of {len(order)} codes are used; red: never used."
    return Shown(figure, note, pd.DataFrame({"code": order, "number": values, "count": counts}))


def image(subject: Subject) -> Shown:
    """Draw the tensor, its magnitudes, its error or its difference from another as an image."""
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
    figure = _image_figure(picture, title, magnitudes=address.image == MAGNITUDES)
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


def _image_figure(picture: Image, title: str, *, magnitudes: bool) -> Figure:
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
        colors["colorbar"] = _bar("magnitude", charts.power_ticks(low, high, 6))
    else:
        # Outliers saturate the colors, so that the other values can be told apart.
        limit = float(np.quantile(np.abs(finite), 0.999)) if finite.size else 1.0
        limit = limit or largest or 1.0
        shown = values
        colors = {"zmin": -limit, "zmax": limit, "colorscale": charts.DIVERGING}
        colors["colorbar"] = _bar(title)
    region = picture.region
    trace = {
        "type": "heatmap",
        "z": array(shown),
        "x0": picture.x0,
        "dx": picture.step[1],
        "y0": picture.y0,
        "dy": picture.step[0],
        "hovertemplate": "row %{y:.0f}, column %{x:.0f}: %{z:.4g}<extra></extra>",
        "hoverongaps": False,
        **colors,
    }
    if shown is not values:
        trace["customdata"] = array(values)
        trace["hovertemplate"] = trace["hovertemplate"].replace("z:", "customdata:")
    return {
        "data": [trace],
        "layout": layout(
            420,
            uirevision=f"{region}",
            xaxis=axis("channel", showgrid=False, range=[region.left - 0.5, region.right - 0.5]),
            yaxis=axis("token", showgrid=False, range=[region.bottom - 0.5, region.top - 0.5]),
        ),
    }


def attention(subject: Subject) -> Shown:
    """Draw the attention of a head compared with uniform attention, and its change in a format."""
    address = subject.address
    found = subject.contents.attention(
        subject.catalog, subject.tensor, address.format, address.head, address.sequence
    )
    visible = (found.probabilities > 0).sum(-1, keepdim=True)
    relative = found.probabilities * visible
    region = Region.within(relative.shape[0], relative.shape[1])
    first = reduce(relative, region, width=WIDTH, height=WIDTH)
    figures = [_square(_attention_trace(first), relative.shape[0])]
    if found.change is not None:
        second = reduce(found.change, region, width=WIDTH, height=WIDTH)
        figures.append(_square(_change_trace(second, first.values > 0), relative.shape[0]))
    return Shown(figures[0], _attention_note(found), _image_table(first), [*figures, None][1])


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


def _attention_trace(picture: Image) -> dict[str, Any]:
    values = picture.values.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(values > 0, np.log2(np.clip(values, 1 / EXTREME, EXTREME)), np.nan)
    limit = math.log2(EXTREME)
    ticks = {
        "tickvals": [-5, -3, -1, 0, 1, 3, 5],
        "ticktext": ["1/32", "1/8", "1/2", "1", "2", "8", "32"],
    }
    return {
        "type": "heatmap",
        "z": array(shown),
        "customdata": array(values),
        "x0": picture.x0,
        "dx": picture.step[1],
        "y0": picture.y0,
        "dy": picture.step[0],
        "zmin": -limit,
        "zmax": limit,
        "colorscale": charts.DIVERGING,
        "colorbar": _bar("times uniform", ticks),
        "hovertemplate": "query %{y:.0f}, key %{x:.0f}: %{customdata:.3g}<extra></extra>",
        "hoverongaps": False,
    }


def _change_trace(picture: Image, visible: NDArray[np.bool_]) -> dict[str, Any]:
    values = picture.values.astype(float)
    finite = np.abs(values[np.isfinite(values)])
    limit = (float(np.quantile(finite, 0.999)) if finite.size else 1.0) or 1e-12
    return {
        "type": "heatmap",
        "z": array(np.where(visible, values, np.nan)),
        "x0": picture.x0,
        "dx": picture.step[1],
        "y0": picture.y0,
        "dy": picture.step[0],
        "zmin": -limit,
        "zmax": limit,
        "colorscale": charts.DIVERGING,
        "colorbar": _bar("change of the probability"),
        "hovertemplate": "query %{y:.0f}, key %{x:.0f}: %{z:.3g}<extra></extra>",
        "hoverongaps": False,
    }


#: Panels of a tensor, by the name in the page.
PANELS: dict[str, Callable[[Subject], Shown]] = {
    "histogram": histogram,
    "errors": errors,
    "image": image,
    "channels": channels,
    "tokens": tokens,
    "scales": scales,
    "codes": codes,
    "attention": attention,
}
