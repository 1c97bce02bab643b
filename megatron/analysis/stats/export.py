"""Convert statistics to text: a summary, or the tables as CSV, JSON or aligned columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.json_values import plain
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.stats.result import ERROR_SHARES, Statistics, words_of_repeats
from megatron.analysis.text_table import align, csv_cell, shown

WORST = 5  #: number of tensors in the summary's list of the lowest SQNRs
_TENSOR = (
    "iteration",
    "micro_batch",
    "data_rank",
    "layer_idx",
    "module",
    "operation",
    "tensor_name",
    "quant_type",
    "dtype",
    "shape",
)


def summary(statistics: Statistics) -> str:
    """Return a summary: counts, one line per format and axis, the lowest SQNRs, and notes."""
    tensors = statistics.tensors
    count = int(tensors["count"].sum())
    lines = [f"{len(tensors)} tensors, {count} values"]
    for kind in ("nan", "inf"):
        affected = tensors[tensors[kind] > 0]
        if len(affected):
            name = shown(Path(affected["path"].iloc[0]).name)
            total = int(affected[kind].sum())
            lines.append(f"  {total} {kind} in {len(affected)} tensors; the first is {name}")
    if statistics.repeats:
        lines.append(f"  {words_of_repeats(statistics.repeats)}")
    if len(statistics.formats):
        lines += [*_by_use(statistics), "", *_worst(statistics)]
    if notes := statistics.notes():
        lines += ["", "Notes", *note_lines(notes)]
    return "\n".join(lines)


def note_lines(notes: Mapping[str, int]) -> list[str]:
    """Return one line per note, with the number of tensors that have this note."""
    return [f"  {count} tensor{'s' if count > 1 else ''}: {note}" for note, count in notes.items()]


def _by_use(statistics: Statistics) -> list[str]:
    """Return the lines of two tables of errors: one for operands, and one for matmul results."""
    formats = statistics.formats
    tensors = statistics.tensors
    operands = [*map(is_operand, tensors["layer_type"], tensors["tensor_name"])]
    of_operands = np.array(operands, bool)[formats["tensor"]]
    lines: list[str] = []
    for title, part in (
        ("Operands of matmuls", formats[of_operands]),
        ("Results of matmuls, which are never quantized", formats[~of_operands]),
    ):
        if len(part):
            lines += ["", title, *_by_format(statistics, part)]
    return lines


def _by_format(statistics: Statistics, formats: pd.DataFrame) -> list[str]:
    # weight each share by the quantity of which it is a share, so that a large tensor counts more
    # than a small one
    finite = statistics.tensors["finite"].to_numpy()[formats["tensor"]]
    formats = formats.assign(whole=finite - formats["poisoned"])
    shares = (*map(_words, ERROR_SHARES), "underflow", "saturated")
    header = ("format", "axis", "tensors", "median SQNR dB", "lowest", "median gain", *shares)
    rows: list[tuple[object, ...]] = [header]
    groups = formats.groupby(["quantized_format", "axis"], sort=False, observed=True)
    for (name, axis), part in groups:
        sqnr, error = part["sqnr_db"].dropna(), (part["mse"] * part["compared"]).fillna(0.0)
        rows.append(
            (
                name,
                axis,
                len(part),
                _short(sqnr.median()),
                _short(sqnr.min()),
                _percent(part["gain"].median()),
                *(_percent(_joint(part[column], error)) for column in ERROR_SHARES),
                _percent(_joint(part["underflow"], part["nonzero"])),
                _percent(_joint(part["saturated"], part["whole"])),
            )
        )
    return align(rows, text=2)


def _joint(shares: pd.Series[float], of: pd.Series[Any]) -> float:
    """Return the average of per-tensor shares, weighted by `of`; NaN if all weights are zero."""
    total = float(of.sum())
    return float((shares * of).sum()) / total if total else math.nan


def _worst(statistics: Statistics) -> list[str]:
    with_sqnr = statistics.joined().dropna(subset=["sqnr_db"])
    operands = with_sqnr[[*map(is_operand, with_sqnr["layer_type"], with_sqnr["tensor_name"])]]
    candidates = operands if len(operands) else with_sqnr
    lowest = candidates.sort_values("sqnr_db").drop_duplicates("tensor").head(WORST)
    rows: list[tuple[object, ...]] = [
        ("lowest SQNR dB", *map(_words, ERROR_SHARES), "format", "axis", "file")
    ]
    for row in lowest.to_dict("records"):
        name = (row["quantized_format"], row["axis"], shown(Path(row["path"]).name))
        shares = [_percent(row[column]) for column in ERROR_SHARES]
        rows.append((_short(row["sqnr_db"]), *shares, *name))
    return align(rows, text=0)


def _short(value: float) -> str:
    return f"{value:.4g}"


def _words(column: str) -> str:
    return column.replace("_", " ")


def _percent(share: float) -> str:
    """Return a share as a percentage; "-" if it is undefined."""
    if 0 < abs(share) < 1e-6:
        return "<0.0001%"
    return "-" if math.isnan(share) else f"{100 * share:.3g}%"


def as_csv(statistics: Statistics) -> str:
    """Return all columns as CSV, with one row per tensor, format and axis.

    If no formats were computed, there is one row per tensor.
    """
    with_formats = len(statistics.formats) > 0
    frame = statistics.joined().drop(columns="tensor") if with_formats else statistics.tensors
    frame = frame.assign(shape=[_shape(shape) for shape in frame["shape"]])
    text: str = with_safe_texts(frame).to_csv(index=False)
    return text


def with_safe_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of a table; its strings contain no spreadsheet formulas and no line breaks."""
    safe = frame.copy()
    for name in frame.columns:
        if frame[name].dtype.kind in "biufc":
            continue
        cells = [csv_cell(value) if isinstance(value, str) else value for value in frame[name]]
        # dtype object keeps pandas from converting integers mixed with None to floats
        safe[name] = pd.Series(cells, frame.index, object)
    return safe


