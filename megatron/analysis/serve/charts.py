"""Build figures as JSON for Plotly; plotly's Python classes would take seconds for large figures.

Texts from a dump may contain anything. Plotly interprets some markup in titles, labels and hover
texts, so every text passes through `plain`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.plots.style import FAINT, INK, RULE, power
from megatron.analysis.serve.statistics import AROUND_ZERO, LOGARITHMIC, Statistic

Figure = dict[str, Any]
#: Colors around zero: blue is below, red is above. The middle is light in dark mode, too.
DIVERGING = [
    [0.0, "#2a5f9e"],
    [0.25, "#8fb8dd"],
    [0.5, "#f4f4f2"],
    [0.75, "#e59c84"],
    [1.0, "#a82a32"],
]
MAGNITUDES = "Viridis"
MAGMA = [
    [i / 8, color]
    for i, color in enumerate(
        (
            "#000004",
            "#1d1147",
            "#51127c",
            "#832681",
            "#b73779",
            "#e75263",
            "#fc8961",
            "#fec488",
            "#fcfdbf",
        )
    )
]
MOST_TEXTS = 700  #: maximum number of cells of a map whose cells show their numbers
#: Look-alike replacements for the characters of markup: angle quotation marks and a wide "&".
_MARKUP = str.maketrans({"<": "\u2039", ">": "\u203a", "&": "\uff06", "\u0000": " "})
UNKNOWN = "-"  #: text in place of an unknown number
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def plain(text: object) -> str:
    """Return a text in which Plotly finds no markup and no entities."""
    return str(text).translate(_MARKUP)


def array(values: Any, dtype: str = "f4") -> dict[str, Any]:
    """Return numbers in Plotly's binary encoding, which takes a third of the space of JSON."""
    numbers = np.ascontiguousarray(values, dtype=f"<{dtype}")
    found: dict[str, Any] = {
        "dtype": dtype,
        "bdata": base64.b64encode(numbers.tobytes()).decode(),
    }
    if numbers.ndim > 1:
        found["shape"] = ", ".join(map(str, numbers.shape))
    return found


