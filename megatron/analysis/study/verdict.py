"""Summarize the numbers of a study in a few sentences.

Each sentence states only what the numbers contain, for any number of layers and candidates: first
the SQNR of all candidates, then where the weakest one loses most, then which formats are worth
their bits, or the proposal under a bit budget, and last which gradients are too noisy, if the study
has gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from megatron.analysis.figures.figure_data import short_module
from megatron.analysis.stats.errors import decibels
from megatron.analysis.study.engine import Study
from megatron.analysis.study.gradients import gradients_of, rule
from megatron.analysis.study.proposal import Proposal, layers_text
from megatron.fake_quant.quant_type import DEFAULT_TYPE, UNQUANTIZED

STANDS_OUT = 1.0  #: minimum distance from the median, in dB, of a result that stands out
_NAMED = 3  #: maximum number of places that the verdict lists
#: Names of operands in the verdict and in pictures.
OPERAND_NAMES = {
    ("linear", "input"): "x",
    ("linear", "weight"): "W",
    ("linear", "grad_output"): "dy",
    ("qk", "query"): "Q",
    ("qk", "key"): "K",
    ("qk", "grad_scores"): "dS",
    ("pv", "probs"): "P",
    ("pv", "value"): "V",
    ("pv", "grad_output"): "dO",
}


def with_names(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of a study with the additional columns `candidate` and `place`.

    A place is a module and a GEMM, such as `fc2 dgrad`, or an operation of attention and a GEMM.
    """
    names = {module: short_module(module) for module in table["module"].unique()}
    modules = [
        names[module] if operation == "linear" else operation.upper()
        for module, operation in zip(table["module"], table["operation"], strict=True)
    ]
    return table.assign(
        candidate=candidate_names(table),
        place=[f"{name} {gemm}" for name, gemm in zip(modules, table["gemm"], strict=True)],
    )


