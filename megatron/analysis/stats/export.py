"""The result as text: a summary for a person, and all of it as CSV, JSON or aligned columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.stats.result import Statistics, words_of_repeats
from megatron.analysis.text_table import align, csv_cell, shown

WORST = 5  #: tensors that the summary names
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


def summary(found: Statistics) -> str:
    """What was measured, a line a format and axis, the tensors that suffer most, and notes."""
    tensors = found.tensors
    count = int(tensors["count"].sum())
    lines = [f"{len(tensors)} tensors, {count} values"]
    for kind in ("nan", "inf"):
        with_them = tensors[tensors[kind] > 0]
        if len(with_them):
            name = shown(Path(with_them["path"].iloc[0]).name)
            total = int(with_them[kind].sum())
            lines.append(f"  {total} {kind} in {len(with_them)} tensors; the first is {name}")
    if found.repeats:
        lines.append(f"  {words_of_repeats(found.repeats)}")
    if len(found.formats):
        lines += [*_by_use(found), "", *_worst(found)]
    if notes := found.notes():
        lines += ["", "Notes", *note_lines(notes)]
    return "\n".join(lines)


def note_lines(notes: Mapping[str, int]) -> list[str]:
    """A line a note: how many tensors have it."""
    return [f"  {count} tensor{'s' if count > 1 else ''}: {note}" for note, count in notes.items()]


def _by_use(found: Statistics) -> list[str]:
    """Return one table of the formats' effect on operands, and one of their effect on results."""
    formats = found.formats
    tensors = found.tensors
    operand = [*map(is_operand, tensors["layer_type"], tensors["tensor_name"])]
    of_operands = np.array(operand, bool)[formats["tensor"]]
    lines: list[str] = []
    for title, part in (
        ("Operands of matmuls", formats[of_operands]),
        ("Results of matmuls, which are never quantized", formats[~of_operands]),
    ):
        if len(part):
            lines += ["", title, *_by_format(found, part)]
    return lines


def _by_format(found: Statistics, formats: pd.DataFrame) -> list[str]:
    # what the shares are of: as many as there are, not a tensor a vote
    finite = found.tensors["finite"].to_numpy()[formats["tensor"]]
    formats = formats.assign(whole=finite - formats["poisoned"])
    header = ("format", "axis", "tensors", "median SQNR dB", "lowest", "underflow", "saturated")
    rows: list[tuple[object, ...]] = [header]
    groups = formats.groupby(["quantized_format", "axis"], sort=False, observed=True)
    for (name, axis), part in groups:
        sqnr = part["sqnr_db"].dropna()
        rows.append(
            (
                name,
                axis,
                len(part),
                _short(sqnr.median()),
                _short(sqnr.min()),
                _percent(_joint(part["underflow"], part["nonzero"])),
                _percent(_joint(part["saturated"], part["whole"])),
            )
        )
    return align(rows, text=2)


def _joint(shares: pd.Series[float], of: pd.Series[int]) -> float:
    """The share of all tensors together; NaN of nothing."""
    total = int(of.sum())
    return float((shares * of).sum()) / total if total else math.nan


def _worst(found: Statistics) -> list[str]:
    known = found.joined().dropna(subset=["sqnr_db"])
    operands = known[[*map(is_operand, known["layer_type"], known["tensor_name"])]]
    judged = operands if len(operands) else known
    lowest = judged.sort_values("sqnr_db").drop_duplicates("tensor").head(WORST)
    rows: list[tuple[object, ...]] = [("lowest SQNR dB", "format", "axis", "file")]
    for row in lowest.to_dict("records"):
        name = (row["quantized_format"], row["axis"], shown(Path(row["path"]).name))
        rows.append((_short(row["sqnr_db"]), *name))
    return align(rows, text=0)


def _short(value: float) -> str:
    return f"{value:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def as_csv(found: Statistics) -> str:
    """A row a tensor, format and axis with all columns; a row a tensor where there is no format."""
    frame = found.joined().drop(columns="tensor") if len(found.formats) else found.tensors
    frame = frame.assign(shape=[_shape(shape) for shape in frame["shape"]])
    text: str = with_safe_texts(frame).to_csv(index=False)
    return text


def with_safe_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table that is safe as CSV: no text is a formula or has a line break."""
    found = frame.copy()
    for name in frame.columns:
        if frame[name].dtype.kind in "biufc":
            continue
        cells = [csv_cell(value) if isinstance(value, str) else value for value in frame[name]]
        # dtype object, because pandas would turn a column of integers and None into floats
        found[name] = pd.Series(cells, frame.index, object)
    return found


def as_json(found: Statistics) -> str:
    """Lists of tensors and of formats. JSON has no NaN and no inf: null and "inf"."""
    content = {
        "tensors": [_plain(row) for row in found.tensors.to_dict("records")],
        "formats": [_plain(row) for row in found.formats.to_dict("records")],
        "problems": [{"path": str(each.path), "why": each.why} for each in found.problems],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [int(each) for each in value]
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def as_text(found: Statistics) -> str:
    """Columns below each other, nine significant digits."""
    tensors = found.tensors
    columns = [name for name in tensors.columns if name not in ("run_id", "path", "note", "dims")]
    named = [name for name in columns if name in _TENSOR]
    numbers = [name for name in columns if tensors[name].dtype.kind in "if" and name not in named]
    lines = [summary(found), "", "Tensors"]
    rows = [("tensor", *named, *numbers, "file")]
    for place, row in enumerate(tensors.to_dict("records")):
        of_row = [_cell(row[name]) for name in (*named, *numbers)]
        rows.append((str(place), *of_row, shown(Path(row["path"]).name)))
    lines += align(rows, text=0)
    if len(found.formats):
        header = tuple(found.formats.columns)
        body = [
            tuple(_cell(value) for value in row) for row in found.formats.itertuples(index=False)
        ]
        lines += ["", "Formats", *align([header, *body], text=0)]
    lines += ["", "Left out", *(f"  {each}" for each in found.problems)] if found.problems else []
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return _shape(value)
    if value is None or value is pd.NA or value == "":
        return "-"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


#: By the ending of a file's name.
WRITERS: dict[str, Callable[[Statistics], str]] = {
    ".csv": as_csv,
    ".json": as_json,
    ".txt": as_text,
}
