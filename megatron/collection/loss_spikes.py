"""Detect loss spikes: a loss or a gradient norm that is not finite or that jumps.

The following rules apply to each of the two numbers separately:

1. A value is compared with a level: the median of the last 32 normal values or the median of the
   last 5, whichever is lower. The short median follows a falling loss. The long median keeps the
   level from rising along with a slow increase.
2. A value jumps if it exceeds a multiple of the level: 1.25 for the loss, 100 for the gradient
   norm, which reaches 44 in ordinary runs with small batches. The values fluctuate more at the
   start of a run, so after n < 8 normal values the excess over the level must be 8/n times as
   large. A loss must then exceed 3 times the level after one iteration, 2 times after two, and
   1.5 times after four.
3. A jump must also exceed the level by 12 times the noise. The noise is the mean rise or the mean
   fall between consecutive normal values, whichever is smaller, so that a trend does not count as
   noise. It is computed over all steps and over the last 8, and the larger result is used.
4. An unusual value does not enter the medians. After 32 finite unusual values in a row, however,
   these become the new normal values.

A falling value is never unusual. A value of exactly zero is ignored, because it comes from a batch
in which no token counts. For negative values, the excess is relative to the magnitude of the level.

The inputs are the same on every rank, so all ranks reach the same result without communication.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: maximum number of normal values over which the long median is taken; if this many unusual values
#: occur in a row, they become the new normal values
WINDOW = 32
RECENT = 5  #: maximum number of normal values over which the short median is taken
#: number of normal values; with fewer, a value must exceed their median by more to be a jump
ENOUGH = 8
NOISE = 12  #: multiple of the noise by which a jump must exceed the lower of the two medians

LOSS, GRAD_NORM = "loss", "gradient norm"

Levels = dict[
    str, list[float]
]  #: recent normal values under the keys LOSS and GRAD_NORM, oldest first


@dataclass(frozen=True, slots=True)
class Jumps:
    """Limits for the loss and gradient norm, as multiples of a recent median; 0 means no limit."""

    loss: float = 1.25
    grad_norm: float = 100.0

    @classmethod
    def parse(
        cls, collect_loss_jump: float | None = None, collect_grad_norm_jump: float | None = None
    ) -> "Jumps":
        """Create the thresholds from command-line flags; each parameter is named after its flag.

        Raises:
            ValueError: if a factor is neither 0 nor a finite number above 1.
        """
        for flag, value in {
            "--collect-loss-jump": collect_loss_jump,
            "--collect-grad-norm-jump": collect_grad_norm_jump,
        }.items():
            if value is not None and value != 0 and not 1 < value < math.inf:
                raise ValueError(
                    f"{flag} is {value}; give a factor above 1, or 0 not to look at jumps"
                )
        usual = cls()
        return cls(
            usual.loss if collect_loss_jump is None else collect_loss_jump,
            usual.grad_norm if collect_grad_norm_jump is None else collect_grad_norm_jump,
        )


def checked_levels(stored: Any) -> Levels:
    """Validate and return the recent normal losses and gradient norms stored in a checkpoint.

    Raises:
        ValueError: if `stored` has another structure or holds values that are not finite.
    """
    valid = isinstance(stored, dict) and all(
        name in (LOSS, GRAD_NORM)
        and isinstance(values, list)
        and len(values) <= WINDOW
        and all(isinstance(value, float) and math.isfinite(value) for value in values)
        for name, values in stored.items()
    )
    if not valid:
        raise ValueError(
            f"its `levels` are not up to {WINDOW} finite numbers each for {LOSS} and {GRAD_NORM}"
        )
    return stored


class _Watched:
    """Recent normal values of the loss or gradient norm, and the unusual values after them."""

    def __init__(self, name: str, factor: float, usual: Sequence[float]):
        self.name, self._factor = name, factor
        self.usual: deque[float] = deque(usual, maxlen=WINDOW)
        self._unusual: deque[float] = deque(maxlen=WINDOW)

    def judge(self, value: float) -> str | None:
        """Return why `value` is unusual; None if it is normal or zero.

        Finite values other than zero are recorded.
        """
        if not math.isfinite(value):
            self._unusual.clear()
            return f"{self.name} {value}"
        if value == 0:
            return None
        level = self._level()
        if level is None or value <= self._bound():
            self.usual.append(value)
            self._unusual.clear()
            return None
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
        return min(statistics.median_low(window) for window in self._windows())

    def _bound(self) -> float:
        """Return the largest loss or gradient norm that counts as normal."""
        values = list(self.usual)
        excess = (self._factor - 1) * max(ENOUGH / len(values), 1)
        by_factor = min(
            statistics.median_low(window) + excess * statistics.median_low(map(abs, window))
            for window in self._windows()
        )
        steps = [after - before for before, after in pairwise(values)]
        noise = NOISE * max(_noise(steps), _noise(steps[-ENOUGH:]))
        level = self._level()
        assert level is not None, "there are usual values"
        return max(by_factor, level + noise)


def _noise(steps: list[float]) -> float:
    """Return the smaller of the mean rise and mean fall over all `steps`; 0 for a steady trend."""
    if not steps:
        return 0.0
    rise, fall = (statistics.fmean(max(sign * step, 0.0) for step in steps) for sign in (1, -1))
    return min(rise, fall)


class LossSpikeDetector:
    """Detector that reports unusual iterations, but only the first of several in a row."""

    def __init__(self, jumps: Jumps, levels: Mapping[str, Sequence[float]] | None = None):
        """Create a detector; a resumed run passes the `levels` that its checkpoint stores."""
        levels = levels or {}
        self._watched = [
            _Watched(LOSS, jumps.loss, levels.get(LOSS, ())),
            _Watched(GRAD_NORM, jumps.grad_norm, levels.get(GRAD_NORM, ())),
        ]
        self._unusual = False  #: whether the previous iteration was unusual

    @property
    def levels(self) -> Levels:
        """Recent normal losses and gradient norms, which a checkpoint stores for a resumed run."""
        return {watched.name: list(watched.usual) for watched in self._watched}

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
        reasons = [
            why
            for watched, value in zip(self._watched, (loss, grad_norm), strict=True)
            if value is not None and (why := watched.judge(value)) is not None
        ]
        first, self._unusual = bool(reasons) and not self._unusual, bool(reasons)
        return f"{' and '.join(reasons)} at iteration {iteration}" if first else None