def candidate_names(table: pd.DataFrame) -> pd.Series[str]:
    """Return the candidate of each row: a recipe, or a format with its simulated accumulator."""
    names: pd.Series[str] = table["recipe"].fillna(table["format"])
    if "accumulator" not in table:
        return names
    return names + ("+" + table["accumulator"]).fillna("")


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the SQNR and the bits per value for each candidate, place and layer.

    Squared relative errors are means over modules of the same short name, iterations, micro-batches
    and ranks, and bits are means over the values of their operands. A result with NaN or Inf makes
    the SQNR NaN and the column `spoiled` true. The column `quantized` is true if any operand is
    quantized. Results that are zero in high precision have no relative error, and those that have
    NaN or Inf in high precision say nothing about a format; both are left out.
    """
    keys = ["candidate", "place", "layer_idx"]
    left = rows[rows["reference_nonfinite"] == 0] if len(rows) else rows
    if left.empty:
        columns = [*keys, "squared", "bits", "values", "spoiled", "quantized", "sqnr_db"]
        return pd.DataFrame(columns=columns)
    table = with_names(rows)
    places = list(dict.fromkeys(table["place"]))  # a dropped row may be the first of its place
    table = table.loc[left.index]
    table = table.assign(
        squared=table["relative_error"] ** 2,
        spoiled=table["nonfinite"] > 0,
        quantized=~table["format"].isin(UNQUANTIZED),
        weighted=table["bits"] * table["values"],
    )
    merged = table.groupby(keys, sort=False).agg(
        squared=("squared", "mean"),
        weighted=("weighted", "sum"),
        values=("values", "sum"),
        spoiled=("spoiled", "any"),
        quantized=("quantized", "any"),
    )
    merged.insert(1, "bits", merged.pop("weighted") / merged["values"])
    merged = merged[merged["spoiled"] | merged["squared"].notna()].copy()
    merged.loc[merged["spoiled"], "squared"] = math.nan
    merged["sqnr_db"] = [decibels(1.0, squared) for squared in merged["squared"]]
    merged = merged.reset_index()
    if list(dict.fromkeys(merged["place"])) != places:
        merged = merged.sort_values("place", key=lambda each: each.map(places.index), kind="stable")
    return merged.reset_index(drop=True)


def by_candidate(table: pd.DataFrame) -> pd.DataFrame:
    """Return the median SQNR and bits per value of each candidate, and mark the Pareto front.

    In the median, a result with NaN or Inf counts as -inf dB. The column `front` is true if no
    other candidate is at least as good in bits and in SQNR and better in one of them; candidates
    with NaN or Inf in a result, for which the column `spoiled` is true, take no part.

    Args:
        table: result of `cells`.
    """
    table = table.assign(sqnr_db=table["sqnr_db"].mask(table["spoiled"], -math.inf))
    bits = table.assign(weighted=table["bits"] * table["values"]).groupby("candidate", sort=False)
    summary = pd.DataFrame(
        {
            "sqnr_db": table.groupby("candidate", sort=False)["sqnr_db"].median(),
            "bits": bits["weighted"].sum() / bits["values"].sum(),
            "spoiled": table.groupby("candidate", sort=False)["spoiled"].any(),
        }
    ).reset_index(names="candidate")
    points = list(
        zip(summary["bits"].round(6), summary["sqnr_db"], summary["spoiled"], strict=True)
    )
    summary["front"] = [
        not spoiled
        and not any(
            other_x <= x and other_y >= y and (other_x, other_y) != (x, y)
            for other_x, other_y, other_spoiled in points
            if not other_spoiled
        )
        for x, y, spoiled in points
    ]
    return summary.sort_values("sqnr_db", ascending=False, kind="stable", ignore_index=True)


def weakest(summary: pd.DataFrame) -> str:
    """Return the candidate with the lowest median SQNR.

    A candidate whose median is -inf dB is chosen only if all others but bf16 have this median, too;
    bf16 is chosen only if it is the only candidate.
    """
    others = summary[summary["candidate"] != DEFAULT_TYPE]
    known = others[others["sqnr_db"] > -math.inf]
    for table in (known, others, summary):
        if len(table):
            return str(table["candidate"].iloc[-1])
    raise AssertionError("a study has candidates")


def verdict(result: Study, proposal: Proposal | None = None) -> list[str]:
    """Return the sentences of the verdict; the last one is on gradients, if there are any."""
    if result.rows.empty:
        return ["No matmul of the dump could be studied."]
    table = cells(result.rows)
    if table.empty:
        return [
            "All results are zero, NaN or Inf in high precision, so no relative error is defined."
        ]
    summary = by_candidate(table)
    name = weakest(summary)
    third = _front(summary) if proposal is None else proposed(proposal)
    sentences = [ranking(table, summary, result.rows), losses(table, result.budgets, name), third]
    gradients = gradients_of(table)
    return sentences if gradients.empty else [*sentences, rule(gradients)]


def ranking(table: pd.DataFrame, summary: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Return the sentence that gives the median SQNR of each candidate.

    Args:
        table: result of `cells`.
        summary: result of `by_candidate`.
        rows: rows of the study.
    """
    first = table[table["candidate"] == table["candidate"].iloc[0]]
    results, layers = len(first), first["layer_idx"].nunique()
    parts = [
        f"{in_decibels(row.sqnr_db)} in {row.candidate}{_unquantized(table, row.candidate)}"
        for row in summary.itertuples()
    ]
    what = f"{results} GEMM result{'s' * (results > 1)} in {layers} layer{'s' * (layers > 1)}"
    text = f"The median SQNR of {what} is {_listed(parts)}"
    spoiled = rows.assign(candidate=candidate_names(rows))
    spoiled = spoiled[(spoiled["nonfinite"] > 0) & (spoiled["reference_nonfinite"] == 0)]
    if len(spoiled):
        counts = spoiled.groupby("candidate", sort=False).size()
        plural = "s" * (int(counts.iloc[0]) > 1)
        if len(counts) > 1 and counts.nunique() == 1:
            found = f"{counts.iloc[0]} result{plural} of each of {_listed([*counts.index])}"
        else:
            named = [f"{count} of {name}" for name, count in counts.items()]
            found = _listed([named[0].replace(" of ", f" result{plural} of ", 1), *named[1:]])
        text += f"; NaN or Inf occurs in {found}"
    return text + "."


def _unquantized(table: pd.DataFrame, name: str) -> str:
    """Return a note that counts results of unquantized GEMMs and gives the others' median SQNR.

    The median of a recipe that quantizes only some matmuls says little about the quantized ones.
    The text is empty if all results have quantized operands.
    """
    own = table[table["candidate"] == name]
    rest = own.loc[own["quantized"], "sqnr_db"]
    count = len(own) - len(rest)
    if not count:
        return ""
    if rest.empty:
        return " (not quantized)" if name == DEFAULT_TYPE else " (which quantizes none of them)"
    median = in_decibels(float(rest.fillna(-math.inf).median()))
    verb = "is" if count == 1 else "are"
    return f" ({count} of {len(own)} results {verb} not quantized; the others: {median})"


