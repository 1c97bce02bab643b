"""Build the content of the report as JSON data, without NaN or infinite numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.diagnostics import Diagnostic, diagnose
from megatron.analysis.dump.run_endings import ending
from megatron.analysis.figures.figure_data import FigureData, layer_name
from megatron.analysis.plots.style import color_of
from megatron.analysis.report.attention import attention
from megatron.analysis.report.cards import audit, facts
from megatron.analysis.report.details import details
from megatron.analysis.report.gradients import gradients
from megatron.analysis.report.json_numbers import plain
from megatron.analysis.report.training import training
from megatron.analysis.stats.result import ERROR_SHARES, words_of_repeats
from megatron.analysis.text_table import shown

MOST_DETAILS = 800  #: maximum number of tensors whose details the report contains
WORST = 60  #: maximum number of rows in a table of the tensors with the lowest SQNR
#: number of tensors with the lowest SQNR that the table lists for each layer, so that the table is
#: not empty if only one layer is shown
WORST_OF_LAYER = 6
NAMED = 24  #: maximum number of tensors that a warning links to


def content(figure_data: FigureData) -> dict[str, Any]:
    """Return all data that the report shows."""
    tensors = figure_data.tensors
    layers = sorted(int(layer) for layer in tensors["layer_idx"].unique())
    repeats = figure_data.statistics.repeats
    diagnostics = diagnose(figure_data)
    judged_places = figure_data.judged_places()
    lowest = worst(figure_data)
    lists = [[row[0] for row in rows[:WORST]] for rows in lowest.values()]
    lists += [list(diagnostic.tensors[:NAMED]) for diagnostic in diagnostics]
    return {
        "title": f"Tensors of {shown(figure_data.store.folder.name)}",
        "folder": shown(figure_data.store.folder),
        "origin": figure_data.origin,
        "judged": figure_data.judged_origin,
        "alarm": figure_data.alarm,
        "repeats": words_of_repeats(repeats) if repeats else "",
        "values": int(tensors["count"].sum()),
        "left_out": [str(problem) for problem in figure_data.statistics.problems],
        "missing": len(figure_data.store.missing),
        "formats": [{"name": name, "color": color_of(name)} for name in figure_data.formats],
        "runs": [run(figure_data, run_id) for run_id in runs_of(tensors)],
        "training": training(figure_data, runs_of(tensors)),
        "layers": layers,
        "places": figure_data.places,
        "labels": [figure_data.label(place) for place in figure_data.places],
        "results": [figure_data.label(place) != place for place in figure_data.places],
        "cells": cells(figure_data),
        "judged_places": judged_places,
        "by_place": format_medians(figure_data, "place", judged_places),
        "by_layer": format_medians(figure_data, "layer_idx", layers),
        "verdict": verdict(figure_data, diagnostics),
        "cautions": [
            {
                "kind": diagnostic.kind,
                "text": diagnostic.text,
                "format": diagnostic.format,
                "tensors": list(diagnostic.tensors[:NAMED]),
                "all": len(diagnostic.tensors),
            }
            for diagnostic in diagnostics
        ],
        "worst": lowest,
        "by_type": by_type(figure_data),
        "compared_iterations": compared_iterations(figure_data),
        "attention": attention(figure_data),
        "gradients": gradients(figure_data, runs_of(tensors)),
        "tensors": names(figure_data),
        "at": positions(figure_data),
        "details": details(figure_data, chosen_tensors(figure_data, lists)),
    }


def runs_of(tensors: pd.DataFrame) -> list[str]:
    """Return the run IDs in the order of the rows of `tensors`; an unknown run has the empty ID."""
    return list(dict.fromkeys(tensors["run_id"].fillna("").astype(str)))


def run(figure_data: FigureData, run_id: str) -> dict[str, Any]:
    """Return the facts and the format audit of a run, and a summary of its tensors."""
    tensors = figure_data.tensors
    own = tensors[tensors["run_id"].fillna("") == run_id]
    card: Mapping[str, Any] = figure_data.store.run_card(run_id) if run_id else {}
    return {
        "id": run_id,
        "type": str(own["quant_type"].iloc[0]),
        "color": color_of(str(own["quant_type"].iloc[0])),
        "tensors": len(own),
        "iterations": sorted(int(i) for i in own["iteration"].unique()),
        "ending": ending(card),
        "facts": facts(card),
        "audit": audit(card),
    }


def cells(figure_data: FigureData) -> list[list[Any]]:
    """Return one row per cell of the heatmap in the report.

    A row contains the run, iteration, layer, place (module and tensor name) and number of tensors
    of the cell. Two entries per format follow: the median SQNR in dB, and the tensor with the
    lowest SQNR. An SQNR is None if it is unknown, and "inf" if there is no error.
    """
    runs = {name: i for i, name in enumerate(runs_of(figure_data.tensors))}
    places = {name: i for i, name in enumerate(figure_data.places)}
    keys = ["run_id", "iteration", "layer_idx", "place"]
    table = figure_data.uses.assign(run_id=figure_data.uses["run_id"].fillna("").astype(str))
    by_cell: dict[tuple[Any, ...], dict[str, tuple[Any, int, int]]] = {}
    for key, part in table.groupby([*keys, "quantized_format"], sort=False):
        known = part["sqnr_db"].dropna()
        lowest = int(part.loc[known.idxmin(), "tensor"] if len(known) else part["tensor"].iloc[0])
        median = plain(known.median()) if len(known) else None
        by_cell.setdefault(key[:4], {})[key[4]] = (median, lowest, len(part))
    rows: list[list[Any]] = []
    for (run_id, iteration, layer, place), formats in by_cell.items():
        count = max(entry[2] for entry in formats.values())
        rows.append([runs[run_id], int(iteration), int(layer), places[place], count])
        for name in figure_data.formats:
            rows[-1] += formats[name][:2] if name in formats else (None, None)
    return rows


def verdict(figure_data: FigureData, diagnostics: Sequence[Diagnostic]) -> list[dict[str, Any]]:
    """Return a sentence about each format and its tensor with the lowest SQNR, best format first.

    Formats are sorted by their median SQNR.
    """
    entries = []
    for name in figure_data.formats:
        uses = figure_data.judged[figure_data.judged["quantized_format"] == name]
        known = uses["sqnr_db"].dropna()
        if known.empty:
            continue
        median, lowest = float(known.median()), uses.loc[known.idxmin()]
        warnings = [each for each in diagnostics if each.format == name]
        count = len(warnings)
        alarm = f"{count} warning{'s' if count > 1 else ''}" if count else "no warning"
        text = (
            f"{_decibels(median)} in the median of {len(known):,} {figure_data.judge} of matmuls; "
            f"lowest: {layer_name(int(lowest['layer_idx']))} {lowest['place']}, "
            f"{_decibels(float(lowest['sqnr_db']))}; {alarm}."
        )
        entries.append((median, {"format": name, "text": text, "tensor": int(lowest["tensor"])}))
    return [entry for _, entry in sorted(entries, key=lambda each: -each[0])]


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def format_medians(figure_data: FigureData, column: str, order: Sequence[Any]) -> list[list[Any]]:
    """Return one list per format, with the median SQNR for each value of `column`.

    Each median is taken over all runs and iterations; it is None if no SQNR is known.

    Args:
        column: name of the column.
        order: values of the column, in the order of each list.
    """
    groups = figure_data.judged.groupby(["quantized_format", column], sort=False)[
        "sqnr_db"
    ].median()
    medians = {key: plain(value) for key, value in groups.items()}
    return [[medians.get((name, value)) for value in order] for name in figure_data.formats]


def worst(figure_data: FigureData) -> dict[str, list[list[Any]]]:
    """Return the tensors with the lowest SQNR for each format.

    A row contains a tensor's index, SQNR in dB, shares of the squared error (see `ERROR_SHARES`),
    gain and relative bias. The tensors are the `WORST` of all layers and the `WORST_OF_LAYER` of
    each layer.
    """
    columns = ["sqnr_db", *ERROR_SHARES, "gain", "relative_bias"]
    rows_by_format = {}
    for name in figure_data.formats:
        uses = figure_data.judged[figure_data.judged["quantized_format"] == name]
        uses = uses.dropna(subset=["sqnr_db"])
        uses = uses.sort_values("sqnr_db", kind="stable")
        of_layer = uses.groupby("layer_idx", sort=False).cumcount() < WORST_OF_LAYER
        uses = uses[of_layer.to_numpy() | (np.arange(len(uses)) < WORST)]
        rows_by_format[name] = [
            [int(row[0]), *(plain(value) for value in row[1:])]
            for row in uses[["tensor", *columns]].itertuples(index=False)
        ]
    return rows_by_format


def by_type(figure_data: FigureData) -> list[list[Any]]:
    """Return the median deviation of tensors from the unquantized run, by quantization type.

    There is one row per quantization type, kind of tensor and layer. A row lists these three, the
    median, the number of tensors whose deviation is infinite, and the number of all tensors. Each
    type is compared in the last iteration that it shares with the unquantized run.
    """
    data = figure_data.deviations
    rows = []
    for key, values in data.groupby(["quant_type", "kind", "layer_idx"], sort=False)["deviation"]:
        infinite = int((values == math.inf).sum())
        rows.append([str(key[0]), str(key[1]), int(key[2]), plain(values.median())])
        rows[-1] += [infinite, len(values)]
    return rows


def compared_iterations(figure_data: FigureData) -> list[list[Any]]:
    """Return each quantization type with the iteration in which `by_type` compares it."""
    last = figure_data.deviations.groupby("quant_type", sort=False)["iteration"].max()
    return [[str(name), int(iteration)] for name, iteration in last.items()]


def positions(figure_data: FigureData) -> list[list[int]]:
    """Return the run, iteration, layer and place (module and tensor name) of each tensor.

    These fields identify the tensor's cell in the heatmap. Runs and places are given as indices.
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
    """Return a one-line description of each tensor."""
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
    """Return the indices of the tensors whose details the report contains.

    At most `MOST_DETAILS` indices are returned. The first tensors of all lists in `named` come
    first, then their second tensors, and so on. All other tensors follow, sorted by three criteria:
    tensors on which formats are evaluated come before the rest, then the last iteration of each
    run, and then the lowest SQNR.
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
