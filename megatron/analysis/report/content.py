"""What the report's page shows, as plain data: numbers are finite or null."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from megatron.analysis.diagnostics import diagnose
from megatron.analysis.dump.run_endings import ending
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.plots.style import colour_of
from megatron.analysis.report.cards import audit, facts
from megatron.analysis.report.details import details
from megatron.analysis.stats.result import words_of_repeats
from megatron.analysis.text_table import shown

MOST_DETAILS = 800  #: tensors that a click opens
WORST = 60  #: rows of the table of each format
NAMED = 24  #: tensors that a warning links to


def content(figure_data: FigureData) -> dict[str, Any]:
    """Everything on the page."""
    tensors = figure_data.tensors
    layers = sorted(int(layer) for layer in tensors["layer_idx"].unique())
    cautions = diagnose(figure_data)
    judged_places = figure_data.judged_places()
    lowest = worst(figure_data)
    lists = [[row[0] for row in rows] for rows in lowest.values()]
    lists += [list(caution.tensors[:NAMED]) for caution in cautions]
    return {
        "title": f"Tensors of {shown(figure_data.store.folder.name)}",
        "folder": shown(figure_data.store.folder),
        "origin": figure_data.origin,
        "judged": figure_data.judged_origin,
        "alarm": figure_data.alarm,
        "repeats": words_of_repeats(figure_data.found.repeats) if figure_data.found.repeats else "",
        "values": int(tensors["count"].sum()),
        "left_out": [str(problem) for problem in figure_data.found.problems],
        "missing": len(figure_data.store.missing),
        "formats": [{"name": name, "colour": colour_of(name)} for name in figure_data.formats],
        "runs": [run(figure_data, run_id) for run_id in runs_of(tensors)],
        "layers": layers,
        "places": figure_data.places,
        "labels": [figure_data.label(place) for place in figure_data.places],
        "results": [figure_data.label(place) != place for place in figure_data.places],
        "cells": cells(figure_data),
        "judged_places": judged_places,
        "by_place": format_medians(figure_data, "place", judged_places),
        "by_layer": format_medians(figure_data, "layer_idx", layers),
        "cautions": [
            {
                "kind": c.kind,
                "text": c.text,
                "format": c.format,
                "tensors": list(c.tensors[:NAMED]),
                "all": len(c.tensors),
            }
            for c in cautions
        ],
        "worst": lowest,
        "by_type": by_type(figure_data),
        "tensors": names(figure_data),
        "at": positions(figure_data),
        "details": details(figure_data, chosen_tensors(figure_data, lists)),
    }


def runs_of(tensors: pd.DataFrame) -> list[str]:
    """Ids, in the order of the table; tensors of unknown origin under the empty one."""
    return list(dict.fromkeys(tensors["run_id"].fillna("").astype(str)))


def run(figure_data: FigureData, run_id: str) -> dict[str, Any]:
    """A run's card and audit, as lines."""
    tensors = figure_data.tensors
    mine = tensors[tensors["run_id"].fillna("") == run_id]
    card: Mapping[str, Any] = figure_data.store.run_card(run_id) if run_id else {}
    return {
        "id": run_id,
        "type": str(mine["quant_type"].iloc[0]),
        "colour": colour_of(str(mine["quant_type"].iloc[0])),
        "tensors": len(mine),
        "iterations": sorted(int(i) for i in mine["iteration"].unique()),
        "ending": ending(card),
        "facts": facts(card),
        "audit": audit(card),
    }


def cells(figure_data: FigureData) -> list[list[Any]]:
    """A row a cell of the heat map: run, iteration, layer, place, number of tensors, and for each
    format the median SQNR (null: none; "inf": no error) and the tensor with the lowest.
    """
    runs = {name: i for i, name in enumerate(runs_of(figure_data.tensors))}
    places = {name: i for i, name in enumerate(figure_data.places)}
    keys = ["run_id", "iteration", "layer_idx", "place"]
    table = figure_data.uses.assign(run_id=figure_data.uses["run_id"].fillna("").astype(str))
    found: dict[tuple[Any, ...], dict[str, tuple[Any, int, int]]] = {}
    for key, part in table.groupby([*keys, "quantized_format"], sort=False):
        known = part["sqnr_db"].dropna()
        lowest = int(part.loc[known.idxmin(), "tensor"] if len(known) else part["tensor"].iloc[0])
        median = plain(known.median()) if len(known) else None
        found.setdefault(key[:4], {})[key[4]] = (median, lowest, len(part))
    rows: list[list[Any]] = []
    for (run_id, iteration, layer, place), formats in found.items():
        count = max(entry[2] for entry in formats.values())
        rows.append([runs[run_id], int(iteration), int(layer), places[place], count])
        for name in figure_data.formats:
            rows[-1] += formats[name][:2] if name in formats else (None, None)
    return rows


