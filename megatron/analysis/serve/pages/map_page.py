"""Build the first view: a statistic by iteration, layer and tensor, with a verdict above it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.plots.style import color_of
from megatron.analysis.serve import charts, maps
from megatron.analysis.serve.address import BY_ITERATION, BY_TENSOR, TENSOR, Address
from megatron.analysis.serve.catalog import GEMMS
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.maps import Map
from megatron.analysis.serve.pages.parts import (
    Part,
    bare_panel,
    dot,
    footer,
    graph,
    html,
    link,
    message,
    panel,
    select,
    switch,
    table,
)
from megatron.analysis.serve.statistics import BY_NAME, OUTPUT_SQNR, STATISTICS
from megatron.analysis.serve.study_map import module_of, not_studied, study_map

WORST = 12  #: number of tensors in the list of the worst ones
CELL = 31  #: minimum width of a cell, in which a number of four characters fits
MOST_TEXTS = 200_000  #: maximum number of cells that have hover texts


def page(explorer: Explorer, address: Address, data: dict[str, dict[str, Any]]) -> Part:
    """Return the page; its panels load their contents themselves."""
    catalog = explorer.catalog
    if not len(catalog):
        if explorer.follower.reading or not catalog.version:
            return message("Reading the index …")
        return message(f"{explorer.folder} has no tensors yet. The page will show new ones.")
    return html.Div(
        [
            panel("verdict", "Formats", data["verdict"], wide=True),
            bare_panel("controls", data["controls"], controls(explorer, address)),
            panel("map", "Map", data["map"], wide=True),
            panel("worst", "Worst tensors", data["worst"], wide=True),
        ],
        className="panels",
    )


def _title(address: Address) -> str:
    statistic = BY_NAME[address.statistic]
    what = f"{statistic.label} in {address.format}" if statistic.of_format else statistic.label
    if address.by == BY_ITERATION:
        of_study = address.statistic == OUTPUT_SQNR.name
        return f"{what}: {module_of(address) if of_study else address.place}"
    return f"{what}, iteration {address.iteration}"


def controls(explorer: Explorer, address: Address) -> Part:
    """Return the selectors of the map."""
    catalog = explorer.catalog
    if not catalog.runs:
        return []
    runs = [(run["id"], run_name(run)) for run in catalog.runs]
    own = next(run for run in catalog.runs if run["id"] == address.run)
    named = dict.fromkeys([*explorer.formats, address.format])
    statistics = [(s.name, s.label) for s in STATISTICS]
    if explorer.study() is not None:
        statistics.insert(0, (OUTPUT_SQNR.name, OUTPUT_SQNR.label))
    columns = [(BY_TENSOR, "tensors"), (BY_ITERATION, "iterations")]
    parts = [
        select("Run", "run", runs, address.run, clears="it"),
        select("Statistic", "stat", statistics, address.statistic),
        select("Format", "format", [(name, name) for name in named if name], address.format),
        select("GEMM", "gemm", [("", "all"), *((g, g) for g in GEMMS)], address.gemm),
        select("Columns", "by", columns, address.by),
    ]
    if address.by == BY_ITERATION:
        parts.append(select("Tensor", "place", [(p, p) for p in catalog.places], address.place))
    else:
        iterations = [(str(i), str(i)) for i in own["iterations"]]
        parts.append(select("Iteration", "it", iterations, str(address.iteration)))
        shows_all = address.show == "all"
        parts.append(switch("Results, too", "show", on=shows_all, value="all"))
    if len(runs) > 1:
        others = [("", "none"), *(run for run in runs if run[0] != address.run)]
        parts.append(select("Compare with", "with", others, address.other))
    return html.Form(parts, className="controls")


def run_name(run: dict[str, Any]) -> str:
    """Return the type of a run and its ID."""
    return f"{run['type']}, {run['id'] or 'unknown run'}"


def verdict(explorer: Explorer, address: Address) -> list[Part]:
    """Return one line per format: its median SQNR, and the tensor with the lowest SQNR."""
    catalog, numbers = explorer.catalog, explorer.numbers
    by_tensor = address.but(by=BY_TENSOR, show="", statistic="sqnr_db")
    chosen = maps.chosen_tensors(catalog, by_tensor)
    rows = numbers.rows_of(catalog.ids[chosen], catalog.stamps[chosen])
    axis = catalog.axis_in(address.gemm)[chosen]
    statistic = BY_NAME["sqnr_db"]
    entries = []
    for name in explorer.formats:
        values = numbers.column(statistic, rows, name, axis)
        known = values[~np.isnan(values)]
        if not len(known):
            continue
        lowest = int(chosen[int(np.nanargmin(values))])
        entries.append((float(np.median(known)), name, lowest, float(known.min()), len(known)))
    if not entries:
        return [message("Measuring the visible tensors …" if len(chosen) else "No operands.")]
    chips = []
    for median, name, lowest, value, _ in sorted(entries, key=lambda entry: -entry[0]):
        opened = address.but(view=TENSOR, tensor=catalog.id_of(lowest), format=name)
        chips.append(
            html.Li(
                [
                    link(
                        [
                            dot(color_of(name)),
                            html.B(name),
                            f" {charts.with_unit(median, statistic)}",
                        ],
                        address.but(format=name, statistic="sqnr_db"),
                    ),
                    html.Span(
                        [
                            "lowest: ",
                            link(catalog.name(lowest), opened),
                            f" {charts.with_unit(value, statistic)}",
                        ],
                        className="note",
                    ),
                ],
                className="chip current" if name == address.format else "chip",
            )
        )
    count = max(entry[4] for entry in entries)
    where = (
        f"{count:,} of {len(chosen):,} operands" if count < len(chosen) else f"{count:,} operands"
    )
    note = f"Median SQNR over {where} of iteration {address.iteration}."
    return [
        html.H2("Formats"),
        html.Ul(chips, className="chips"),
        html.P(note, className="note"),
    ]


def shown_map(explorer: Explorer, address: Address) -> Map:
    """Return the map of an address; unless it is of a study, request measurement of its tensors."""
    if address.statistic == OUTPUT_SQNR.name:
        return study_map(explorer.catalog, explorer.study(), address)
    found = maps.build(explorer.catalog, explorer.numbers, address)
    fmt = address.format if BY_NAME[address.statistic].of_format else ""
    explorer.look_at(found.chosen, fmt)
    return found


def map_panel(explorer: Explorer, address: Address, search: str) -> list[Part]:
    """Return the map; if a second run is chosen, also its map and a map of the difference."""
    found = shown_map(explorer, address)
    if not found.rows:
        why = "Nothing to show: no tensor meets these conditions."
        return [message(_why_empty(explorer, address, why))]
    figures = [("map", "", found)]
    note = _note(found)
    if address.by == BY_ITERATION and explorer.follower.reading:
        note += " More iterations appear when the index has been read."
    second = address
    if address.other:
        second = address.but(run=address.other, **_iteration(explorer, address))
        other = shown_map(explorer, second)
        explorer.look_at(np.concatenate([found.chosen, other.chosen]), address.format)
        figures.append(("other", "", other))
        note += " " + _note(other)
    _, scale = charts.color_values(
        np.concatenate([each.values.ravel() for _, _, each in figures]), found.statistic
    )
    runs = {run["id"]: run_name(run) for run in explorer.catalog.runs}
    titles = [runs.get(address.run, ""), runs.get(address.other, "")]
    parts: list[Part] = [html.H2(_title(address))]
    for (name, _, each), title in zip(figures, titles, strict=False):
        if address.other:
            parts.append(html.H3(title))
        if not each.rows:
            parts.append(message(_why_empty(explorer, second, "This run has no such tensors.")))
            continue
        parts.append(_grid(name, each, scale, _columns(address)))
    if (
        address.other
        and (difference := _difference(found, figures[1][2], _columns(address))) is not None
    ):
        parts += [html.H3(f"{titles[1]} minus {titles[0]}"), difference]
    return [*parts, footer("map", note, search)]


def _why_empty(explorer: Explorer, address: Address, why: str) -> str:
    """Return why a map is empty: for a map of study results, what was not studied; else `why`."""
    if address.statistic == OUTPUT_SQNR.name:
        return not_studied(explorer.study(), address)
    return why


def _iteration(explorer: Explorer, address: Address) -> dict[str, int]:
    """Return the second run's iteration to show: the chosen one, or the last if that is missing."""
    run = next(r for r in explorer.catalog.runs if r["id"] == address.other)
    same = address.iteration in run["iterations"]
    return {"iteration": address.iteration if same else run["iterations"][-1]}


