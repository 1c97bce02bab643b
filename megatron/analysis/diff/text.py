"""Describe the results of a comparison in words, in tables and as JSON lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from megatron.analysis.diff.comparison import (
    CLOSE,
    EQUAL,
    IDENTICAL,
    ONLY_A,
    ONLY_B,
    PAIRED,
    STATUSES,
    UNREADABLE,
    Result,
)
from megatron.analysis.diff.settings import Facts
from megatron.analysis.diff.summary import LISTED, Group, Summary
from megatron.analysis.json_values import plain
from megatron.analysis.text_table import align, shown

Row = tuple[object, ...]
MOST_ITERATIONS = 40  #: maximum number of iterations in the table
_AGREE = {
    IDENTICAL: "identical in every bit",
    EQUAL: "equal in value (but not in signs of zeros, bits of NaN, or dtypes)",
    CLOSE: "within the tolerance",
}
#: Fields of the records that the JSON lines contain.
_NAMES = (
    *("iteration", "micro_batch", "sample_idx", "layer_type", "layer_idx", "module"),
    *("operation", "phase", "tensor_name"),
)
_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_OUTSIDE = -1  #: layer number of a module outside of the transformer layers


def number(value: float) -> str:
    """Return a number with three significant digits, or "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def place(result: Result) -> str:
    """Return text that identifies a tensor: `iteration 1, micro-batch 0, forward, ... output`."""
    key, parts = result.key, []
    if key.iteration is not None:
        parts.append(f"iteration {key.iteration}")
    if key.tensor_name != "weight" and not pd.isna(result.row.micro_batch):
        parts.append(f"micro-batch {result.row.micro_batch}")
    parts += [str(key.operation), f"{key.module or key.layer_type} {key.tensor_name}"]
    parts += [result.ranks] if result.ranks else []
    return ", ".join(parts)


def words(result: Result) -> str:
    """Return how a pair of tensors differs, or why it cannot be compared."""
    if result.status == UNREADABLE:
        return f"cannot be compared: {result.why}"
    difference = result.difference
    if difference is None:
        return result.status
    if not difference.unequal:
        return _AGREE[result.status]
    count = f"{difference.unequal} of {difference.count} values differ"
    at, (a, b) = list(difference.at or ()), difference.values
    values = f"at {at} {a:.9g} in A, {b:.9g} in B"
    if difference.special:
        return f"{count}, {difference.special} of them NaN or Inf in one run only ({values})"
    largest = f"by up to {difference.largest:.3g} ({values})"
    return f"{count}, {largest}; relative error {number(difference.relative_error)}"


def verdict(summary: Summary, facts: Facts) -> str:
    """Return the first line of the output: the first difference, or "No difference" with counts."""
    if summary.first is not None:
        return f"First difference: {place(summary.first)}: {words(summary.first)}"
    alone = summary.first_alone
    if alone is not None and not summary.rules.ignore_missing:
        return f"First difference: {place(alone)}: {alone.status}"
    agree = {status: summary.counts[status] for status in _AGREE if summary.counts[status]}
    how = ", ".join(f"{count} {_AGREE[status]}" for status, count in agree.items())
    text = f"No difference: {summary.pairs} pairs of tensors agree: {how}"
    if facts.problems:
        text += f"; but {len(facts.problems)} file(s) cannot be read: {facts.problems[0]}"
    return text


def origin_sentence(summary: Summary) -> str:
    """Return a sentence on the operation that adds the most error, or "" if there is none."""
    if not summary.most_local:
        return ""
    most = summary.most_local[0]
    assert most.origin is not None
    return (
        f"Largest local error: {place(most)}: the operation adds {number(most.origin.local)}, and "
        f"its operands bring in {number(most.origin.inherited)}"
    )


def as_text(summary: Summary, facts: Facts) -> str:
    """Return the verdict, the two runs, counts, and tables of bounded length."""
    lines = [verdict(summary, facts)]
    if sentence := origin_sentence(summary):
        lines.append(sentence)
    lines += ["", *facts.lines(), "", counts(summary)]
    for title, rows in tables(summary).items():
        lines += ["", title, *align(rows, text=1)]
    for title, results in lists(summary).items():
        lines += ["", title, *(f"  {text}" for text in results)]
    return "\n".join(shown(line) for line in lines) + "\n"


def counts(summary: Summary) -> str:
    """Return the number of results with each status as one line."""
    texts = [f"{summary.counts[status]} {status}" for status in STATUSES]
    return f"{summary.pairs} pairs of tensors: {', '.join(texts)}"


def tables(summary: Summary) -> dict[str, list[Row]]:
    """Return the tables with their titles; each has a header row."""
    result: dict[str, list[Row]] = {}
    if summary.first_pass is not None:
        iteration, batch = summary.first_pass
        title = (
            f"Growth along the network in execution order (iteration {iteration}, micro-batch "
            f"{batch}): largest errors by layer"
        )
        of_layers = {_layer(*names): group for names, group in summary.layers.items()}
        result[title] = _growth("layer", of_layers)
    if len(summary.iterations) > 1:
        ordered = sorted(summary.iterations, key=lambda each: _rank(summary.iterations[each]))
        chosen = set(ordered[:MOST_ITERATIONS])
        of_iterations = {
            str(name): group for name, group in summary.iterations.items() if name in chosen
        }
        title = "Largest errors by iteration"
        if len(ordered) > len(chosen):
            title += f" ({len(chosen)} of {len(ordered)} iterations, those with the largest errors)"
        result[title] = _growth("iteration", of_iterations)
    if summary.most_local:
        header = ("tensor", "iteration", "rank", "local", "inherited", "relative error")
        rows = [_origin_row(each) for each in summary.most_local]
        result["Operations that add the most error"] = [header, *rows]
    return result


