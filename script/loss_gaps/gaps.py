"""Make the tables of a study: runs, loss gaps, and the gaps' correlation with offline errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from loss_gaps.configurations import BASELINE
from loss_gaps.offline import ERRORS, Pair
from loss_gaps.run_log import COMPLETE, DIVERGED, RunLog
from megatron.analysis.stats.paired import (
    FEWEST_PAIRS,
    Interval,
    mean_interval,
    spearman,
    standard_error,
)

Runs = Mapping[tuple[str, int], RunLog]  #: results by the name of a configuration and the seed
LAST = 10  #: the last training loss is the mean over the last 1/10 of the iterations
#: columns of the table of gaps
COLUMNS = (
    *("configuration", "gap", "standard_error", "low", "high", "gap_percent"),
    *("seeds", "diverged", "failed", *ERRORS, "bits"),
)
ENOUGH = 20  #: minimum number of configurations for a meaningful correlation


def run_table(runs: Runs) -> pd.DataFrame:
    """Return one row per run: its status, losses and gradient norms."""
    rows = []
    for (name, seed), log in runs.items():
        losses, norms = pd.Series(log.losses), pd.Series(log.gradient_norms)
        window = max(1, len(losses) // LAST)
        rows.append(
            {
                "configuration": name,
                "seed": seed,
                "status": log.status,
                "iterations": len(losses),
                "first_loss": losses.iloc[0] if len(losses) else math.nan,
                "last_loss": losses.iloc[-window:].mean() if len(losses) else math.nan,
                "held_out_loss": log.held_out_loss,
                "mean_grad_norm": norms.mean() if len(norms) else math.nan,
                "largest_grad_norm": norms.max() if len(norms) else math.nan,
                "seconds": log.seconds,
                "message": log.message,
            }
        )
    return pd.DataFrame(rows)


def curve_table(runs: Runs) -> pd.DataFrame:
    """Return one row per run and iteration: the loss and the gradient norm."""
    return pd.DataFrame(
        [
            (name, seed, iteration, loss, log.gradient_norms.get(iteration, math.nan))
            for (name, seed), log in runs.items()
            for iteration, loss in log.losses.items()
        ],
        columns=["configuration", "seed", "iteration", "loss", "grad_norm"],
    )


def difference(runs: Runs, name: str, other: str = BASELINE) -> list[float]:
    """Return the held-out loss of a configuration minus that of another, for each common seed."""
    return [
        log.held_out_loss - runs[other, seed].held_out_loss
        for (each, seed), log in runs.items()
        if each == name
        and log.status == COMPLETE
        and (other, seed) in runs
        and runs[other, seed].status == COMPLETE
    ]


def gap_table(runs: Runs, errors: pd.DataFrame) -> pd.DataFrame:
    """Return one row per configuration besides the baseline, in ascending order of the gap.

    The gap of a configuration with a diverged run is infinite. Seeds whose baseline is not complete
    are left out.

    Args:
        runs: results of all runs.
        errors: offline errors and bits by configuration.
    """
    names = dict.fromkeys(name for name, _ in runs if name != BASELINE)
    baseline = [
        log.held_out_loss
        for (name, _), log in runs.items()
        if name == BASELINE and log.status == COMPLETE
    ]
    mean_loss = sum(baseline) / len(baseline) if baseline else math.nan
    rows = []
    for name in names:
        states = [log.status for (each, _), log in runs.items() if each == name]
        gaps = difference(runs, name)
        diverged = any(
            log.status == DIVERGED and _complete(runs, seed)
            for (each, seed), log in runs.items()
            if each == name
        )
        interval = Interval(math.inf) if diverged else mean_interval(gaps)
        rows.append(
            {
                "configuration": name,
                "gap": interval.value,
                "standard_error": math.nan if diverged else standard_error(gaps),
                "low": interval.low,
                "high": interval.high,
                "gap_percent": 100 * interval.value / mean_loss,
                "seeds": len(gaps),
                "diverged": states.count(DIVERGED),
                "failed": len(states) - states.count(DIVERGED) - states.count(COMPLETE),
                **{
                    column: errors[column].get(name, math.nan) if column in errors else math.nan
                    for column in (*ERRORS, "bits")
                },
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS).sort_values("gap", kind="stable", ignore_index=True)


def _complete(runs: Runs, seed: int) -> bool:
    """Return whether the baseline has a complete run with this seed."""
    return (BASELINE, seed) in runs and runs[BASELINE, seed].status == COMPLETE


def correlation(gaps: pd.DataFrame, column: str = ERRORS[0]) -> tuple[Interval, int]:
    """Return Spearman's correlation of an offline error with the gap, and the number of points."""
    known = gaps.dropna(subset=[column, "gap"])
    return spearman(list(known[column]), list(known["gap"])), len(known)


