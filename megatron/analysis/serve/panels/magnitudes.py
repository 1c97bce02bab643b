"""Draw the values of a tensor and the errors of the formats by magnitude."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.figures.exponent_histograms import format_ranges
from megatron.analysis.figures.figure_data import trimmed
from megatron.analysis.plots.style import ALARM, color_of, power
from megatron.analysis.serve import charts
from megatron.analysis.serve.charts import array, axis, layout, plain
from megatron.analysis.serve.contents import NotShownError
from megatron.analysis.serve.panels.subject import SECOND, Shown, Subject

_CLIPPED, _INF, _NAN = "#e08a1e", "#7a1f4b", "#8a5fbf"


def histogram(subject: Subject) -> Shown:
    """Draw a histogram that shows what a format does to the values, above the formats' ranges."""
    arrays, fmt = subject.arrays(), subject.address.format
    counts = arrays.positive + arrays.negative
    if not counts.any():
        raise NotShownError("all values are zero or not finite")
    shown = trimmed(counts)
    exponents, total = np.arange(255)[shown] - 127, max(int(counts.sum()), 1)
    part = subject.in_format(fmt)
    lost = clipped = overflow = poisoned = np.zeros(len(exponents), np.int64)
    if part is not None:
        lost, overflow = part.underflow[shown], part.overflow[shown]
        clipped = np.maximum(part.saturated[shown] - overflow, 0)
        poisoned = (counts - part.values - part.overflow)[shown]
    bars = [
        ("kept", counts[shown] - lost - clipped - overflow - poisoned, color_of(fmt)),
        ("becomes zero", lost, ALARM),
        ("clipped", clipped, _CLIPPED),
        ("becomes Inf", overflow, _INF),
        ("becomes NaN", poisoned, _NAN),
    ]
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
    columns = {"exponent": exponents, "count": counts[shown], "zero": lost, "clipped": clipped}
    columns |= {"inf": overflow, "nan": poisoned}
    return Shown(figure, note, pd.DataFrame(columns))


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
        "line": {"shape": "hv", "color": SECOND, "width": 2},
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
