"""What a reader must not miss, in words and with the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from megatron.analysis.dump.run_endings import unfinished
from megatron.analysis.plots.style import percent
from megatron.fake_quant import get_format
from megatron.fake_quant.formats import BlockScaling

if TYPE_CHECKING:
    from megatron.analysis.figures.figure_data import FigureData

SATURATED = 0.001  #: share of values that are clipped
#: The same share for scale rules that clip some of the largest values of a block by design.
SATURATED_BY_DESIGN = 0.1
CLIPPING_RULES = ("floor", "even")
UNDERFLOW = 0.1  #: share of values that become zero
SQNR = 10.0  #: dB; the error has a tenth of the signal's power
BIAS = 0.01  #: of the mean magnitude
NAMED = 3  #: tensors that a warning names
NOTES = 6  #: of different words; more are counted


@dataclass(frozen=True)
class Diagnostic:
    """One kind of trouble."""

    #: unfinished, partial, nan, saturation, poisoned, underflow, low_sqnr, bias, dead_channels,
    #: outliers
    kind: str
    text: str
    tensors: tuple[int, ...]  #: all that it is about, worst first
    format: str = ""  #: the format that the trouble concerns; empty if it concerns none

    def __str__(self) -> str:
        return self.text


def diagnose(figure_data: FigureData) -> list[Diagnostic]:
    """Return the warnings about a dump: on runs that did not finish, then `find_diagnostics`."""
    tensors = figure_data.tensors
    endings = unfinished(figure_data.store)
    found = [
        Diagnostic("unfinished", f"run {run_id} ({kind}): {words}", tuple(mine["tensor"].head(1)))
        for run_id, words in endings.items()
        for mine in [tensors[tensors["run_id"] == run_id]]
        for kind in [mine["quant_type"].iloc[0] if len(mine) else "no tensor"]
    ]
    return found + find_diagnostics(figure_data.judged, tensors)


def find_diagnostics(uses: pd.DataFrame, tensors: pd.DataFrame) -> list[Diagnostic]:
    """Return the warnings about tensors, the most serious first.

    Args:
        uses: the rows of `FigureData.judged`.
        tensors: the rows of `FigureData.tensors`; only operands are searched for outliers.
    """
    found = _partial(tensors) + _values(tensors)
    for name, mine in uses.groupby("quantized_format", sort=False):
        found += _of_format(str(name), mine)
    grave = ("partial", "nan", "saturation", "poisoned", "underflow", "low_sqnr", "bias")
    order = {kind: place for place, kind in enumerate((*grave, "dead_channels", "outliers"))}
    return sorted(found, key=lambda warning: order[warning.kind])


def _partial(tensors: pd.DataFrame) -> list[Diagnostic]:
    """What the statistics say of tensors that are not whole, or for which formats are left out."""
    noted = tensors[tensors["note"].astype(str) != ""]
    groups = [(str(note), rows["tensor"]) for note, rows in noted.groupby("note", observed=True)]
    groups.sort(key=lambda group: -len(group[1]))
    found = [
        Diagnostic("partial", f"{len(mine):,} of {len(tensors):,} tensors: {note}", tuple(mine))
        for note, mine in groups[:NOTES]
    ]
    if more := groups[NOTES:]:
        others = tuple(tensor for _, mine in more for tensor in mine)
        text = f"{len(others):,} of {len(tensors):,} tensors: {len(more)} other notes"
        found.append(Diagnostic("partial", text, others))
    return found


def _values(tensors: pd.DataFrame) -> list[Diagnostic]:
    """About the values themselves."""
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
    return [w for rule in rules for w in _rule(*rule)]


def _of_format(name: str, mine: pd.DataFrame) -> list[Diagnostic]:
    """About what one format does."""
    mine = mine.assign(badness=-mine["sqnr_db"], bias_size=mine["relative_bias"].abs())
    scaling = get_format(name).scaling
    by_design = isinstance(scaling, BlockScaling) and scaling.rule in CLIPPING_RULES
    saturated = SATURATED_BY_DESIGN if by_design else SATURATED
    rules = (
        (
            "poisoned",
            "poisoned",
            0,
            "turns finite values into NaN (of a block with NaN)",
            lambda x: f"{x:.0f} values",
        ),
        (
            "saturation",
            "saturated",
            saturated,
            f"saturates more than {percent(saturated)}",
            percent,
        ),
        (
            "underflow",
            "underflow",
            UNDERFLOW,
            f"makes zero of more than {percent(UNDERFLOW)} of the values",
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
    )
    return [
        warning
        for kind, column, limit, words, number in rules
        for warning in _rule(kind, mine, column, limit, words, number, name)
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
    """One warning if any row is beyond the limit."""
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