def verdict(gaps: pd.DataFrame, runs: Runs, pairs: Sequence[Pair]) -> list[str]:
    """Return sentences that answer the questions of the study, from the numbers alone."""
    interval, count = correlation(gaps)
    sentences = [_predicts(interval, count), _visible(gaps), _lost_baseline(runs)]
    sentences += [_compared(pair, runs) for pair in pairs]
    return [sentence for sentence in sentences if sentence]


def _predicts(interval: Interval, count: int) -> str:
    if math.isnan(interval.value):
        return (
            f"Offline error and gap are known for {count} configuration{'s' * (count != 1)}, which "
            "is too few for a rank correlation."
        )
    numbers = (
        f"Spearman's rank correlation over {count} configurations is {interval.value:.2f} (95 % "
        f"bootstrap interval {interval.low:.2f} to {interval.high:.2f})"
    )
    if math.isnan(interval.low):
        return (
            f"Spearman's rank correlation over {count} configurations is {interval.value:.2f}; "
            f"fewer than {FEWEST_PAIRS} are too few to say whether the offline error predicts the "
            "gap."
        )
    few = "" if count >= ENOUGH else f"; fewer than {ENOUGH} configurations prove little"
    if interval.low > 0:
        return f"In these runs, the offline error predicts the order of the gaps: {numbers}{few}."
    return f"These runs do not show that the offline error predicts the gap: {numbers}{few}."


def _visible(gaps: pd.DataFrame) -> str:
    if gaps.empty:
        return ""
    if gaps["low"].isna().all() and not (gaps["gap"] == math.inf).any():
        return "A gap has an interval only with two complete seeds or more."
    worse = gaps[(gaps["low"] > 0) | (gaps["gap"] == math.inf)]
    better = gaps[gaps["high"] < 0]
    text = f"The gap of {len(worse)} of {len(gaps)} configurations is above zero"
    if len(finite := worse[worse["gap"] < math.inf]):
        least, most = finite.iloc[0], finite.iloc[-1]
        text += (
            f", from {least['gap']:+.4f} ({least['configuration']}) to {most['gap']:+.4f} nats per "
            f"token ({most['configuration']})"
        )
    if diverged := list(gaps.loc[gaps["gap"] == math.inf, "configuration"]):
        text += f"; {', '.join(diverged)} diverged"
    rest = gaps[(gaps["low"] <= 0) & (gaps["high"] >= 0)]
    if len(rest):
        text += f"; the interval of {len(rest)} contains zero"
    if len(better):
        text += f", and that of {', '.join(better['configuration'])} is below it"
    return text + "."


def _lost_baseline(runs: Runs) -> str:
    """Return a sentence about diverged runs of the baseline, or an empty string."""
    if not (diverged := _diverged(runs, BASELINE)):
        return ""
    return f"{diverged} of {BASELINE} diverged; their seeds are left out of all gaps."


def _diverged(runs: Runs, name: str) -> str:
    """Return text such as `2 of 5 runs`, or an empty string if no run has diverged."""
    states = [log.status for (each, _), log in runs.items() if each == name]
    count = states.count(DIVERGED)
    return f"{count} of {len(states)} run{'s' * (len(states) > 1)}" if count else ""


def _compared(pair: Pair, runs: Runs) -> str:
    """Return a sentence that compares a proposed recipe with its uniform counterpart."""
    head = (
        f"The recipe proposed for {pair.budget:g} bits ({pair.bits:.4g} bits per value) and "
        f"{pair.uniform.name} ({pair.uniform_bits:.4g} bits)"
    )
    if pair.same:
        return f"{head} are the same: no mixture of the formats has a smaller offline error."
    diverged = [
        f"{text} of {which}"
        for name, which in ((pair.proposed.name, "the recipe"), (pair.uniform.name, "the format"))
        if (text := _diverged(runs, name))
    ]
    if diverged:
        return (
            f"{head}: {' and '.join(diverged)} diverged, so the losses of the other runs are not "
            "compared."
        )
    interval = mean_interval(difference(runs, pair.proposed.name, pair.uniform.name))
    if math.isnan(interval.low):
        return f"{head} cannot be compared, because fewer than two seeds have both runs."
    found = "the difference is not visible"
    if interval.excludes_zero:
        found = f"the recipe's loss is {'lower' if interval.value < 0 else 'higher'}"
    equal = "" if pair.equal_bits else ", which are not equal bits"
    return (
        f"{head}{equal}: {found}, {interval.value:+.4f} nats per token (95 % interval "
        f"{interval.low:+.4f} to {interval.high:+.4f})."
    )