def _note(found: Map) -> str:
    total = len(found.measured)
    note = found.statistic.help
    note = f"{note[:1].upper()}{note[1:]}. " if note else ""
    most = int(found.counts.max()) if found.counts.size else 0
    if most > 1:
        note += f"A cell is the median of up to {most:,} {_counted(found)}. "
    if found.statistic.name == OUTPUT_SQNR.name:
        if found.not_finite:
            verb = "holds" if found.not_finite == 1 else "hold"
            note += f"{found.not_finite:,} of {total:,} results {verb} NaN or Inf: -∞ dB."
        return note.strip()
    if found.waiting:
        note += f"{total - found.waiting:,} of {total:,} tensors have been measured so far. "
    if found.without:
        note += f"{found.without:,} of {total:,} tensors have no such number. "
    if found.not_finite:
        verb = "holds" if found.not_finite == 1 else "hold"
        note += f"{found.not_finite:,} of {total:,} tensors {verb} NaN or Inf."
    return note.strip()


def _counted(found: Map) -> str:
    return "results" if found.statistic.name == OUTPUT_SQNR.name else "tensors"


def _columns(address: Address) -> str:
    """Return the title of a map's columns; empty unless the columns are iterations."""
    return "iteration" if address.by == BY_ITERATION else ""


def _grid(name: str, found: Map, scale: dict[str, Any], title: str) -> Part:
    hover: list[list[str]] = []
    if found.values.size <= MOST_TEXTS:
        for i, row in enumerate(found.rows):
            hover.append(
                [
                    f"{row} {column}: {charts.with_unit(found.values[i, j], found.statistic)}"
                    + (
                        f" ({found.counts[i, j]} {_counted(found)})"
                        if found.counts[i, j] > 1
                        else ""
                    )
                    for j, column in enumerate(found.columns)
                ]
            )
    figure = charts.heat_map(
        found.rows,
        found.columns,
        found.values,
        found.statistic,
        hover=hover,
        scale=scale,
        title=title,
    )
    width = 44 + 80 + CELL * min(len(found.columns), 60)
    label = f"{found.statistic.label} by layer. Arrow keys move, Enter opens the tensor."
    return html.Div(
        html.Div(graph(name, figure, label), style={"minWidth": f"min({width}px, 250vw)"}),
        className="grid",
        tabIndex=0,
        role="application",
        **{
            "aria-label": label,
            "data-grid": name,
            "data-rows": str(len(found.rows)),
            "data-columns": str(len(found.columns)),
        },
    )


