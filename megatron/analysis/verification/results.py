"""Recompute the results of one run, pass by pass, and define the class of findings.

This module determines which records belong to the same matmul, and the formats of the matmul. If
the run card does not describe attention, the module assumes a causal mask, the default scale and no
dropout. If no attention result of the run agrees under these assumptions, the assumptions may be
wrong, and attention counts as not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.store import TensorStore
from megatron.analysis.text_table import shown
from megatron.analysis.verification import recorded_formats
from megatron.analysis.verification.recompute_attention import RESULTS, AttentionFormats, attention
from megatron.analysis.verification.recompute_linear import LINEAR, Outcome, Recomputation, linear
from megatron.analysis.verification.recorded_formats import NotCheckedError, Softmax
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.packing import QuantizedTensor
from megatron.fake_quant.tiles.attention import default_tiling
from megatron.tensor_record import CODES, OF_ITERATION

_UNKNOWN_ATTENTION = "attention with unknown mask, scale and dropout (no arguments in the run card)"
#: Columns that identify a pass through a layer. A linear layer is checked on each rank separately.
#: Attention is checked jointly on all ranks that share its sequences.
LINEAR_PASS = ["iteration", "micro_batch", "module", "rank"]
ATTENTION_PASS = ["iteration", "micro_batch", "module", "tp", "dp"]
#: layer type and record of a matmul result, and the outcome of its check
CheckedResult = tuple[str, Any, Outcome]


#: Slots in which each tensor is an operand, by layer type; its record has the formats of its slots.
_SLOTS = {
    "linear": {
        "input": ("fprop_a", "wgrad_a"),
        "weight": ("fprop_b", "dgrad_b"),
        "grad_output": ("dgrad_c", "wgrad_c"),
    },
    "attention": {
        "query": ("fprop_a", "wgrad_a"),
        "key": ("fprop_b", "dgrad_b"),
        "value": ("fprop_b", "dgrad_b"),
        "grad_output": ("dgrad_c", "wgrad_c"),
    },
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Error found in a dump, or note about something harmless."""

    what: str  #: kind of finding, in one or two words
    where: str  #: file, run, rank or module that is affected
    text: str
    note: bool = False

    def __str__(self) -> str:
        """Return the finding as one line of text, with control characters in names escaped."""
        kind = "note" if self.note else "ERROR"
        return f"{kind}  {self.what}: {shown(self.where)}: {shown(self.text)}"


