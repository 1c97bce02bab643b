"""Describe the two runs of a comparison by their run cards: what each is, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.analysis.diff.comparison import Comparison
from megatron.analysis.diff.sides import Side
from megatron.analysis.dump.run_endings import ending
from megatron.analysis.text_table import shown

NAMED = 12  #: maximum number of differing settings that the text lists
_SHOWN = 80  #: maximum length of a setting's value, in characters
_FACTS = ("quant_type", "seed", "device", "platform")
_GROUPS = ("versions", "topology", "arguments")
#: An argument whose name contains one of these is not compared: it says where files are or how
#: often something is logged.
_HARMLESS = ("dir", "path", "save", "load", "log", "tensorboard", "wandb", "timestamp", "rank")
MISSING = "(not given)"


@dataclass(frozen=True)
class Facts:
    """Description of the two runs: what each is, and how their settings differ."""

    runs: tuple[str, str]  #: one line about each run
    settings: dict[str, tuple[str, str]]  #: settings that differ, with the values in A and B
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  #: files of the dumps that cannot be read

    def lines(self) -> list[str]:
        """Return the facts as lines of text."""
        lines = [f"{name}: {run}" for name, run in zip("AB", self.runs, strict=True)]
        named = [f"{name} {a} | {b}" for name, (a, b) in list(self.settings.items())[:NAMED]]
        if more := len(self.settings) - len(named):
            named.append(f"and {more} more")
        lines += [f"settings that differ (A | B): {'; '.join(named)}"] if named else []
        lines += [f"[NOTE] {note}" for note in self.notes]
        return [*lines, *(f"[ERROR] {problem}" for problem in self.problems)]


def facts_of(comparison: Comparison) -> Facts:
    """Return the facts about the two runs of a comparison."""
    a, b = comparison.a, comparison.b
    notes = []
    for name, side in zip("AB", (a, b), strict=True):
        if side.repeats:
            notes.append(
                f"{name}: {side.repeats} records of recomputed forward passes are left out, "
                "because the first pass was saved, too"
            )
        if len(side.store.missing):
            notes.append(
                f"{name}: {len(side.store.missing)} file(s) that an index names are missing"
            )
    if a.by_sample:
        notes.append(
            "the numbers of data-parallel ranks differ: micro-batches are paired by their first "
            f"sample, and the gradients of B are multiplied by {comparison.gradient_scale:g}"
        )
    settings = differing(a.card, b.card)
    if "seed" in settings:
        notes.append("the seeds differ, so that differences from the first tensor on are expected")
    problems = [
        f"{name}: {problem}"
        for name, side in zip("AB", (a, b), strict=True)
        for problem in side.store.problems
    ]
    if a.store.folder.resolve() == b.store.folder.resolve():
        problems = [problem for problem in problems if problem.startswith("A")]
    return Facts((_run(a), _run(b)), settings, notes, problems)


def _run(side: Side) -> str:
    card = side.card
    names = {"quant_type": "", "seed": "seed ", "device": "on "}
    known = [f"{word}{card[name]}" for name, word in names.items() if card.get(name) is not None]
    run = side.run_id or "(unknown run)"
    parts = [f"run {run}", *known, f"{len(side.store)} tensors", ending(card)]
    return f"{shown(side.store.folder)}: {', '.join(map(shown, parts))}"


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the settings that differ between two run cards; empty if a card is missing."""
    if not a or not b:
        return {}
    first, second = _settings(a), _settings(b)
    names = dict.fromkeys([*first, *second])
    pairs = {name: (first.get(name, MISSING), second.get(name, MISSING)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(card: Mapping[str, Any]) -> dict[str, str]:
    settings = {name: card.get(name) for name in _FACTS}
    for group in _GROUPS:
        content = card.get(group)
        for name, value in content.items() if isinstance(content, Mapping) else ():
            if not any(part in name for part in _HARMLESS):
                settings.setdefault(name, value)
    return {shown(name)[:_SHOWN]: shown(value)[:_SHOWN] for name, value in settings.items()}