def as_json(statistics: Statistics) -> str:
    """Return a JSON object with three lists: tensors, formats and problems; see `plain`."""
    problems = [{"path": str(problem.path), "why": problem.why} for problem in statistics.problems]
    content = {
        "tensors": [plain(row) for row in statistics.tensors.to_dict("records")],
        "formats": [plain(row) for row in statistics.formats.to_dict("records")],
        "problems": problems,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def as_text(statistics: Statistics) -> str:
    """Return the summary, and the tables `tensors` and `formats` in aligned columns.

    Numbers have nine significant digits.
    """
    tensors = statistics.tensors
    columns = [name for name in tensors.columns if name not in ("run_id", "path", "note", "dims")]
    named = [name for name in columns if name in _TENSOR]
    numbers = [name for name in columns if tensors[name].dtype.kind in "if" and name not in named]
    lines = [summary(statistics), "", "Tensors"]
    rows = [("tensor", *named, *numbers, "file")]
    for number, row in enumerate(tensors.to_dict("records")):
        cells = [_cell(row[name]) for name in (*named, *numbers)]
        rows.append((str(number), *cells, shown(Path(row["path"]).name)))
    lines += align(rows, text=0)
    if len(statistics.formats):
        header = tuple(statistics.formats.columns)
        body = [
            tuple(_cell(value) for value in row)
            for row in statistics.formats.itertuples(index=False)
        ]
        lines += ["", "Formats", *align([header, *body], text=0)]
    if statistics.problems:
        lines += ["", "Left out", *(f"  {problem}" for problem in statistics.problems)]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return _shape(value)
    if value is None or value is pd.NA or value == "":
        return "-"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


#: Functions that convert statistics to the content of a file, keyed by file name suffix.
WRITERS: dict[str, Callable[[Statistics], str]] = {
    ".csv": as_csv,
    ".json": as_json,
    ".txt": as_text,
}