@dataclass(frozen=True)
class Results:
    """Outputs and gradients of one run, to be checked by recomputation."""

    store: TensorStore
    #: records whose files passed the check, without tensors that activation recomputation saved a
    #: second time
    records: pd.DataFrame
    card: Mapping[str, Any]
    slack: float

    def check(self, progress: Callable[[], object]) -> Iterator[CheckedResult]:
        """Check every result; for each one, yield the layer type, the record and the outcome.

        `progress` is called after each pass.
        """
        of_attention = self.records["layer_type"] == "attention"
        once = self._of_iteration()
        for key, rows in self._passes(self.records[~of_attention], LINEAR_PASS):
            try:
                yield from (
                    ("linear layers", row, outcome)
                    for row, outcome in self._linear(rows, once.get((key[0], *key[2:]), {}))
                )
            except _IMPOSSIBLE as error:
                yield "linear layers", rows.iloc[0], _impossible(error)
            progress()
        outcomes: list[tuple[Any, Outcome]] = []
        for _, rows in self._passes(self.records[of_attention], ATTENTION_PASS):
            try:
                outcomes += self._attention(rows)
            except _IMPOSSIBLE as error:
                outcomes.append((rows.iloc[0], _impossible(error)))
            progress()
        some_agree = any(
            isinstance(outcome, Recomputation) and not outcome.wrong for _, outcome in outcomes
        )
        described = self.card.get("arguments") or self.card.get("quantization")
        for row, outcome in outcomes:
            if not described and not some_agree and isinstance(outcome, Recomputation):
                outcome = NotCheckedError(_UNKNOWN_ATTENTION)
            yield "attention", row, outcome

    @staticmethod
    def _passes(records: pd.DataFrame, keys: list[str]) -> Any:
        return records.groupby(keys, sort=False, dropna=False)

    def _of_iteration(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Return the records of weights and of their codes, keyed by iteration, module and rank.

        All micro-batches of an iteration share a weight, so it may be saved in only one of them.
        """
        shared: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.records[self.records["tensor_name"].isin(OF_ITERATION)].itertuples():
            shared.setdefault((row.iteration, row.module, row.rank), {})[row.tensor_name] = row
        return shared

    def _tensors(self, rows: Iterable[Any]) -> dict[str, Tensor]:
        return {row.tensor_name: self.store.load(row) for row in rows if row.codes is None}

    def _codes(self, by_name: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
        """Return the saved codes of the operands, keyed by slot (operand of one GEMM)."""
        return {
            slot: self.store.load_codes(by_name[name])
            for slot, name in zip(SLOTS, CODES["linear"], strict=True)
            if name in by_name
        }

    def _linear(self, rows: pd.DataFrame, once: Mapping[str, Any]) -> Iterator[tuple[Any, Outcome]]:
        """Check one pass of a linear layer on one rank; yield each result's record and outcome.

        If several combinations of formats are possible, the best outcome is used.

        Args:
            rows: records of the pass.
            once: records that the passes of the iteration share, by name; see `_of_iteration`.
        """
        by_name = dict(once) | {row.tensor_name: row for row in rows.itertuples()}
        first = rows.iloc[0]
        try:
            check_whole(by_name.values())
            check_known(by_name.values())
            of_card = recorded_formats.of_card(
                self.card, first["module"], "linear", int(first["iteration"])
            )
            names = [
                by_name[name].format if name in by_name else None
                for name in ("input", "weight", "grad_output")
            ]
            accumulators = recorded_formats.of_accumulate(first["accumulate"], "linear")
            candidates = (
                [of_card]
                if of_card
                else recorded_formats.of_records(*names, accumulators=accumulators)
            )
        except NotCheckedError as reason:
            yield from ((by_name[name], reason) for name in LINEAR if name in by_name)
            return
        if of_card:
            yield from _contradictions(by_name, dict.fromkeys(_SLOTS["linear"], of_card))
        tensors, codes = self._tensors(by_name.values()), self._codes(by_name)
        slots = zip(SLOTS, CODES["linear"], strict=True)
        of_codes = {slot: by_name[name].format for slot, name in slots if name in by_name}
        amaxes = _amaxes(rows.itertuples())
        best: dict[str, Outcome] = {}
        for candidate in candidates:
            formats = recorded_formats.with_drawn_signs(candidate, of_codes)
            for name, outcome in linear(tensors, formats, self.slack, codes=codes, amaxes=amaxes):
                best[name] = _better(best.get(name), outcome)
        yield from ((by_name[name], outcome) for name, outcome in best.items())

    def _attention(self, rows: pd.DataFrame) -> Iterator[tuple[Any, Outcome]]:
        """Check one pass of attention; yield each result's record and outcome.

        `rows` contains the records of all ranks that share the sequences.
        """
        ranks = [of_rank for _, of_rank in rows.groupby("cp", sort=True, dropna=False)]
        by_rank = [{row.tensor_name: row for row in of_rank.itertuples()} for of_rank in ranks]
        try:
            check_whole(rows.itertuples())
            check_known(rows.itertuples())
            sizes = rows["cp_size"].iloc[0]
            if not pd.isna(sizes) and len(ranks) != int(sizes):
                raise NotCheckedError("missing keys and values of a context-parallel rank")
            formats = _attention_formats(by_rank, self.card)
            if self.card.get("quantization"):
                matmuls = {
                    name: formats.qk if name in ("query", "key") else formats.pv
                    for name in _SLOTS["attention"]
                }
                of_tensors = {name: of for name, of in matmuls.items() if of is not None}
                for by_name in by_rank:
                    yield from _contradictions(by_name, of_tensors)
            tensors = [self._tensors(by_name.values()) for by_name in by_rank]
            amaxes = [_amaxes(by_name.values()) for by_name in by_rank]
            for rank, name, outcome in attention(tensors, formats, self.slack, amaxes=amaxes):
                yield by_rank[rank][name], outcome
        except NotCheckedError as reason:
            results = rows[rows["tensor_name"].isin(RESULTS)]
            yield from ((row, reason) for row in results.itertuples())


def _contradictions(
    by_name: Mapping[str, Any], formats: Mapping[str, GemmFormats]
) -> Iterator[tuple[Any, Outcome]]:
    """Yield the operands whose record has a different format than the run card's format audit.

    Args:
        by_name: records of a pass through a layer on one rank, by tensor name.
        formats: formats of the matmul that each operand enters, by tensor name.
    """
    for name, of_matmul in formats.items():
        if (row := by_name.get(name)) is None:
            continue
        expected = of_matmul.names(*_SLOTS[row.layer_type][name])
        if recorded_formats.uses(row.format) != recorded_formats.uses(expected):
            text = f"the format is {row.format} in its record, but {expected} in the run card"
            yield row, Recomputation(exact=False, excess=math.inf, text=text)


#: Exceptions that a recomputation may raise if operand shapes do not match or a file is damaged.
_IMPOSSIBLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, MemoryError)


def _impossible(error: Exception) -> Recomputation:
    """Return the outcome of a pass through a layer after its recomputation raised `error`."""
    why = str(error).strip().partition("\n")[0]
    text = f"its pass cannot be recomputed ({type(error).__name__}: {why})"
    return Recomputation(exact=False, excess=math.inf, text=text)


def _amaxes(rows: Iterable[Any]) -> dict[str, float]:
    """Return the recorded amaxes of one pass on one rank, by operation and slot."""
    return {name: amax for row in rows for name, amax in (row.amax or {}).items()}


def check_whole(rows: Iterable[Any]) -> None:
    """Raise `NotCheckedError` if a tensor was collected only in part (with `--collect-slice`).

    Matmuls need complete operands.
    """
    if any(row.slice is not None for row in rows):
        raise NotCheckedError("an operand or result of which only a slice was collected")


def check_known(rows: Iterable[Any]) -> None:
    """Raise `NotCheckedError` if Transformer Engine computed the results.

    The formats in which it multiplied are not recorded.
    """
    if any(row.implementation is not None for row in rows):
        raise NotCheckedError(
            f"{recorded_formats.TRANSFORMER_ENGINE}: the formats that it used are not recorded"
        )


def _better(first: Outcome | None, second: Outcome) -> Outcome:
    """Return the better outcome; an exact result ranks first, and an unchecked one last."""
    if first is None or isinstance(first, NotCheckedError):
        return second
    if isinstance(second, NotCheckedError):
        return first
    return min(first, second, key=lambda outcome: (not outcome.exact, outcome.excess))


def _attention_formats(by_rank: list[dict[str, Any]], card: Mapping[str, Any]) -> AttentionFormats:
    """Return the formats of QK^T and PV, from the run card's format audit or from the records.

    Raises:
        NotCheckedError: if the run used a recipe and its card has no audit, or if the audit or a
            format cannot be parsed.
    """
    records = {name: row for by_name in by_rank for name, row in by_name.items()}
    first = next(iter(records.values()))
    iteration = int(first.iteration)
    softmax = recorded_formats.softmax_of_card(card, first.module, iteration) or Softmax()
    qk, pv = (
        recorded_formats.of_card(card, first.module, operation, iteration)
        for operation in ("qk", "pv")
    )
    if qk is not None and pv is not None:
        return AttentionFormats(qk, pv, softmax)
    if str(first.quant_type).startswith("recipe_"):
        raise NotCheckedError("attention under a recipe without the run card's audit")
    formats = []
    for operation, name in (("qk", "key"), ("pv", "value")):
        row = records.get(name)
        operand = None if row is None or row.format is None else row.format
        accumulators = recorded_formats.of_accumulate(first.accumulate, operation)
        candidates = recorded_formats.of_records(
            operand, operand, operand, accumulators=accumulators
        )
        formats.append(candidates[0] if operand or accumulators else None)
    qk, pv = formats
    keys, _, _, _ = records["query"].global_shape if "query" in records else (0, 0, 0, 0)
    tiling, _ = default_tiling({"qk": qk, "pv": pv}, keys // len(by_rank), keys)
    if tiling is not None:
        pv = replace(GemmFormats() if pv is None else pv, tiling=tiling)
    return AttentionFormats(qk, pv, softmax)
