"""Report how the runs of a dump ended, according to their run cards.

A run card has the status `running` until the run ends and writes its final status. If the status is
still `running`, the run was killed or is not finished, and its dump may be incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.analysis.text_table import shown

if TYPE_CHECKING:
    from megatron.analysis.store import TensorStore

FINISHED = "finished"
UNKNOWN = "end unknown: there is no run card"
NO_END = "no end in its run card: the run was killed or is in progress"
_WORDS = {"limited": "ended by a limit", "failed": "failed", "aborted": "training was aborted"}
_WHY = ("limit", "error", "reason")
_LONGEST = 90  #: maximum length of a description of how a run ended, in characters


def ending(card: Mapping[str, Any], *, longest: int = _LONGEST) -> str:
    """Return a description of how a run ended, such as "finished" if it ended as planned.

    The description is cut to `longest` characters.
    """
    if not card:
        return UNKNOWN
    status = card.get("status")
    if status == FINISHED:
        return FINISHED
    if status is None or status == "running":
        return NO_END
    why = next((card[name] for name in _WHY if isinstance(card.get(name), str)), "")
    word = _WORDS.get(status) if isinstance(status, str) else None
    text = f"{word or f'status {status!s}'}{': ' if why else ''}{why}"
    return shown(text if len(text) <= longest else f"{text[:longest]} ...")


def unfinished(store: TensorStore) -> dict[str, str]:
    """Return a dictionary from the ID of each unfinished run to a description of how it ended.

    Runs without a card are left out.
    """
    endings = {}
    for run_id in store.runs():
        card = store.run_card(run_id) if run_id else {}
        if card and (words := ending(card)) != FINISHED:
            endings[run_id] = words
    return endings


def alarm(store: TensorStore) -> str:
    """Return a one-line warning about unfinished runs for a figure, or "" if there are none."""
    named = [
        f"run {run_id} ({store.run_card(run_id).get('quant_type') or 'unknown type'}): {words}"
        for run_id, words in unfinished(store).items()
    ]
    if len(named) <= 1:
        return shown("".join(named))
    count = f"{len(named)} of {len(store.runs())} runs did not finish"
    return shown(f"{count}; the first is {named[0]}")


def remarks_on(endings: Mapping[str, str]) -> list[str]:
    """Return one printable line per unfinished run, given the result of `unfinished`."""
    return [shown(f"run {run_id}: {words}") for run_id, words in endings.items()]
