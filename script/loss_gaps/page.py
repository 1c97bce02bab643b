"""Write the page of a study of loss gaps, and its picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from loss_gaps.gaps import Runs, correlation, verdict
from loss_gaps.offline import ERRORS, Pair
from megatron.analysis.plots.error_and_gap import plot_error_and_gap
from megatron.analysis.plots.style import in_style

DPI = 130
PICTURE = "study.png"  #: name of the picture, to which the page refers
_NAMES = {
    ERRORS[0]: "all GEMMs",
    ERRORS[1]: "the forward pass alone",
    ERRORS[2]: "the backward pass alone",
}


@dataclass(frozen=True)
class Setting:
    """Facts about a study that its page states, such as its sizes."""

    command: str
    versions: str
    parameters: int | None  #: None if unknown
    tokens: int  #: tokens per iteration
    start_iterations: int | None  #: iterations of the bf16 run; None with a given checkpoint
    iterations: int  #: iterations of each compared run
    from_scratch: bool
    held_out_tokens: int
    seeds: int
    baseline_loss: float  #: mean held-out loss of the baseline at the end
    start_loss: float = math.nan  #: held-out loss of the checkpoint; NaN if unknown

    def sentences(self) -> list[str]:
        """Return sentences that state what was trained and measured."""
        amount = f"{self.iterations} iterations of {self.tokens:,} tokens"
        if self.from_scratch:
            how = (
                f"Each configuration trains from scratch for {amount}"
                f"{self._per_parameter(self.iterations)}."
            )
        else:
            start = "a given checkpoint"
            if self.start_iterations is not None:
                start = (
                    f"one bf16 checkpoint, trained for {self.start_iterations} iterations of "
                    f"{self.tokens:,} tokens{self._per_parameter(self.start_iterations)}"
                )
            how = (
                f"Each configuration continues from {start}, for {amount}"
                f"{self._per_parameter(self.iterations)}; the optimizer starts anew."
            )
        size = "" if self.parameters is None else f"The model has {self.parameters:,} parameters. "
        pairs = (
            f"Each configuration has {self.seeds} run{'s' * (self.seeds > 1)}, with one seed each. "
            f"Runs with the same seed have the same "
            f"{'initial weights and ' if self.from_scratch else ''}order of the data. The gap is "
            "the held-out loss of a run, evaluated in its own formats, minus that of the bf16 run "
            f"with the same seed. The held-out text is the same {self.held_out_tokens:,} tokens "
            "for all runs. Intervals are Student's, over the seeds."
        )
        losses = f"The held-out loss of bf16 is {self.baseline_loss:.4f} nats per token at the end"
        if not math.isnan(self.start_loss):
            losses += f", and {self.start_loss:.4f} at the start"
        offline = (
            "The offline error is the root mean square of the relative errors of all GEMM results "
            "of one iteration, forward and backward, as `python -m megatron.analysis study` "
            "measures them without training."
        )
        return [f"{size}{how}", pairs, f"{losses}.", offline]

    def _per_parameter(self, iterations: int) -> str:
        if self.parameters is None:
            return ""
        return f" ({iterations * self.tokens / self.parameters:.3g} tokens per parameter)"


def page(gaps: pd.DataFrame, runs: Runs, pairs: Sequence[Pair], setting: Setting) -> str:
    """Return the page in Markdown: the answer, the picture, the tables, and how it was made."""
    parts = [
        "# Does the offline error predict the loss gap?",
        "\n".join(f"- {sentence}" for sentence in verdict(gaps, runs, pairs)),
        f"![Offline error against gap, with 95 % intervals]({PICTURE})",
        "\n\n".join(setting.sentences()),
        "## Gaps",
        _gap_lines(gaps),
        "## Correlations",
        "The first row is the main measure. Intervals are percentiles of bootstrap samples of the "
        "configurations.",
        _correlation_lines(gaps),
        "## How it was made",
        f"`{setting.command}` with {setting.versions}.",
    ]
    if notes := _notes(runs):
        parts[6:6] = ["\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _notes(runs: Runs) -> list[str]:
    """Return one line per run that did not complete."""
    return [
        f"- {name}, seed {seed}: {log.status}: {log.message}"
        for (name, seed), log in runs.items()
        if log.message
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _gap_lines(gaps: pd.DataFrame) -> str:
    head = ["configuration", "bits", "offline error", "gap", "95 % interval", "in %", "seeds"]
    rows = []
    for row in gaps.itertuples():
        interval = "-" if math.isnan(row.low) else f"{row.low:+.4f} to {row.high:+.4f}"
        gap = "diverged" if row.gap == math.inf else _number(row.gap, "+.4f")
        percent = "-" if row.gap == math.inf else _number(row.gap_percent, "+.2f")
        cells = [_number(row.bits, ".4g"), _number(row.offline_error, ".4g"), gap]
        rows.append([f"`{row.configuration}`", *cells, interval, percent, str(row.seeds)])
    return _table(head, rows)


def _correlation_lines(gaps: pd.DataFrame) -> str:
    rows = []
    for column, name in _NAMES.items():
        interval, count = correlation(gaps, column)
        ends = "-" if math.isnan(interval.low) else f"{interval.low:.2f} to {interval.high:.2f}"
        rows.append([name, _number(interval.value, ".2f"), ends, str(count)])
    return _table(["offline error of", "Spearman", "95 % interval", "configurations"], rows)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def picture(gaps: pd.DataFrame, image: str = "png") -> bytes:
    """Return the picture: offline error against gap, one dot per configuration."""
    interval, count = correlation(gaps)
    title = f"{count} configuration{'s' * (count != 1)}"
    if not math.isnan(interval.low):
        ends = f"{interval.low:.2f} to {interval.high:.2f}"
        title = f"Spearman {interval.value:.2f} (95 % interval {ends}) over {title}"
    data = gaps.rename(columns={"configuration": "name", ERRORS[0]: "x", "gap": "y"})
    content = io.BytesIO()
    with in_style():
        figure = Figure(figsize=(9, 6.5), layout="constrained")
        plot_error_and_gap(
            data,
            xlabel="offline error: rms of the relative errors of all GEMM results",
            ylabel="gap to bf16 in held-out loss (nats per token)",
            title=title,
            ax=figure.subplots(),
        )
        figure.savefig(content, format=image, dpi=DPI)
    return content.getvalue()
