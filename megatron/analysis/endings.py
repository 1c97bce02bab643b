"""How the runs of a dump ended, from their cards.

A run writes `running` into its card when it begins and how it ended when it ends. A card that still
says `running` is that of a run that was killed, or that still writes: its dump may be a part only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.analysis.text_table import shown

if TYPE_CHECKING:
    from megatron.analysis.store import TensorStore

FINISHED = "finished"
UNKNOWN = "end unknown: there is no run card"
NO_END = "no end in its run card: it was killed, or still writes"
_WORDS = {"limited": "ended by a limit", "failed": "failed", "aborted": "training was aborted"}
_WHY = ("limit", "error", "reason")
_LONGEST = 90  #: characters of a reason


def ending(card: Mapping[str, Any]) -> str:
    """Return how a run ended, in words; `finished` if nothing is to be said."""
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
    return shown(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")


def unfinished(store: TensorStore) -> dict[str, str]:
    """Return how each run with a card ended that did not finish, by its id."""
    found = {}
    for run_id in store.runs():
        card = store.run_card(run_id) if run_id else {}
        if card and (words := ending(card)) != FINISHED:
            found[run_id] = words
    return found


def alarm(store: TensorStore) -> str:
    """Return one line for a figure; empty if every run with a card finished."""
    found = unfinished(store)
    named = [
        f"run {run_id} ({store.run_card(run_id).get('quant_type') or 'unknown type'}): {words}"
        for run_id, words in found.items()
    ]
    if len(named) <= 1:
        return shown("".join(named))
    count = f"{len(named)} of {len(store.runs())} runs did not finish"
    return shown(f"{count}; the first is {named[0]}")


def remarks_on(endings: Mapping[str, str]) -> list[str]:
    """Return a remark on each run that did not finish."""
    return [shown(f"run {run_id}: {words}") for run_id, words in endings.items()]
