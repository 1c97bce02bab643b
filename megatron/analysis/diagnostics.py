"""Find problems in a dump and report each one as a warning with the relevant numbers.

The warnings cover incomplete runs and tensors, NaN and Inf values, dead channels, outliers, and
formats with large errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from megatron.analysis.dump.run_endings import unfinished
from megatron.analysis.plots.style import percent

if TYPE_CHECKING:
    from megatron.analysis.figures.figure_data import FigureData

#: A format gets a warning if clipping causes more than this share of its squared error. At a share
#: of one half, clipping costs 3 dB.
CLIPPING = 0.5
UNDERFLOW = 0.1  #: a format gets a warning if more than this share of nonzero values becomes zero
#: A format gets a warning if its SQNR in dB is below this value. At 10 dB, the power of the error
#: is a tenth of the power of the signal.
SQNR = 10.0
BIAS = 0.01  #: a format gets a warning if its |mean error| / mean magnitude exceeds this value
GAIN = 0.05  #: a format gets a warning if its |gain| exceeds this value
NAMED = 3  #: maximum number of tensors that a warning lists
#: maximum number of notes (on what was not measured, and why) that get a warning of their own; all
#: other notes share one warning
NOTES = 6


@dataclass(frozen=True)
class Diagnostic:
    """A warning about tensors, about a format, or about a run."""

    #: Kind of the warning: unfinished, partial, nan, poisoned, overflow, clipping, underflow,
    #: low_sqnr, bias, gain, dead_channels or outliers.
    kind: str
    text: str
    #: Indices of the affected tensors. If the text names the worst tensors, they come first. For an
    #: unfinished run, only its first tensor is included.
    tensors: tuple[int, ...]
    format: str = ""  #: format that the warning is about, or an empty string

    def __str__(self) -> str:
        return self.text


def diagnose(figure_data: FigureData) -> list[Diagnostic]:
    """Return all warnings about a dump.

    Warnings about unfinished runs come first, followed by the warnings of `find_diagnostics`.
    """
    tensors = figure_data.tensors
    diagnostics = []
    for run_id, ending in unfinished(figure_data.store).items():
        rows = tensors[tensors["run_id"] == run_id]
        kind = rows["quant_type"].iloc[0] if len(rows) else "no tensor"
        text = f"run {run_id} ({kind}): {ending}"
        diagnostics.append(Diagnostic("unfinished", text, tuple(rows["tensor"].head(1))))
    return diagnostics + find_diagnostics(figure_data.judged, tensors)


def find_diagnostics(uses: pd.DataFrame, tensors: pd.DataFrame) -> list[Diagnostic]:
    """Return the warnings about tensors, starting with the most serious kind.

    Args:
        uses: rows of `FigureData.judged`.
        tensors: rows of `FigureData.tensors`; only operands are checked for outliers.
    """
    diagnostics = _partial(tensors) + _values(tensors)
    for name, rows in uses.groupby("quantized_format", sort=False):
        diagnostics += _of_format(str(name), rows)
    lost = ("poisoned", "overflow", "clipping", "underflow")
    grave = ("partial", "nan", *lost, "low_sqnr", "bias", "gain")
    order = {kind: place for place, kind in enumerate((*grave, "dead_channels", "outliers"))}
    return sorted(diagnostics, key=lambda diagnostic: order[diagnostic.kind])


def _partial(tensors: pd.DataFrame) -> list[Diagnostic]:
    """Return warnings about incomplete tensors, grouped by their note."""
    noted = tensors[tensors["note"].astype(str) != ""]
    groups = [(str(note), rows["tensor"]) for note, rows in noted.groupby("note", observed=True)]
    groups.sort(key=lambda group: -len(group[1]))
    diagnostics = [
        Diagnostic("partial", f"{len(ids):,} of {len(tensors):,} tensors: {note}", tuple(ids))
        for note, ids in groups[:NOTES]
    ]
    if more := groups[NOTES:]:
        others = tuple(tensor for _, ids in more for tensor in ids)
        text = f"{len(others):,} of {len(tensors):,} tensors: {len(more)} other notes"
        diagnostics.append(Diagnostic("partial", text, others))
    return diagnostics


def _values(tensors: pd.DataFrame) -> list[Diagnostic]:
    """Return warnings about NaN and Inf values, dead channels and outlier channels."""
    special = tensors.assign(special=tensors["nan"] + tensors["inf"])
    rules = (
        ("nan", special, "special", 0, "hold NaN or Inf", lambda x: f"{x:.0f} values"),
        (
            "dead_channels",
            tensors,
            "dead_channels",
            0,
            "have channels of zeros only",
            lambda x: f"{x:.0f} channels",
        ),
        (
            "outliers",
            tensors[tensors["operand"]],
            "outlier_channels",
            0,
            "have outlier channels (6 times the median amax)",
            lambda x: f"{x:.0f} channels",
        ),
    )
    return [diagnostic for rule in rules for diagnostic in _rule(*rule)]


def _of_format(name: str, uses: pd.DataFrame) -> list[Diagnostic]:
    """Return warnings about the quantization errors of one format."""
    uses = uses.assign(
        badness=-uses["sqnr_db"],
        bias_size=uses["relative_bias"].abs(),
        gain_size=uses["gain"].abs(),
        overflow=uses["finite"] - uses["compared"] - uses["poisoned"],
    )
    rules = (
        (
            "poisoned",
            "poisoned",
            0,
            "turns finite values into NaN (in a block with NaN or Inf)",
            lambda x: f"{x:.0f} values",
        ),
        ("overflow", "overflow", 0, "turns finite values into Inf", lambda x: f"{x:.0f} values"),
        (
            "clipping",
            "clipping_error",
            CLIPPING,
            f"owes more than {percent(CLIPPING)} of its squared error to clipping",
            percent,
        ),
        (
            "underflow",
            "underflow",
            UNDERFLOW,
            f"turns more than {percent(UNDERFLOW)} of the nonzero values into zero",
            percent,
        ),
        ("low_sqnr", "badness", -SQNR, f"has an SQNR below {SQNR:g} dB", lambda x: f"{-x:.1f} dB"),
        (
            "bias",
            "bias_size",
            BIAS,
            f"has a bias of more than {percent(BIAS)} of the mean magnitude",
            percent,
        ),
        (
            "gain",
            "gain_size",
            GAIN,
            f"shrinks or enlarges tensors by more than {percent(GAIN)} (gain)",
            percent,
        ),
    )
    return [
        diagnostic
        for kind, column, limit, words, number in rules
        for diagnostic in _rule(kind, uses, column, limit, words, number, name)
    ]


def _rule(
    kind: str,
    table: pd.DataFrame,
    column: str,
    limit: float,
    words: str,
    number: Callable[[float], str],
    fmt: str = "",
) -> list[Diagnostic]:
    """Return a warning about the rows of `table` whose value in `column` exceeds `limit`.

    The result is a list with this warning, or an empty list if there are no such rows.
    """
    beyond = table[table[column] > limit].sort_values(column, ascending=False, kind="stable")
    if beyond.empty:
        return []
    worst = ", ".join(
        f"L{row['layer_idx']} {row['place']} ({number(row[column])})"
        for row in beyond.drop_duplicates(["layer_idx", "place"]).head(NAMED).to_dict("records")
    )
    what = "operands" if table["operand"].all() else "tensors"
    tensors = f"{len(beyond):,} of {len(table):,} {what}"
    text = f"{fmt} {words}: {tensors}" if fmt else f"{tensors} {words}"
    return [Diagnostic(kind, f"{text}; worst: {worst}", tuple(beyond["tensor"]), fmt)]