def _rank(group: Group) -> float:
    """Return a sort key that puts groups with a NaN error first, then those with large errors."""
    return -math.inf if math.isnan(group.error) else -group.error


def _layer(operation: str, layer: int | None) -> str:
    where = "outside" if layer is None or layer == _OUTSIDE else f"layer {layer}"
    return f"{operation}, {where}"


def _growth(name: str, groups: Mapping[str, Group]) -> list[Row]:
    header = (name, "tensors", "different", "relative error", "tensor", "local error", "added by")
    rows: list[Row] = [header]
    for title, group in groups.items():
        largest, local = map(_short_name, (group.largest, group.most_local))
        numbers = (number(group.error), largest, number(group.local), local)
        rows.append((title, group.tensors, group.different, *numbers))
    return rows


def _short_name(result: Result | None) -> str:
    """Return the name of a tensor without the part up to the layer number, or "-" for None."""
    return "-" if result is None else shown(_LAYER.sub("", result.key.name))


def _origin_row(result: Result) -> Row:
    assert result.origin is not None
    assert result.difference is not None
    origin, error = result.origin, result.difference.relative_error
    numbers = (number(origin.local), number(origin.inherited), number(error))
    rank = result.ranks.removeprefix("rank ") or "-"
    return (shown(result.key.name), result.key.iteration, rank, *numbers)


def lists(summary: Summary) -> dict[str, list[str]]:
    """Return the lists of tensors with their titles; each has a bounded length."""
    rules, counted = summary.rules, summary.counts
    different = sum(counted[status] for status in PAIRED if rules.fails(status))
    alone = [
        f"iteration {iteration}: {count} records {status}"
        for (iteration, status), count in summary.alone_by_iteration.items()
    ]
    unknown = [f"{count}: {why}" for why, count in summary.unknown.most_common()]
    groups = {
        "Tensors that differ, in execution order": _described(summary.different, different),
        "Pairs that cannot be compared": _described(summary.unreadable, counted[UNREADABLE]),
        "Records that only one run has, by iteration": _shortened(alone, len(alone)),
        "Records that only one run has": _described(
            summary.alone, counted[ONLY_A] + counted[ONLY_B]
        ),
        "Results whose local error is unknown": _shortened(unknown, len(unknown)),
    }
    return {title: texts for title, texts in groups.items() if texts}


def _described(results: Sequence[Result], total: int) -> list[str]:
    return _shortened([f"{place(result)}: {words(result)}" for result in results], total)


def _shortened(texts: Sequence[str], total: int) -> list[str]:
    """Return the first texts, and a last line with the number of all others, if there are any."""
    first = list(texts[:LISTED])
    return [*first, f"and {total - len(first)} more"] if total > len(first) else first


def as_json(result: Result) -> str:
    """Return a result as one line of JSON; NaN becomes null, and Inf becomes "inf"."""
    key, difference, origin = result.key, result.difference, result.origin
    fields: dict[str, Any] = {
        "kind": "pair" if None not in result.rows else "record",
        "position": result.position,
        "status": result.status,
        **{name: getattr(result.row, name) for name in _NAMES},
        "data_rank": key.data_rank,
        **{
            f"{name}_{side}": None if row is None else getattr(row, name)
            for name in ("rank", "quant_type", "path")
            for row, side in zip(result.rows, "ab", strict=True)
        },
        "joined": result.joined,
        "why": result.why or None,
    }
    if difference is not None:
        fields |= {
            name: getattr(difference, name)
            for name in (
                *("count", "unequal", "beyond", "special", "relative_error", "cosine", "gain"),
                *("largest", "norm_a", "norm_b", "norm", "at"),
            )
        }
        fields["value_a"], fields["value_b"] = difference.values
    if origin is not None:
        fields |= {
            "inherited": origin.inherited,
            "local": origin.local,
            "origin": origin.word or None,
            "origin_unknown": origin.unknown or None,
        }
    return json.dumps(plain(fields), allow_nan=False)


def summary_json(summary: Summary, facts: Facts) -> str:
    """Return the summary as one line of JSON, the first line of the JSON output."""
    first = summary.first
    if first is None and not summary.rules.ignore_missing:
        first = summary.first_alone
    content = {
        "kind": "summary",
        "agrees": summary.agrees and not facts.problems,
        "text": shown(verdict(summary, facts)),
        "first_difference": None if first is None else json.loads(as_json(first)),
        "pairs": summary.pairs,
        "counts": {status: summary.counts[status] for status in STATUSES},
        "settings_that_differ": {name: list(pair) for name, pair in facts.settings.items()},
        "problems": facts.problems,
    }
    return json.dumps(content, allow_nan=False)