def layout(height: int = 300, **more: Any) -> dict[str, Any]:
    """Return the layout that all figures share; the style sheet adapts it to dark mode."""
    shared: dict[str, Any] = {
        "height": height,
        "autosize": True,
        "margin": {"l": 58, "r": 16, "t": 12, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _FONT, "size": 12, "color": INK},
        "hoverlabel": {"font": {"family": _FONT, "size": 12}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "showlegend": False,
        "dragmode": "zoom",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": FAINT, "activecolor": INK},
    }
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(shared.get(name), dict)
        shared[name] = shared[name] | value if both else value
    return shared


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis with thin grid lines and short ticks."""
    return {
        "title": {"text": plain(title), "standoff": 8, "font": {"size": 12}},
        "gridcolor": RULE,
        "linecolor": FAINT,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 3,
        "tickcolor": FAINT,
        "automargin": True,
        **more,
    }


def log_axis(title: str = "", low: float = 1e-3, high: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at powers of ten.

    An axis of at most two decades also has ticks at 2 and 5 times these powers.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max((last - first) // 6, 1)
    values = [10.0**e for e in range(first, last + 1, step)]
    texts = [power(10, e) for e in range(first, last + 1, step)]
    if last - first <= 2:
        values = [factor * 10.0**e for e in range(first, last + 1) for factor in (1, 2, 5)]
        texts = [f"{value:.3g}" for value in values]
    return axis(title, type="log", tickvals=values, ticktext=texts, **more)


def power_ticks(low: float, high: float, most: int = 9) -> dict[str, Any]:
    """Return ticks at powers of two for an axis whose numbers are exponents."""
    step = max(math.ceil((high - low) / most), 1)
    exponents = [e for e in range(math.ceil(low), math.floor(high) + 1) if e % step == 0]
    return {"tickvals": exponents, "ticktext": [power(2, e) for e in exponents]}


def color_bar(title: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a thin color bar with its title beside it, and further properties such as ticks."""
    return {
        "title": {"text": title, "side": "right", "font": {"size": 12}},
        "thickness": 12,
        "outlinewidth": 0,
        **(more or {}),
    }


def number(value: float, statistic: Statistic | None = None) -> str:
    """Return a statistic as short text."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        exact = statistic is not None and statistic.unit == "dB" and value > 0
        return "exact" if exact else ("∞" if value > 0 else "-∞")
    if statistic is not None and statistic.percent:
        value = 100 * value + 0.0  # the sum has no negative zero
        return f"{value:.3g}" if abs(value) >= 1e-3 or not value else f"{value:.1e}"
    if statistic is not None and statistic.unit == "dB":
        return f"{round(value, 1) + 0.0:.1f}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.3g}"


def with_unit(value: float, statistic: Statistic) -> str:
    """Return a statistic as text with its unit."""
    text = number(value, statistic)
    return text if text in (UNKNOWN, "exact") or not statistic.unit else f"{text} {statistic.unit}"


def color_values(
    values: NDArray[np.float64], statistic: Statistic
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Return the numbers by which cells are colored, and the color scale.

    Logarithmic statistics are colored by their logarithm. An infinite value has the color of the
    largest finite one or, if negative, of the smallest.
    """
    shown = values.astype(float) * (100 if statistic.percent else 1)
    ticks: dict[str, Any] = {}
    if statistic.scale == LOGARITHMIC:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.where(shown > 0, np.log10(shown), np.where(shown == 0, -np.inf, np.nan))
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if statistic.scale == LOGARITHMIC:
        exponents = np.linspace(low, high, 5)
        ticks = {"tickvals": exponents.tolist(), "ticktext": [f"{10**e:.2g}" for e in exponents]}
    if statistic.scale == AROUND_ZERO:
        low, high = -max(abs(low), abs(high), 1e-12), max(abs(low), abs(high), 1e-12)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    shown = np.where(np.isposinf(shown), high, np.where(np.isneginf(shown), low, shown))
    scale = {
        "zmin": low,
        "zmax": high,
        "colorscale": DIVERGING if statistic.scale == AROUND_ZERO else MAGNITUDES,
        "reversescale": False,
        "colorbar": color_bar(
            plain(f"{statistic.label} ({statistic.unit})" if statistic.unit else statistic.label),
            {"lenmode": "pixels", "len": 190, "y": 1, "yanchor": "top", **ticks},
        ),
    }
    return shown, scale


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: NDArray[np.float64],
    statistic: Statistic,
    *,
    hover: Sequence[Sequence[str]],
    scale: dict[str, Any] | None = None,
    title: str = "",
) -> Figure:
    """Return a map with one cell per row and column, such as a layer and a tensor.

    Args:
        rows: labels from top to bottom.
        columns: labels from left to right.
        values: one value per cell.
        statistic: statistic whose values are shown.
        hover: text of each cell.
        scale: color scale, if several maps share one; see `color_values`.
        title: title of the columns; empty if their labels are names.
    """
    shown, own = color_values(values, statistic)
    if scale is not None and np.isfinite(shown).any():
        shown = np.clip(shown, scale["zmin"], scale["zmax"])
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": array(shown),
        "x": [*range(len(columns))],
        "y": [*range(len(rows))],
        "hovertext": [[plain(text) for text in row] for row in hover],
        "hoverinfo": "text",
        "xgap": 1 if values.size <= 20_000 else 0,
        "ygap": 1 if values.size <= 20_000 else 0,
        "hoverongaps": True,
        **(scale or own),
    }
    if values.size <= MOST_TEXTS:
        trace["text"] = [[number(value, statistic) for value in row] for row in values]
        trace["text"] = [["" if t == UNKNOWN else t for t in row] for row in trace["text"]]
        trace["texttemplate"] = "%{text}"
        trace["textfont"] = {"size": 11}
    every = [max(-(-len(columns) // 60), 1), max(-(-len(rows) // 48), 1)]
    x = [*range(0, len(columns), every[0])]
    y = [*range(0, len(rows), every[1])]
    names = [plain(columns[i]) for i in x]
    long = max(map(len, names), default=0) > 4
    return {
        "data": [trace],
        "layout": layout(
            height=max(26 * min(len(rows), 40), 90) + (128 if long else 48),
            margin={"l": 44, "r": 8, "t": 8, "b": 120 if long else 40},
            dragmode=False,
            xaxis=axis(
                title,
                tickvals=x,
                ticktext=names,
                tickangle=-50 if long else 0,
                ticks="",
                showgrid=False,
                fixedrange=True,
                range=[-0.5, len(columns) - 0.5],
            ),
            yaxis=axis(
                "",
                tickvals=y,
                ticktext=[plain(rows[i]) for i in y],
                ticks="",
                showgrid=False,
                fixedrange=True,
                range=[len(rows) - 0.5, -0.5],
            ),
            uirevision="map",
        ),
    }
