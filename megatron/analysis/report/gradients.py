"""Summarize the gradients by iteration and layer, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.report.json_numbers import short

MOST_ROWS = 12_000  #: number of rows above which each row is a median over all layers
ALL_LAYERS = -2  #: layer number of a row that summarizes all layers
KEYS = ["run_id", "iteration", "layer_idx", "place"]


def gradients(figure_data: FigureData, runs: Sequence[str]) -> list[list[Any]]:
    """Return one row per run, iteration, layer and place (module and tensor name).

    A row begins with these four; runs and places are indices. The median rms and the largest
    magnitude of the gradients follow. Then come, for each format, two medians: the share of nonzero
    values that become zero, and the SQNR in dB. They are None if the format has no such gradient.
    """
    table = figure_data.tensors[figure_data.tensors["kind"] == "gradient"]
    keys = KEYS
    if table.groupby(keys, dropna=False).ngroups > MOST_ROWS:
        keys = [name for name in KEYS if name != "layer_idx"]
    table = table.assign(run_id=table["run_id"].fillna("").astype(str))
    numbers = table.groupby(keys, sort=False).agg(rms=("rms", "median"), amax=("amax", "max"))
    uses = figure_data.judged[figure_data.judged["kind"] == "gradient"]
    uses = uses.assign(run_id=uses["run_id"].fillna("").astype(str))
    errors = uses.groupby(["quantized_format", *keys], sort=False)[["underflow", "sqnr_db"]]
    of_format = {key: [*map(short, row)] for key, *row in errors.median().itertuples()}
    run_at = {name: i for i, name in enumerate(runs)}
    place_at = {name: i for i, name in enumerate(figure_data.places)}
    rows = []
    for key, rms, amax in numbers.itertuples():
        layer = int(key[2]) if len(key) == len(KEYS) else ALL_LAYERS
        row: list[Any] = [run_at[key[0]], int(key[1]), layer, place_at[key[-1]]]
        row += [short(rms), short(amax)]
        for name in figure_data.formats:
            row += of_format.get((name, *key), [None, None])
        rows.append(row)
    return rows
