"""Recomputes the results of one run, pass by pass: which records belong together, in which formats.

Where the run card says nothing of attention, it is taken for causal with the usual scale and
without dropout; a run none of whose attention follows then may have had others: not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.store import TensorStore
from megatron.analysis.verification import recorded_formats
from megatron.analysis.verification.recompute_attention import RESULTS, AttentionFormats, attention
from megatron.analysis.verification.recompute_linear import LINEAR, Recomputation, linear
from megatron.analysis.verification.recorded_formats import NotCheckedError, Softmax
from megatron.fake_quant import dequantize
from megatron.fake_quant.gemm import SLOTS
from megatron.tensor_record import CODES, OF_ITERATION

_UNKNOWN_ATTENTION = "attention of a run whose card has no arguments: its mask, scale and dropout"
#: A pass of a linear layer is one rank's; of attention, of the ranks that share its sequences.
_LINEAR_PASS = ["iteration", "micro_batch", "module", "rank"]
_ATTENTION_PASS = ["iteration", "micro_batch", "module", "tp", "dp"]
CheckedResult = tuple[
    str, Any, "Recomputation | NotCheckedError"
]  #: kind of layer, record, how it stands


@dataclass(frozen=True)
class Results:
    """The outputs and gradients of one run."""

    store: TensorStore
    records: pd.DataFrame  #: whose files are good, each forward tensor once
    card: Mapping[str, Any]
    slack: float

    def check(self, progress: Callable[[], object]) -> Iterator[CheckedResult]:
        """Every result, with how it stands to the recomputed one."""
        of_attention = self.records["layer_type"] == "attention"
        once = self._of_iteration()
        for key, rows in self._passes(self.records[~of_attention], _LINEAR_PASS):
            try:
                yield from (
                    ("linear layers", row, outcome)
                    for row, outcome in self._linear(rows, once.get((key[0], *key[2:]), {}))
                )
            except _IMPOSSIBLE as error:
                yield "linear layers", rows.iloc[0], _impossible(error)
            progress()
        found: list[tuple[Any, Recomputation | NotCheckedError]] = []
        for _, rows in self._passes(self.records[of_attention], _ATTENTION_PASS):
            try:
                found += self._attention(rows)
            except _IMPOSSIBLE as error:
                found.append((rows.iloc[0], _impossible(error)))
            progress()
        trusted = any(
            isinstance(outcome, Recomputation) and not outcome.wrong for _, outcome in found
        )
        told = self.card.get("arguments") or self.card.get("quantization")
        for row, outcome in found:
            if not told and not trusted and isinstance(outcome, Recomputation):
                outcome = NotCheckedError(_UNKNOWN_ATTENTION)
            yield "attention", row, outcome

    @staticmethod
    def _passes(records: pd.DataFrame, keys: list[str]) -> Any:
        return records.groupby(keys, sort=False, dropna=False)

    def _of_iteration(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Records of weights and their codes, by name, for each iteration, module and rank: they
        are the same in every micro-batch, and may be written with one of them only.
        """
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.records[self.records["tensor_name"].isin(OF_ITERATION)].itertuples():
            found.setdefault((row.iteration, row.module, row.rank), {})[row.tensor_name] = row
        return found

    def _tensors(self, rows: Iterable[Any]) -> dict[str, Tensor]:
        return {row.tensor_name: self.store.load(row) for row in rows if row.codes is None}

    def _codes(self, by_name: Mapping[str, Any]) -> dict[str, Tensor]:
        """The values that saved codes of a linear layer's operands stand for, by slot."""
        return {
            slot: dequantize(self.store.load_codes(by_name[name]))
            for slot, name in zip(SLOTS, CODES["linear"], strict=True)
            if name in by_name
        }

    def _linear(
        self, rows: pd.DataFrame, once: Mapping[str, Any]
    ) -> Iterator[tuple[Any, Recomputation | NotCheckedError]]:
        """The results of one pass of one layer on one rank, by the reading that fits best."""
        by_name = dict(once) | {row.tensor_name: row for row in rows.itertuples()}
        first = rows.iloc[0]
        try:
            _check_whole(by_name.values())
            of_card = recorded_formats.of_card(
                self.card, first["module"], "linear", int(first["iteration"])
            )
            names = [
                by_name[name].format if name in by_name else None
                for name in ("input", "weight", "grad_output")
            ]
            readings = [of_card] if of_card else recorded_formats.of_records(*names)
        except NotCheckedError as reason:
            yield from ((by_name[name], reason) for name in LINEAR if name in by_name)
            return
        tensors, codes = self._tensors(by_name.values()), self._codes(by_name)
        best: dict[str, Recomputation | NotCheckedError] = {}
        for formats in readings:
            for name, outcome in linear(tensors, formats, self.slack, codes):
                best[name] = _better(best.get(name), outcome)
        yield from ((by_name[name], outcome) for name, outcome in best.items())

    def _attention(
        self, rows: pd.DataFrame
    ) -> Iterator[tuple[Any, Recomputation | NotCheckedError]]:
        """The results of one pass of one layer on the ranks that share its sequences."""
        ranks = [of_rank for _, of_rank in rows.groupby("cp", sort=True, dropna=False)]
        places = [{row.tensor_name: row for row in of_rank.itertuples()} for of_rank in ranks]
        try:
            _check_whole(rows.itertuples())
            sizes = rows["cp_size"].iloc[0]
            if not pd.isna(sizes) and len(ranks) != int(sizes):
                raise NotCheckedError("keys and values of a context-parallel rank are missing")
            formats = _attention_formats(places, self.card)
            tensors = [self._tensors(names.values()) for names in places]
            for rank, name, outcome in attention(tensors, formats, self.slack):
                yield places[rank][name], outcome
        except NotCheckedError as reason:
            results = rows[rows["tensor_name"].isin(RESULTS)]
            yield from ((row, reason) for row in results.itertuples())


#: Exceptions that torch raises for operands of incompatible shapes, and reading for damaged files.
_IMPOSSIBLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, MemoryError)


def _impossible(error: Exception) -> Recomputation:
    """Return the outcome of a pass whose tensors do not belong to one matmul."""
    why = str(error).strip().partition("\n")[0]
    text = f"its pass cannot be recomputed ({type(error).__name__}: {why})"
    return Recomputation(exact=False, excess=math.inf, text=text)


def _check_whole(rows: Iterable[Any]) -> None:
    """Refuse parts of tensors: sums over the rest of them are missing."""
    if any(row.slice is not None for row in rows):
        raise NotCheckedError("collected with --collect-slice: a part of an operand or result")


def _better(
    one: Recomputation | NotCheckedError | None, other: Recomputation | NotCheckedError
) -> Recomputation | NotCheckedError:
    """Of two readings' outcomes the one that fits."""
    if one is None or isinstance(one, NotCheckedError):
        return other
    if isinstance(other, NotCheckedError):
        return one
    return min(one, other, key=lambda each: (not each.exact, each.excess))


def _attention_formats(places: list[dict[str, Any]], card: Mapping[str, Any]) -> AttentionFormats:
    """What both matmuls go through: from the card's audit, else the one format of a run.

    Raises:
        NotCheckedError: the run has a recipe, and its card has no audit.
    """
    held = {name: row for names in places for name, row in names.items()}
    first = next(iter(held.values()))
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
    found = []
    for name in ("key", "value"):
        row = held.get(name)
        operand = None if row is None or row.format is None else row.format
        readings = recorded_formats.of_records(operand, operand, operand)
        found.append(None if operand is None else readings[0])
    return AttentionFormats(found[0], found[1], softmax)
