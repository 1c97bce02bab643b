"""Write the files in `global_statistics/`: a summary of the whole dump, as JSON and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from megatron.analysis.diagnostics import diagnose
from megatron.analysis.dump.run_endings import ending
from megatron.analysis.figures.figure_data import FigureData, Make
from megatron.analysis.stats.result import words_of_repeats
from megatron.analysis.text_table import shown

GROUPS = ("quant_type", "layer_type", "operation", "kind", "tensor_name")
NUMBERS = (
    "sqnr_db",
    "cosine",
    "relative_bias",
    "gain",
    "underflow",
    "saturated",
    "clipping_error",
    "underflow_error",
    "grid_error",
    "axis_disagreement",
)


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the files "global_statistics.json" and "global_statistics.txt"."""
    numbers = summary(figure_data)
    text = json.dumps(numbers, indent=1, allow_nan=False) + "\n"
    yield "global_statistics.json", lambda: text
    yield "global_statistics.txt", partial(as_text, numbers)


def summary(figure_data: FigureData) -> dict[str, Any]:
    """Return the statistics of the whole dump as JSON values; undefined numbers are None."""
    table = figure_data.tensors
    finite = int(table["finite"].sum())
    overall = {
        "tensors": len(table),
        "values": int(table["count"].sum()),
        **{name: int(table[name].sum()) for name in ("finite", "nan", "inf", "zeros")},
        "min": _plain(table["min"].min()),
        "max": _plain(table["max"].max()),
        "mean": _plain((table["mean"] * table["finite"]).sum() / finite) if finite else None,
        "rms": _plain(_pooled_rms(table)),
    }
    groups: dict[str, Any] = {}
    for column in GROUPS:
        parts = table.groupby(column, sort=False)
        groups[column] = {
            str(name): {
                "tensors": len(part),
                "values": int(part["count"].sum()),
                "rms": _plain(_pooled_rms(part)),
                "amax": _plain(part["amax"].max()),
            }
            for name, part in parts
        }
    return {
        "folder": shown(figure_data.store.folder),
        "runs": figure_data.store.runs(),
        "endings": {
            run_id: ending(figure_data.store.run_card(run_id))
            for run_id in figure_data.store.runs()
        },
        "repeats": figure_data.statistics.repeats,
        "judged": figure_data.judged_origin,
        "overall": overall,
        "groups": groups,
        "formats": {name: _format(figure_data, name) for name in figure_data.formats},
        "warnings": [str(warning) for warning in diagnose(figure_data)],
        "notes": [
            f"{count:,} tensors: {note}" for note, count in figure_data.statistics.notes().items()
        ],
        "left_out": [str(problem) for problem in figure_data.statistics.problems],
        "missing": len(figure_data.store.missing),
    }


def _pooled_rms(table: pd.DataFrame) -> float:
    """Return the RMS of the finite values of all tensors together; NaN if there are none."""
    finite = table["finite"].sum()
    squares = (table["rms"].fillna(0.0) ** 2 * table["finite"]).sum()
    return math.sqrt(squares / finite) if finite else math.nan


def _format(figure_data: FigureData, name: str) -> dict[str, Any]:
    """Return the lowest, the median and the highest value of each error metric for one format.

    Only the tensors on which formats are evaluated are included.
    """
    uses = figure_data.judged[figure_data.judged["quantized_format"] == name]
    numbers: dict[str, Any] = {"tensors": len(uses)}
    for column in NUMBERS:
        known = uses[column].dropna()
        if len(known):
            shares = {"lowest": 0.0, "median": 0.5, "highest": 1.0}
            numbers[column] = {
                word: _plain(known.quantile(share, interpolation="nearest"))
                for word, share in shares.items()
            }
    return numbers


def _plain(value: float) -> float | str | None:
    """Return a value that JSON can represent: None for NaN, and a string for infinity."""
    value = float(value)
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def as_text(numbers: dict[str, Any]) -> str:
    """Format the statistics of the whole dump, as returned by `summary`, as text."""
    lines = [f"Statistics of {numbers['folder']}", ""]
    lines += [f"  run {run or '(unknown)'}: {how}" for run, how in numbers["endings"].items()]
    lines += [f"  {words_of_repeats(numbers['repeats'])}"] if numbers["repeats"] else []
    lines += [""]
    lines += [f"  {name:<8} {value}" for name, value in numbers["overall"].items()]
    for column, groups in numbers["groups"].items():
        lines += ["", f"By {column}"]
        lines += [
            f"  {name:<18} {part['tensors']:>7} tensors  {part['values']:>14} values  "
            f"rms {_text(part['rms'])}  amax {_text(part['amax'])}"
            for name, part in groups.items()
        ]
    for name, part in numbers["formats"].items():
        lines += ["", f"{name}, {part['tensors']} of {numbers['judged']}: lowest, median, highest"]
        lines += [
            f"  {column:<18} " + "  ".join(f"{_text(x):>13}" for x in values.values())
            for column, values in part.items()
            if isinstance(values, dict)
        ]
    for title, key in (
        ("Warnings", "warnings"),
        ("Notes", "notes"),
        ("Left out", "left_out"),
    ):
        if numbers[key]:
            lines += ["", title, *(f"  {line}" for line in numbers[key])]
    if numbers["missing"]:
        lines += ["", f"{numbers['missing']} files listed in an index are missing"]
    return "\n".join(lines) + "\n"


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.9g}"