def losses(table: pd.DataFrame, budgets: pd.DataFrame, name: str) -> str:
    """Return the sentence on the places where the SQNR of the candidate `name` is lowest.

    Args:
        table: result of `cells`.
        budgets: errors of single operands; may be empty.
    """
    own = table[(table["candidate"] == name) & table["sqnr_db"].notna()]
    own = own.sort_values("sqnr_db", kind="stable")
    if own.empty:
        return f"In {name}, no result is finite."
    if (own["sqnr_db"] == math.inf).all():
        return f"In {name}, no result has an error."
    median = float(own["sqnr_db"].median())
    apart = own[(own["sqnr_db"] <= median - STANDS_OUT) & (own["sqnr_db"] < math.inf)]
    if apart.empty:
        lowest = own.iloc[0]
        text = (
            f"In {name}, no result lies {STANDS_OUT:g} dB below the median; the lowest is "
            f"{in_decibels(lowest['sqnr_db'])}, of {lowest['place']} in layer {lowest['layer_idx']}"
        )
    else:
        places = []
        for place in list(dict.fromkeys(apart["place"]))[:_NAMED]:
            part = apart[apart["place"] == place]
            places.append(f"{place} of {layers_text(part['layer_idx'])} ({_span(part['sqnr_db'])})")
        text = f"In {name}, {_listed(places)} lose{'s' * (len(places) == 1)} most"
    operand = _operand(budgets, name)
    return f"{text}{f'; {operand}' if operand else ''}."


def _operand(budgets: pd.DataFrame, name: str) -> str:
    """Return a clause about the operand that causes the largest error on its own, or ""."""
    if budgets.empty:
        return ""
    table = with_names(budgets)
    table = table[table["candidate"] == name]
    keys = ["place", "operation", "operand"]
    alone = table.groupby(keys, sort=False)["alone"].mean().dropna()
    if alone.empty or not alone.max() > 0:
        return ""
    place, *operand = alone.idxmax()
    label = OPERAND_NAMES.get(tuple(operand), operand[1])
    number = in_decibels(decibels(1.0, float(alone.max())))
    return f"the operand that costs most is {label} of {place} ({number} if only it is quantized)"


def _front(summary: pd.DataFrame) -> str:
    front = summary[summary["front"]].sort_values("bits")
    if front.empty:
        return "Every candidate has NaN or Inf in a result, so no format can be recommended."
    if len(summary) == 1:
        only = summary.iloc[0]
        return f"{only['candidate']} takes {only['bits']:.4g} bits per value, scales included."
    best = [f"{row.candidate} ({row.bits:.4g})" for row in front.itertuples()]
    verb = "makes the most of its" if len(best) == 1 else "make the most of their"
    text = f"{_listed(best)} {verb} bits per value, scales included"
    rest = list(summary.loc[~summary["front"] & ~summary["spoiled"], "candidate"])
    if rest:
        verb = "has" if len(rest) == 1 else "have"
        text += f"; {_listed(rest)} {verb} no smaller error than a format with at most as many bits"
    return text + "."


def proposed(proposal: Proposal) -> str:
    """Return the sentence that describes a proposal and compares it with a single format."""
    counts: dict[str, int] = {}
    for _, option in proposal.choices:
        counts[option.format] = counts.get(option.format, 0) + 1
    parts = [f"{name} for {count}" for name, count in sorted(counts.items(), key=lambda x: -x[1])]
    text = (
        f"Within {proposal.budget:g} bits per value, recipe.yaml takes {_listed(parts)} of "
        f"{len(proposal.choices)} matmuls ({proposal.bits:.4g} bits)"
    )
    if count := len(proposal.without):
        verb, they = ("has", "it stays") if count == 1 else ("have", "they stay")
        text += (
            f"; {count} matmul{'s' * (count > 1)} {verb} NaN or Inf in every format, so {they} in "
            "bf16 and outside of the budget"
        )
    if count := sum(place.forward_only for place, _ in proposal.choices):
        verb = "is" if count == 1 else "are"
        text += f"; {count} of them {verb} judged by fprop alone, because gradients are missing"
    uniform = proposal.uniform
    if uniform is None or not uniform.error > 0:
        return text + "; no single format fits the budget." if uniform is None else text + "."
    saved = 1 - proposal.error / uniform.error
    if saved < 0.0005:
        return f"{text}; no mixture has a smaller squared error than {uniform.format} alone."
    return (
        f"{text}; its squared error is {100 * saved:.1f} % below that of {uniform.format} alone "
        f"({uniform.bits:.4g} bits)."
    )


def _span(values: pd.Series[float]) -> str:
    low, high = f"{values.min():.1f}", f"{values.max():.1f}"
    return f"{low} dB" if low == high else f"{low} to {high} dB"


def in_decibels(value: float) -> str:
    """Return an SQNR as text, such as "20.0 dB"."""
    if value == -math.inf:
        return "not finite"
    return "infinite (no error)" if value == math.inf else f"{value:.1f} dB"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
