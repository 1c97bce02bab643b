"""Build the page that follows a run: loss, gradient norm, statistics, files and events."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.dump.loss_curve import EVENT
from megatron.analysis.plots.style import ALARM, colors_of
from megatron.analysis.serve import charts
from megatron.analysis.serve.address import Address
from megatron.analysis.serve.charts import Figure, array, axis, layout, plain
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.pages.parts import (
    Part,
    footer,
    graph,
    html,
    message,
    panel,
    select,
    size,
    table,
)
from megatron.analysis.serve.training import SCALARS, Series
from megatron.bounded_files import printable

MOST_SERIES = 8  #: maximum number of runs whose scalars are drawn together, the newest ones
MOST_POINTS = 2000  #: maximum number of points of a curve
MOST_EVENTS = 60  #: maximum number of events in the list, the newest ones
LONGEST_TEXT = 300  #: maximum length of a text of an event, in characters
#: Several files of a run may contain the same curve; the gaps of a dashed line show the line below.
_DASHES = ("solid", "8px,8px", "2px,6px")
#: Statistics of `--tensor-statistics`, with their labels.
_COLUMNS = {
    "sqnr_db": "SQNR (dB)",
    "amax": "Largest magnitude",
    "rms": "RMS",
    "underflow": "Underflow (%)",
}


def page(explorer: Explorer, data: dict[str, dict[str, Any]]) -> Part:
    """Return the page; its panels load their contents themselves."""
    parts = [
        panel("numbers", "Now", data["numbers"], wide=True),
        panel("curves", "Scalars", data["curves"], wide=True),
    ]
    if explorer.training.statistics:
        parts.append(panel("statistics", "Operands", data["statistics"], wide=True))
    parts.append(panel("events", "Events", data["events"], wide=True))
    return html.Div(parts, className="panels")


def numbers(explorer: Explorer) -> list[Part]:
    """Return the newest scalars, the amount of data written so far, and the free disk space."""
    catalog = explorer.catalog
    cards: list[tuple[str, str, str]] = []
    series = explorer.training.series
    newest = series[-1] if series else None
    last = newest.last() if newest is not None else int(catalog.iteration.max(initial=0))
    total = f"of {newest.total:,}" if newest is not None and newest.total else ""
    cards.append(("Iteration", f"{last:,}", total))
    if newest is not None:
        for name in ("lm loss", "grad-norm", "iteration-time"):
            values = newest.values.get(name)
            if values:
                cards.append((SCALARS[name], f"{values[max(values)]:.4g}", ""))
        left = _time_left(newest)
        if left:
            cards.append(("Time left", left, ""))
    so_far = " so far" if explorer.follower.reading else ""
    cards.append(("Tensors", f"{len(catalog):,}", f"{len(catalog.records):,} files{so_far}"))
    rate = _rate(explorer) or so_far
    cards.append(("Written", size(explorer.written), rate))
    if explorer.free >= 0:
        cards.append(("Free disk", size(explorer.free), ""))
    entries = [
        html.Div(
            [html.Dt(label), html.Dd([html.B(value), html.Span(f" {more}", className="note")])],
            className="card",
        )
        for label, value, more in cards
    ]
    return [html.H2("Now"), html.Dl(entries, className="cards")]


def _time_left(series: Series) -> str:
    seconds = series.values.get("iteration-time")
    if not seconds or not series.total or series.last() >= series.total:
        return ""
    if time.time() - series.changed > 600:
        return ""
    recent = [seconds[i] for i in sorted(seconds)[-20:]]
    left = (series.total - series.last()) * float(np.median(recent))
    if not 0 <= left < 1e12:  # a log may contain anything
        return ""
    hours, rest = divmod(int(left), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _rate(explorer: Explorer) -> str:
    rates = [*explorer.rates]
    if len(rates) < 2 or rates[-1][0] - rates[0][0] < 1:
        return ""
    seconds = rates[-1][0] - rates[0][0]
    written = (rates[-1][2] - rates[0][2]) / seconds
    return f"{size(written)}/s" if written > 0 else ""


def curves(explorer: Explorer, search: str) -> list[Part]:
    """Return one figure per scalar, with one line per series; a run may have several series."""
    series = [s for s in explorer.training.series if s.values][-MOST_SERIES:]
    if not series and explorer.follower.reading:  # events in the index may contain losses
        return [message("Reading the index …")]
    if not series:
        return [
            message(
                "This folder has no event file, log or statistics file; --logs DIR sets the folder "
                "of the run's event files."
            )
        ]
    colors = colors_of([s.label for s in series])
    figures = []
    for name, title in SCALARS.items():
        own = [s for s in series if s.values.get(name)]
        if own:
            figures.append(
                html.Div([html.H3(title), graph(f"curve-{name}", _curve(own, name, colors), title)])
            )
    grid = html.Div(figures, className="curves")
    return [html.H2("Scalars"), grid, footer("curves", "", search, figure=False)]


def _curve(series: list[Series], name: str, colors: dict[str, str]) -> Figure:
    data: list[dict[str, Any]] = []
    lowest, highest = math.inf, 0.0
    for own, dash in zip(series, itertools.cycle(_DASHES), strict=False):
        values = own.values[name]
        x = np.array(sorted(values))
        y = np.array([values[int(i)] for i in x])
        finite = np.isfinite(y)
        bad = x[~finite]
        if finite.any():
            lowest = min(lowest, float(y[finite].min()))
            highest = max(highest, float(y[finite].max()))
        step = -(-len(x) // MOST_POINTS)
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(x) > 1 else "markers",
                "name": plain(own.label),
                "x": x[::step].tolist(),
                "y": array(np.where(finite, y, np.nan)[::step], "f8"),
                "line": {"color": colors[own.label], "width": 1.6, "dash": dash},
                "hovertemplate": f"%{{x}}: %{{y:.5g}}<extra>{plain(own.label)[:40]}</extra>",
            }
        )
        if len(bad):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": "not finite",
                    "x": bad.tolist(),
                    "y": [highest or 1.0] * len(bad),
                    "marker": {"color": ALARM, "symbol": "x", "size": 8},
                    "hovertemplate": "%{x}: not finite<extra></extra>",
                }
            )
    longest = max(max(own.values[name]) - min(own.values[name]) for own in series)
    wide = lowest > 0 and highest > 30 * lowest
    y_axis = charts.log_axis("", lowest, highest) if wide else axis("", exponentformat="power")
    return {
        "data": data,
        "layout": layout(
            240,
            showlegend=len(series) > 1,
            margin={"t": 10 if len(series) == 1 else 40},
            xaxis=axis("iteration", **({"dtick": 1} if longest <= 8 else {})),
            yaxis=y_axis,
            uirevision=name,
        ),
    }


def statistics(explorer: Explorer, address: Address, search: str) -> list[Part]:
    """Return a map of a statistic of the operands by iteration, for each run that measured them."""
    column = address.statistic if address.statistic in _COLUMNS else "sqnr_db"
    selector = select("Statistic", "stat", [*_COLUMNS.items()], column)
    parts: list[Part] = [
        html.H2("Operands over iterations"),
        html.Form(selector, className="controls"),
    ]
    marked = False
    for folder, own in explorer.training.statistics.items():
        figure = _operand_map(own, column)
        if figure is None:
            continue
        marked = marked or len(figure["data"]) > 1
        title = folder.removeprefix(str(explorer.folder)).strip("/") or folder
        parts += [html.H3(title), graph(f"statistics-{len(parts)}", figure, _COLUMNS[column])]
    if len(parts) == 2:
        return [message("No operand was measured.")]
    note = "Lowest SQNR, or largest value of another statistic, of a module's operands in a GEMM."
    if marked:
        note += " Red cells: not finite, because a value is NaN or Inf."
    return [*parts, footer("statistics", note, search)]


def _operand_map(own: pd.DataFrame, column: str) -> Figure | None:
    """Return the map of a statistic; None if there is nothing to show.

    Cells with a value that is NaN or Inf are red. An infinite SQNR is not marked, because it means
    that there is no error.
    """
    from megatron.analysis.serve.statistics import BY_NAME

    values = own[["iteration", "module", "operation", "gemm", "tensor"]].copy()
    numbers = pd.to_numeric(own[column], errors="coerce").astype(float)
    values["bad"] = np.isnan(numbers) if column == "sqnr_db" else ~np.isfinite(numbers)
    values["value"] = numbers.mask(values["bad"])
    if column in ("sqnr_db", "underflow") and "format" in own:
        values = values[own["format"].astype(str) != "none"]  # unquantized operands lack both
    if values.empty:
        return None
    modules = values["module"].astype(str).str.replace("decoder.layers.", "L", regex=False)
    modules = modules.str.replace("self_attention.|mlp.|linear_|_attention", "", regex=True)
    gemms = values["gemm"].astype(str).where(values["gemm"].astype(str) != "all", "")
    names = (modules + " " + gemms + " " + values["tensor"].astype(str)).str.split().str.join(" ")
    groups = values.assign(operand=names).groupby(["operand", "iteration"], sort=False)
    cells = groups["value"].min() if column == "sqnr_db" else groups["value"].max()
    order = [*dict.fromkeys(names)], sorted(values["iteration"].unique())
    axes = dict(zip(("index", "columns"), order, strict=True))
    bad = groups["bad"].any().unstack().reindex(**axes).eq(True).to_numpy()
    grid = np.where(bad, np.nan, cells.unstack().reindex(**axes).to_numpy(float))
    statistic = BY_NAME[column]
    hover = [
        [
            f"{row}, iteration {iteration}: "
            + ("not finite" if bad[i, j] else charts.with_unit(grid[i, j], statistic))
            for j, iteration in enumerate(order[1])
        ]
        for i, row in enumerate(order[0])
    ]
    rows, columns = ([str(name) for name in names] for names in order)
    figure = charts.heat_map(rows, columns, grid, statistic, hover=hover)
    figure["layout"]["height"] = min(max(15 * len(rows), 160), 900)
    figure["layout"]["margin"] = {"l": 190, "r": 8, "t": 8, "b": 40}
    figure["data"][0].pop("texttemplate", None)
    if bad.any():
        figure["data"].append(_marks(bad, figure["data"][0]))
    return figure


def _marks(bad: NDArray[np.bool_], cells: dict[str, Any]) -> dict[str, Any]:
    """Return red cells to draw over some cells of a map, whose hover texts remain visible."""
    return {
        "type": "heatmap",
        "name": "not finite",
        "z": array(np.where(bad, 1.0, np.nan)),
        **{name: cells[name] for name in ("x", "y", "xgap", "ygap")},
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, ALARM], [1, ALARM]],
        "showscale": False,
        "hoverinfo": "skip",
    }


def events(explorer: Explorer) -> list[Part]:
    """Return the newest events in the indexes, except losses, and the files that cannot be used."""
    rows = []
    events = [event for event in explorer.follower.events if event.get("event") != EVENT]
    for event in events[-MOST_EVENTS:][::-1]:
        rest = {
            name: value
            for name, value in event.items()
            if name not in ("event", "run_id", "rank", "wall_time", "timestamp", "iteration")
        }
        text = ", ".join(f"{name}: {value}" for name, value in rest.items())
        rows.append(
            [
                str(event.get("event"))[:LONGEST_TEXT],
                str(event.get("iteration", ""))[:LONGEST_TEXT],
                text[:LONGEST_TEXT],
                str(event.get("run_id") or "")[:LONGEST_TEXT],
            ]
        )
    parts: list[Part] = [html.H2("Events")]
    if rows:
        parts.append(table(["Event", "Iteration", "Details", "Run"], rows, label="Events"))
    problems = [[str(problem.path), problem.why] for problem in explorer.follower.problems]
    problems += [[path, why] for path, why in [*explorer.training.problems.items()]]
    problems += explorer.failures(MOST_EVENTS)
    if unusable := [[printable(text, limit=1000) for text in row] for row in problems]:
        unusable = unusable[:MOST_EVENTS]
        parts.append(table(["Unusable file", "Why"], unusable, label="Unusable files"))
    if len(parts) == 1:
        reading = explorer.follower.reading
        parts.append(message("Reading the index …" if reading else "No events so far."))
    return parts


def numbers_of(name: str, explorer: Explorer) -> pd.DataFrame:
    """Return the numbers of a panel, for the download."""
    if name == "statistics":
        tables = [own.assign(run=run) for run, own in explorer.training.statistics.items()]
        return pd.concat(tables) if tables else pd.DataFrame()
    rows = [
        {"run": series.label, "scalar": scalar, "iteration": iteration, "value": value}
        for series in explorer.training.series
        for scalar, values in series.values.items()
        for iteration, value in sorted(values.items())
    ]
    return pd.DataFrame(rows, columns=["run", "scalar", "iteration", "value"])