def format_medians(figure_data: FigureData, column: str, order: Sequence[Any]) -> list[list[Any]]:
    """For each format the median SQNR of all tensors with each value of a column, of all runs and
    iterations; null: none has one.
    """
    groups = figure_data.judged.groupby(["quantized_format", column], sort=False)[
        "sqnr_db"
    ].median()
    found = {key: plain(value) for key, value in groups.items()}
    return [[found.get((name, value)) for value in order] for name in figure_data.formats]


def worst(figure_data: FigureData) -> dict[str, list[list[Any]]]:
    """For each format the tensors with the lowest SQNR, and their SQNR, underflow, saturation and
    relative bias.
    """
    columns = ["sqnr_db", "underflow", "saturated", "relative_bias"]
    found = {}
    for name in figure_data.formats:
        mine = figure_data.judged[figure_data.judged["quantized_format"] == name]
        mine = mine.dropna(subset=["sqnr_db"])
        mine = mine.sort_values("sqnr_db", kind="stable").head(WORST)
        found[name] = [
            [int(row[0]), *(plain(value) for value in row[1:])]
            for row in mine[["tensor", *columns]].itertuples(index=False)
        ]
    return found


def by_type(figure_data: FigureData) -> list[list[Any]]:
    """How far each run is from the one without quantization: type, kind, layer, median."""
    data = figure_data.deviations
    if data.empty:
        return []
    last = data[data["iteration"] == data["iteration"].max()]
    groups = last.groupby(["quant_type", "kind", "layer_idx"], sort=False)["deviation"].median()
    return [[*map(str, key[:2]), int(key[2]), plain(value)] for key, value in groups.items()]


def positions(figure_data: FigureData) -> list[list[int]]:
    """Return the run, iteration, layer and place of each tensor, which identify its cell in the
    heat map.
    """
    tensors = figure_data.tensors
    runs = {name: i for i, name in enumerate(runs_of(tensors))}
    places = {name: i for i, name in enumerate(figure_data.places)}
    return [
        [runs[run_id], int(iteration), int(layer), places[place]]
        for run_id, iteration, layer, place in zip(
            tensors["run_id"].fillna("").astype(str),
            tensors["iteration"],
            tensors["layer_idx"],
            tensors["place"],
            strict=True,
        )
    ]


def names(figure_data: FigureData) -> list[str]:
    """Return one line per tensor that describes it."""
    tensors = figure_data.tensors
    several = tensors.groupby("quant_type")["run_id"].nunique().max() > 1
    return [
        f"L{row.layer_idx} {figure_data.label(row.place)}, {row.quant_type} run"
        + (f" {row.run_id}" if several else "")
        + f", iteration {row.iteration}"
        + (f", micro-batch {row.micro_batch}" if row.micro_batch else "")
        + (f", data rank {row.data_rank}" if row.data_rank else "")
        for row in tensors.itertuples()
    ]


def chosen_tensors(figure_data: FigureData, named: Sequence[Sequence[int]]) -> list[int]:
    """Those that a click opens: the first of each list of `named`, the second of each, ..., then
    the others, the last iteration of each run first, the lowest SQNR first.
    """
    first = [i for rank in itertools.zip_longest(*named) for i in rank if i is not None]
    chosen = [*dict.fromkeys([*first, *_latest_and_lowest(figure_data)])]
    return chosen[:MOST_DETAILS]


def _latest_and_lowest(figure_data: FigureData) -> list[int]:
    table = figure_data.uses[["tensor", "run_id", "iteration", "sqnr_db"]].copy()
    if table.empty:
        return [int(i) for i in figure_data.tensors["tensor"]]
    last = table.groupby("run_id", dropna=False)["iteration"].transform("max")
    table["age"] = last - table["iteration"]
    table["aside"] = ~table["tensor"].isin(set(figure_data.judged["tensor"]))
    lowest = table.groupby("tensor").agg({"aside": "first", "age": "first", "sqnr_db": "min"})
    return [int(i) for i in lowest.sort_values([*lowest.columns], kind="stable").index]


def plain(value: float) -> float | str | None:
    """Six significant digits, for JSON: NaN is null, Inf a word."""
    value = float(value)
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
