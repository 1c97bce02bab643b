"""Read the log of a run: the losses, the gradient norms, and how the run ended.

A log begins with a line that identifies the run. When the run has ended, the launcher appends a
line with its exit status and duration. A log without this line is that of an interrupted run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

COMPLETE, DIVERGED, FAILED = "complete", "diverged", "failed"

_NUMBER = r"([-+\d.E]+|nan|-?inf)"
_ITERATION = re.compile(
    rf"^ \[[^]]*\] iteration +(\d+)/.*? lm loss: {_NUMBER} \|(?:.*? grad norm: {_NUMBER} \|)?",
    re.M | re.I,
)
_HELD_OUT = re.compile(
    rf"^ validation loss at iteration \d+ on validation set \|.*?\blm loss value: {_NUMBER} \|",
    re.M | re.I,
)
_PARAMETERS = re.compile(r"^ > number of parameters of the model: (\d+)$", re.M)
_NOT_FINITE = re.compile(r"^\[ERROR\] .* is (?:nan|-?inf) at iteration (\d+)", re.M)
_END = re.compile(r"^\[STUDY\] exit status (-?\d+) after ([\d.]+) s$", re.M)


@dataclass(frozen=True)
class RunLog:
    """Result of a run, as its log shows it."""

    status: str  #: complete, diverged (a loss or gradient norm was not finite) or failed
    losses: dict[int, float]  #: training loss by iteration
    gradient_norms: dict[int, float]
    held_out_loss: float  #: NaN unless the run is complete
    seconds: float  #: duration of the run
    parameters: int | None  #: number of parameters of the model; None if the log lacks it
    message: str = ""  #: reason why the run is not complete


def ending(status: int, seconds: float) -> str:
    """Return the line that the launcher appends to the log of a run that has ended."""
    return f"[STUDY] exit status {status} after {seconds:.1f} s\n"


def has_ended(text: str) -> bool:
    """Return whether a log is that of a run that has ended, even if the run failed."""
    return _END.search(text) is not None


def parse_log(text: str, head: str, iterations: int, *, evaluated: bool = True) -> RunLog | None:
    """Return the result of a run, or None if the log is of another run or the run has not ended.

    Args:
        text: the log.
        head: first line that the log must have.
        iterations: number of iterations of a complete run.
        evaluated: whether a complete run ends with a held-out loss.
    """
    end = _END.search(text)
    if end is None or not text.startswith(head):
        return None
    losses = losses_in(text)
    norms = {int(number): float(norm) for number, _, norm in _ITERATION.findall(text) if norm}
    held_out = [float(value) for value in _HELD_OUT.findall(text)]
    loss = held_out[-1] if held_out else math.nan
    status, message = COMPLETE, ""
    if not_finite := _NOT_FINITE.search(text):
        status, message = DIVERGED, not_finite[0].removeprefix("[ERROR] ")
    elif end[1] != "0":
        errors = re.findall(r"^\[ERROR\] (.*)$", text, re.M)
        status, message = FAILED, errors[-1] if errors else f"exit status {end[1]}"
    elif len(losses) != iterations or len(held_out) < evaluated:
        status, message = FAILED, f"{len(losses)} of {iterations} iterations are in the log"
    elif evaluated and not math.isfinite(loss):
        status, message = DIVERGED, f"the held-out loss is {loss}"
    parameters = _PARAMETERS.search(text)
    return RunLog(
        status,
        losses,
        norms,
        loss if status == COMPLETE else math.nan,
        float(end[2]),
        None if parameters is None else int(parameters[1]),
        message,
    )


def losses_in(text: str) -> dict[int, float]:
    """Return the training losses in a log, by iteration; the run may still be in progress."""
    return {int(number): float(loss) for number, loss, _ in _ITERATION.findall(text)}


def read_log(
    path: Path, head: str, iterations: int, *, evaluated: bool = True, failed: bool = False
) -> RunLog | None:
    """Return the result in a log file, or None if the run must be done or repeated.

    A failed run must be repeated, unless `failed` is true. A diverged run would
    diverge again.
    """
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    result = parse_log(text, head, iterations, evaluated=evaluated)
    return None if result is not None and result.status == FAILED and not failed else result
