"""Detect loss spikes: a loss or a gradient norm that is not finite or that jumps.

The following rules apply to each of the two numbers separately:

1. A value is compared with a level: the median of the last 32 normal values or the median of the
   last 5, whichever is lower. The short median follows a falling loss. The long median keeps the
   level from rising along with a slow increase. Before there are 5 normal values, the level is the
   lowest of them.
2. A value jumps if it exceeds a multiple of the level: 1.25 for the loss, 100 for the gradient
   norm, which reaches 44 in ordinary runs with small batches. The values fluctuate more at the
   start of a run, so after n < 8 normal values the excess over the level must be 8/n times as
   large. A loss must then exceed 3 times the level after one iteration, 2 times after two, and
   1.5 times after four. If the size of the vocabulary is known, half of the excess is enough for a
   loss that is worse than a guess: a loss also jumps if it exceeds 1.125 times the level and 1.125
   times ln(vocabulary). A model that gives all tokens the same probability has the loss
   ln(vocabulary), so random weights start there, with little noise.
3. A jump must also exceed the level by 12 times the noise. The noise is the mean rise or the mean
   fall between consecutive normal values, whichever is smaller, so that a trend does not count as
   noise. It is computed over all steps and over the last 8, and the larger result is used.
4. An unusual value never enters the medians, and after one, a value is normal again only if its
   excess over the level is at most half of the limit. Otherwise, a diverged loss that oscillates
   around the limit would count as several spikes, and its lower values as normal. A change of the
   data or of the learning rate may nevertheless raise the level for good: 32 finite unusual values
   in a row become the new normal values. The count continues after a resume.
5. A value that is NaN or infinite is unusual at once, even in the first iteration.

A falling value is never unusual. A value of exactly zero is ignored, because it comes from a batch
in which no token counts. For negative values, the excess is relative to the magnitude of the level.

The inputs are the same on every rank, so all ranks reach the same result without communication.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: maximum number of normal values over which the long median is taken; if this many finite unusual
#: values occur in a row, they become the new normal values
WINDOW = 32
RECENT = 5  #: maximum number of normal values over which the short median is taken
#: number of normal values from which the usual limit applies; with fewer, the limit is higher
ENOUGH = 8
NOISE = 12  #: multiple of the noise by which a jump must exceed the lower of the two medians

LOSS, GRAD_NORM = "loss", "gradient norm"

#: Recent values, oldest first. The normal ones are under LOSS and GRAD_NORM. If the last value was
#: unusual, the finite values since the last normal one are under `_streak(LOSS)` or
#: `_streak(GRAD_NORM)`.
Levels = dict[str, list[float]]


def _streak(name: str) -> str:
    """Return the key in `Levels` for the unusual values since the last normal value."""
    return f"unusual {name}"


@dataclass(frozen=True, slots=True)
class Jumps:
    """Limits for the loss and gradient norm, as multiples of a recent median; 0 means no limit."""

    loss: float = 1.25
    grad_norm: float = 100.0
    #: number of tokens in the vocabulary; None if it is unknown
    vocabulary: int | None = None

    @classmethod
    def parse(
        cls, collect_loss_jump: float | None = None, collect_grad_norm_jump: float | None = None
    ) -> "Jumps":
        """Create the limits from command-line flags; each parameter is named after its flag.

        Raises:
            ValueError: if a factor is neither 0 nor a finite number above 1.
        """
        for flag, value in {
            "--collect-loss-jump": collect_loss_jump,
            "--collect-grad-norm-jump": collect_grad_norm_jump,
        }.items():
            if value is not None and value != 0 and not 1 < value < math.inf:
                raise ValueError(f"{flag} is {value}; give a factor above 1, or 0 to ignore jumps")
        usual = cls()
        return cls(
            usual.loss if collect_loss_jump is None else collect_loss_jump,
            usual.grad_norm if collect_grad_norm_jump is None else collect_grad_norm_jump,
        )


def checked_levels(stored: Any) -> Levels:
    """Validate and return the recent losses and gradient norms stored in a checkpoint.

    Raises:
        ValueError: if `stored` has a different structure or holds values that are not finite.
    """
    valid = isinstance(stored, dict) and all(
        name in (LOSS, GRAD_NORM, _streak(LOSS), _streak(GRAD_NORM))
        and isinstance(values, list)
        and len(values) <= WINDOW
        and all(isinstance(value, float) and math.isfinite(value) for value in values)
        for name, values in stored.items()
    )
    if not valid:
        raise ValueError(
            f"its `levels` are not lists of at most {WINDOW} finite numbers for {LOSS} and "
            f"{GRAD_NORM}"
        )
    return stored


class _Watched:
    """Recent normal values of the loss or gradient norm, and the unusual values after them."""

    def __init__(self, name: str, factor: float, levels: Levels, uniform: float = math.inf):
        """Create the history of the loss or of the gradient norm.

        Args:
            name: LOSS or GRAD_NORM.
            factor: multiple of the level above which a value jumps; 0 for no limit.
            levels: values before the first iteration, from a checkpoint.
            uniform: value of a model that gives all tokens the same probability.
        """
        self.name, self._factor, self._uniform = name, factor, uniform
        self.usual: deque[float] = deque(levels.get(name, ()), maxlen=WINDOW)
        #: finite unusual values since the last normal value
        self._unusual: deque[float] = deque(levels.get(_streak(name), ()), maxlen=WINDOW)
        self.unusual = _streak(name) in levels  #: True if the last value was unusual

    @property
    def levels(self) -> Levels:
        """Values that a checkpoint stores."""
        streak = {_streak(self.name): list(self._unusual)} if self.unusual else {}
        return {self.name: list(self.usual)} | streak

    def judge(self, value: float) -> str | None:
        """Return why `value` is unusual; None if it is normal or zero.

        Finite values other than zero are recorded.
        """
        if value == 0:
            return None
        if not math.isfinite(value):
            self.unusual = True
            self._unusual.clear()
            return f"{self.name} {value}"
        level = self._level()
        if level is None or value <= self._bound(level):
            self.unusual = False
            self._unusual.clear()
            self.usual.append(value)
            return None
        self.unusual = True
        self._unusual.append(value)
        if len(self._unusual) == WINDOW:
            self.usual = self._unusual.copy()
            self._unusual.clear()
        times = f", {value / level:.3g} times the level before" if level > 0 else ""
        return f"{self.name} {value:.6g}{times or f', far above the level of {level:.6g}'}"

    def _windows(self) -> tuple[list[float], list[float]]:
        values = list(self.usual)
        return values, values[-RECENT:]

    def _level(self) -> float | None:
        if not self.usual or not self._factor:
            return None
        return min(map(_typical, self._windows()))

    def _bound(self, level: float) -> float:
        """Return the largest loss or gradient norm that counts as normal."""
        values = list(self.usual)
        steps = [after - before for before, after in pairwise(values)]
        noise = level + NOISE * max(_noise(steps), _noise(steps[-ENOUGH:]))
        early = max(ENOUGH / len(values), 1)
        bound = max(self._multiple(early), noise)
        worse_than_guess = (1 + self._factor) / 2 * self._uniform
        if level <= worse_than_guess < math.inf:
            bound = min(bound, max(self._multiple(0.5), noise, worse_than_guess))
        return level + (bound - level) / 2 if self.unusual else bound

    def _multiple(self, part: float) -> float:
        """Add `part` times the allowed excess to both medians, and return the lower result."""
        excess = (self._factor - 1) * part
        return min(
            _typical(window) + excess * _typical([abs(value) for value in window])
            for window in self._windows()
        )


def _typical(values: list[float]) -> float:
    """Return the median, or the lowest value if there are fewer than RECENT."""
    return statistics.median_low(values) if len(values) >= RECENT else min(values)


def _noise(steps: list[float]) -> float:
    """Return the smaller of the mean rise and mean fall over all `steps`; 0 for a steady trend."""
    if not steps:
        return 0.0
    rise, fall = (statistics.fmean(max(sign * step, 0.0) for step in steps) for sign in (1, -1))
    return min(rise, fall)


class LossSpikeDetector:
    """Detector that reports unusual iterations, but only the first of several in a row."""

    def __init__(self, jumps: Jumps, levels: Levels | None = None):
        """Create a detector; a resumed run passes the `levels` that its checkpoint stores."""
        levels = levels or {}
        uniform = math.log(jumps.vocabulary) if jumps.vocabulary else math.inf
        self._watched = [
            _Watched(LOSS, jumps.loss, levels, uniform),
            _Watched(GRAD_NORM, jumps.grad_norm, levels),
        ]

    @property
    def levels(self) -> Levels:
        """Recent losses and gradient norms, which a checkpoint stores for a resumed run."""
        return {key: values for number in self._watched for key, values in number.levels.items()}

    def look(self, iteration: int, loss: float | None, grad_norm: float | None) -> str | None:
        """Check an iteration; return a message if it is unusual and the previous one was normal.

        Args:
            iteration: number of the iteration, for the message.
            loss: loss of the iteration; None if it is unknown.
            grad_norm: gradient norm of the iteration; None if it is unknown.

        Returns:
            A message on what is unusual; None if the iteration is normal, or if the previous
            iteration was unusual too.
        """
        before = any(watched.unusual for watched in self._watched)
        reasons = [
            why
            for watched, value in zip(self._watched, (loss, grad_norm), strict=True)
            if value is not None and (why := watched.judge(value)) is not None
        ]
        if before or not reasons:
            return None
        return f"{' and '.join(reasons)} at iteration {iteration}"
