"""statistics/ and global_statistics/: the numbers themselves, and one picture of all tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.diagnostics import diagnose
from megatron.analysis.dump.run_endings import ending
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    median_of,
    sheet,
)
from megatron.analysis.plots import plot_scales
from megatron.analysis.stats.export import with_safe_texts
from megatron.analysis.stats.result import words_of_repeats
from megatron.analysis.text_table import shown

GROUPS = ("quant_type", "layer_type", "operation", "kind", "tensor_name")
NUMBERS = ("sqnr_db", "cosine", "relative_bias", "underflow", "saturated", "axis_disagreement")


def draw_statistics(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """scales, tensors.csv and formats.csv."""
    if figure_data.tensors.empty:
        raise NothingToDrawError("no tensor could be read")
    yield "scales", partial(scales, figure_data)
    tensors = with_safe_texts(figure_data.found.tensors)
    yield "tensors.csv", partial(tensors.to_csv, index_label="tensor")
    yield "formats.csv", partial(figure_data.found.formats.to_csv, index=False)


def scales(figure_data: FigureData) -> Figure:
    """How large the values of each place are: the whole transformer on one page."""
    table = figure_data.tensors
    found = table.groupby("place")[["m0.01", "rms", "amax"]].median()
    found = found.reindex(figure_data.places_apart).reset_index()
    found = found.rename(columns={"place": "name", "m0.01": "low", "amax": "high"})
    found = found.assign(group=[name.rpartition(" ")[2] for name in found["name"]])
    found["name"] = found["name"].map(figure_data.label)
    figure, axes = sheet(9.0, 0.3 * len(found) + 1.8)
    plot_scales(found, ax=axes[0])
    note = "dot: rms; line: from the 1 % quantile of magnitudes to the largest; "
    note += f"{median_of(table, ['place'], 'row')}; {figure_data.origin}"
    figure_data.headline(figure, "Scale of each tensor", note)
    return figure


def draw_global(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """global_statistics.json and .txt."""
    found = summary(figure_data)
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    yield "global_statistics.json", lambda: text
    yield "global_statistics.txt", partial(as_text, found)


def summary(figure_data: FigureData) -> dict[str, Any]:
    """All that is known of the dump as a whole; numbers that do not exist are null."""
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
        "repeats": figure_data.found.repeats,
        "judged": figure_data.judged_origin,
        "overall": overall,
        "groups": groups,
        "formats": {name: _format(figure_data, name) for name in figure_data.formats},
        "warnings": [str(warning) for warning in diagnose(figure_data)],
        "notes": [
            f"{count:,} tensors: {note}" for note, count in figure_data.found.notes().items()
        ],
        "left_out": [str(problem) for problem in figure_data.found.problems],
        "missing": len(figure_data.store.missing),
    }


def _pooled_rms(table: pd.DataFrame) -> float:
    """Of all finite values together."""
    finite = table["finite"].sum()
    squares = (table["rms"].fillna(0.0) ** 2 * table["finite"]).sum()
    return math.sqrt(squares / finite) if finite else math.nan


def _format(figure_data: FigureData, name: str) -> dict[str, Any]:
    """Return the lowest, median and highest numbers over the tensors that judge a format."""
    mine = figure_data.judged[figure_data.judged["quantized_format"] == name]
    found: dict[str, Any] = {"tensors": len(mine)}
    for column in NUMBERS:
        known = mine[column].dropna()
        if len(known):
            shares = {"lowest": 0.0, "median": 0.5, "highest": 1.0}
            found[column] = {
                word: _plain(known.quantile(share, interpolation="nearest"))
                for word, share in shares.items()
            }
    return found


def _plain(value: float) -> float | str | None:
    """For JSON, which has neither NaN nor Inf."""
    value = float(value)
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def as_text(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"Statistics of {found['folder']}", ""]
    lines += [f"  run {run or '(unknown)'}: {how}" for run, how in found["endings"].items()]
    lines += [f"  {words_of_repeats(found['repeats'])}"] if found["repeats"] else []
    lines += [""]
    lines += [f"  {name:<8} {value}" for name, value in found["overall"].items()]
    for column, groups in found["groups"].items():
        lines += ["", f"By {column}"]
        lines += [
            f"  {name:<18} {part['tensors']:>7} tensors  {part['values']:>14} values  "
            f"rms {_text(part['rms'])}  amax {_text(part['amax'])}"
            for name, part in groups.items()
        ]
    for name, part in found["formats"].items():
        lines += ["", f"{name}, {part['tensors']} of {found['judged']}: lowest, median, highest"]
        lines += [
            f"  {column:<18} " + "  ".join(f"{_text(x):>13}" for x in numbers.values())
            for column, numbers in part.items()
            if isinstance(numbers, dict)
        ]
    for title, key in (
        ("Warnings", "warnings"),
        ("Notes", "notes"),
        ("Left out", "left_out"),
    ):
        if found[key]:
            lines += ["", title, *(f"  {line}" for line in found[key])]
    if found["missing"]:
        lines += ["", f"{found['missing']} files that an index names are not there"]
    return "\n".join(lines) + "\n"


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.9g}"
