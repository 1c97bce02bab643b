"""Describe the two runs of a comparison, and list the settings that differ in their run cards."""

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
#: An argument with one of these words in its name is not compared, because it only sets where the
#: run writes, or how often something is logged.
_HARMLESS_WORDS = frozenset(
    ("dir", "save", "log", "logger", "logging", "tensorboard", "wandb", "mlflow", "timestamp")
)
#: Other arguments that are not compared. Instead of `load`, the entry `loaded` of the run card is
#: compared: the checkpoint from which a run really started.
_HARMLESS = frozenset(("load", "data_cache_path", "rank", "local_rank", "node_rank"))
#: Prefixes of the environment variables that are compared, except `_HARMLESS_VARIABLES`. The other
#: variables in a run card only set flags and formats, which are compared themselves.
_ENVIRONMENT = ("CUDA", "CUBLAS", "NCCL", "NVIDIA_TF32", "NVTE", "OMP_NUM_THREADS", "LAB_FUSED")
_HARMLESS_VARIABLES = frozenset(("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH"))
MISSING = "(not given)"


@dataclass(frozen=True)
class Facts:
    """Description of the two runs: a line about each, the settings that differ, and notes."""

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
                f"{name}: {len(side.store.missing)} file(s) listed in an index are missing"
            )
    if a.by_sample:
        notes.append(
            "the numbers of data-parallel ranks differ: micro-batches are paired by their first "
            "sample"
        )
    if comparison.gradient_scale != 1:
        notes.append(
            f"the gradients of B are multiplied by {comparison.gradient_scale:g}, because the runs "
            "divide the loss of a micro-batch by different numbers"
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
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not {"quant_type", "accumulator"} & set(pairs):
        pairs |= _differing_matmuls(a, b)
    return {_cut(name): (_cut(values[0]), _cut(values[1])) for name, values in pairs.items()}


def _settings(card: Mapping[str, Any]) -> dict[str, str]:
    settings = {name: card.get(name) for name in _FACTS}
    settings |= _formats(card) | _start(card)
    for group in _GROUPS:
        for name, value in _mapping(card.get(group)).items():
            if name not in _HARMLESS and not _HARMLESS_WORDS & set(name.split("_")):
                settings.setdefault(name, value)
    for name, value in _mapping(card.get("environment")).items():
        if name.startswith(_ENVIRONMENT) and name not in _HARMLESS_VARIABLES:
            settings.setdefault(name, value)
    return {str(name): str(value) for name, value in settings.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return an entry of a run card if it is a mapping, and an empty mapping otherwise."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _formats(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accumulator that all matmuls use, the recipe's hash, and the commit of the code.

    `quant_type` describes all other formats that are the same in every layer.
    """
    settings: dict[str, Any] = {}
    for line in _list(card.get("formats")):
        name, _, value = str(line).partition(": ")
        if name == "accumulator":
            settings[name] = value.partition(" (")[0]  # without its source
    if "digest" in (recipe := _mapping(card.get("recipe"))):
        settings["recipe_digest"] = recipe["digest"]
    if "commit" in (git := _mapping(card.get("git"))):
        settings["commit"] = f"{git['commit']}{' with changes' if git.get('modified') else ''}"
    return settings


def _start(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint from which a run started, if any."""
    loaded = _mapping(card.get("loaded"))
    names = ("checkpoint", "iteration", "weights_only")
    return {f"loaded_{name}": loaded[name] for name in names if name in loaded}


def _differing_matmuls(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return, for two cards with format audits, the first line of each that the other lacks."""
    first, second = _matmuls(a), _matmuls(b)
    if not first or not second or first == second:
        return {}
    only = [
        next((line for line in lines if line not in others), MISSING)
        for lines, others in ((first, set(second)), (second, set(first)))
    ]
    return {"formats": (only[0], only[1])} if only != [MISSING, MISSING] else {}


def _matmuls(card: Mapping[str, Any]) -> list[str]:
    """Return one line per group of matmuls in the format audit, without the source of the formats.

    Lines of a later period of a recipe begin with the iteration in which the period starts.
    """
    lines = []
    for number, part in enumerate(map(_mapping, _list(card.get("quantization")))):
        when = f"from iteration {part.get('iteration')} on, " if number else ""
        for matmul in map(_mapping, _list(part.get("operands"))):
            slots = [f"{name} {fmt}" for name, fmt in _mapping(matmul.get("slots")).items()]
            marks = map(str, _list(matmul.get("marks")))
            softmax = [f"softmax {matmul['softmax']}"] if matmul.get("softmax") else []
            formats = ", ".join([*slots, *marks, *softmax])
            lines.append(f"{when}{matmul.get('modules')} {matmul.get('operation')}: {formats}")
    return lines


def _cut(text: str) -> str:
    """Return a text in printable form; a text longer than `_SHOWN` characters loses its middle."""
    half = (_SHOWN - 3) // 2
    return shown(text if len(text) <= _SHOWN else f"{text[:half]}...{text[-half:]}")
