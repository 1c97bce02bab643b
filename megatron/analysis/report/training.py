"""Collect the loss of each run and the events of its collection, for the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.dump.run_endings import FINISHED, ending
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.report.json_numbers import plain
from megatron.analysis.text_table import shown

MOST_POINTS = 2000  #: approximate maximum number of iterations per run in the report
MOST_NOTES = 20  #: maximum number of notes per run
NOTE_LENGTH = 400  #: maximum length of a note, in characters
#: Patterns that match the message of `LossSpikeDetector.look`, and each named number in it.
_JUMP = re.compile(r"((?:loss|gradient norm) .*) at iteration (\d{1,15})", re.ASCII)
_NUMBER = re.compile(r"\b(loss|gradient norm) (?=[-\d.naif])([^ ,]+)")


def training(figure_data: FigureData, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the loss, the gradient norm and the events of each run, in the order of `runs`.

    `kept` lists the iterations at which a ring buffer was written. `thinned` is true if some
    iterations are left out; the lowest and highest values and all collected iterations remain.
    """
    curves = dict(iter(figure_data.store.loss_curve().groupby("run_id", sort=False)))
    collected = figure_data.tensors.groupby(figure_data.tensors["run_id"].fillna("").astype(str))
    numbers = {run: sorted({*map(int, part["iteration"])}) for run, part in collected}
    entries = []
    for run in runs:
        events = [event for event in figure_data.store.events if event.get("run_id") == run]
        curve = curves.get(run)
        entry: dict[str, Any] = {
            "collected": numbers.get(run, []),
            "kept": sorted({number for event in events if (number := _jump_of(event))}),
            "notes": notes(events) + _end(figure_data.store.run_card(run) if run else {}),
        }
        if curve is not None and len(curve):
            part = thinned(curve, {*entry["collected"]})
            entry |= {
                "iteration": [int(i) for i in part["iteration"]],
                "loss": [plain(value) for value in part["loss"]],
                "grad_norm": [plain(value) for value in part["grad_norm"]],
                "broken": [int(i) for i in part.loc[~part["finite"], "iteration"]],
                "thinned": len(part) < len(curve),
            }
        entries.append(entry)
    return entries


def thinned(curve: pd.DataFrame, keep: set[int]) -> pd.DataFrame:
    """Return about `MOST_POINTS` rows of a loss curve that preserve its shape.

    Each group of consecutive rows is represented by its lowest and highest loss and gradient norm.
    Rows of the iterations in `keep`, and rows that are not finite, remain.
    """
    if len(curve) <= MOST_POINTS:
        return curve
    chosen = (curve["iteration"].isin(keep) | ~curve["finite"]).to_numpy(copy=True)
    chosen[[0, -1]] = True
    for part in np.array_split(np.arange(len(curve)), MOST_POINTS // 4):
        for name in ("loss", "grad_norm"):
            values = curve[name].to_numpy()[part]
            if not np.isnan(values).all():
                chosen[part[[np.nanargmin(values), np.nanargmax(values)]]] = True
    return curve[chosen]


def notes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence per distinct event of a collection, and how many ranks reported it."""
    counts = Counter(text for text in map(_sentence, events) if text)
    texts = [text if count == 1 else f"{text} ({count} ranks)" for text, count in counts.items()]
    texts = [shown(text[:NOTE_LENGTH]) for text in texts]
    more = len(texts) - MOST_NOTES
    return texts if more <= 0 else [*texts[:MOST_NOTES], f"{more} more events"]


def _sentence(event: Mapping[str, Any]) -> str:
    """Return what an event means; an empty string for an event that needs no note."""
    why, number = event.get("why"), event.get("iteration")
    iterations = as_words([*map(int, _list(event.get("iterations")))])
    match event.get("event"):
        case "kept" if iterations:
            return f"The ring was written: {_cause(why)}. The dump has {iterations}."
        case "kept":
            return f"The ring could not be written: {_cause(why)}."
        case "let_go":
            return f"The ring of {iterations or 'no iteration'} was discarded: {why}."
        case "left_out":
            return f"Tensors of iteration {number} are missing, because the ring was full: {why}."
        case "limited":
            return f"A limit ended the collection: {why}."
        case "failed":
            return f"Writing failed: {why}."
        case "switched":
            return f"The flag file switched the collection {event.get('to')} at iteration {number}."
    return ""


def _cause(why: Any) -> str:
    """Return why a ring was written, as a clause; see `LossSpikeDetector.look` for the message."""
    jump = _JUMP.fullmatch(str(why))
    if jump is None:
        return str(why)
    numbers = _NUMBER.sub(r"the \1 was \2", jump[1].replace("times the level", "times its level"))
    return f"at iteration {jump[2]}, {numbers}"


def _jump_of(event: Mapping[str, Any]) -> int | None:
    """Return the iteration that caused a ring to be written; None for other kinds of events."""
    if event.get("event") != "kept":
        return None
    jump = _JUMP.fullmatch(str(event.get("why")))
    return int(jump[2]) if jump else max(_list(event.get("iterations")), default=None)


def _list(value: Any) -> list[int]:
    valid = isinstance(value, list) and all(type(each) is int for each in value)
    return value if valid else []


def as_words(numbers: Sequence[int]) -> str:
    """Return text such as "iterations 3 to 5 and 9"; an empty string if there are no numbers."""
    if not numbers:
        return ""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"iteration{'' if len(set(numbers)) == 1 else 's'} {text}"


def _end(card: Mapping[str, Any]) -> list[str]:
    text = ending(card, longest=NOTE_LENGTH)
    return [] if text == FINISHED or not card else [f"How the run ended: {text}."]