def _difference(first: Map, second: Map, title: str) -> Part | None:
    """Return a map of the second run minus the first, for the cells that both maps contain."""
    rows = [row for row in first.rows if row in second.rows]
    columns = [column for column in first.columns if column in second.columns]
    if not rows or not columns:
        return None

    def part(found: Map) -> np.ndarray:
        at = np.ix_([found.rows.index(r) for r in rows], [found.columns.index(c) for c in columns])
        values: np.ndarray = found.values[at]
        return values

    with np.errstate(invalid="ignore"):
        values = part(second) - part(first)
    own = first.statistic
    statistic = type(own)(
        own.name, f"Difference of {own.label}", own.unit, True, "around zero", "far", own.percent
    )
    hover = [
        [
            f"{row} {column}: {charts.with_unit(values[i, j], statistic)}"
            for j, column in enumerate(columns)
        ]
        for i, row in enumerate(rows)
    ]
    figure = charts.heat_map(rows, columns, values, statistic, hover=hover, title=title)
    return html.Div(
        graph("difference", figure, statistic.label),
        className="grid",
        tabIndex=0,
        role="region",
        **{"aria-label": statistic.label},
    )


def worst(explorer: Explorer, address: Address, search: str) -> list[Part]:
    """Return links to the tensors of the map that have the worst values of the statistic."""
    if address.statistic == OUTPUT_SQNR.name:
        return [
            message("The results of matmuls are not tensors of the dump; choose another statistic.")
        ]
    catalog = explorer.catalog
    found = maps.build(catalog, explorer.numbers, address)
    order = maps.by_badness(found.statistic, found.measured)[:WORST]
    if not len(order):
        return [message("Nothing has been measured yet.")]
    rows = []
    for position in order:
        tensor = int(found.chosen[position])
        opened = address.but(view=TENSOR, tensor=catalog.id_of(tensor))
        rows.append(
            [
                link(catalog.name(tensor), opened),
                charts.with_unit(float(found.measured[position]), found.statistic),
                str(int(catalog.iteration[tensor])),
                str(int(catalog.micro_batch[tensor])),
                str(int(catalog.data_rank[tensor])),
                str(catalog.field(tensor, "module") or ""),
            ]
        )
    head = ["Tensor", found.statistic.label, "Iteration", "Micro-batch", "Data rank", "Module"]
    return [
        html.H2("Worst tensors"),
        table(head, rows, label="Worst tensors"),
        footer("worst", "", search, figure=False),
    ]


def numbers_of(explorer: Explorer, address: Address) -> pd.DataFrame:
    """Return the map's numbers for the download: one row per tensor, or per layer for a study."""
    catalog, found = explorer.catalog, shown_map(explorer, address)
    if address.statistic == OUTPUT_SQNR.name:
        table_of_cells = pd.DataFrame(found.values, index=found.rows, columns=found.columns)
        return table_of_cells.reset_index(names="layer")
    tensors = found.chosen
    return pd.DataFrame(
        {
            "id": [catalog.id_of(int(tensor)) for tensor in tensors],
            "layer": catalog.layer[tensors],
            "place": [catalog.places[int(place)] for place in catalog.place[tensors]],
            "iteration": catalog.iteration[tensors],
            "micro_batch": catalog.micro_batch[tensors],
            "data_rank": catalog.data_rank[tensors],
            "module": [str(catalog.field(int(tensor), "module")) for tensor in tensors],
            address.statistic: [v if math.isfinite(v) else None for v in found.measured],
        }
    )
