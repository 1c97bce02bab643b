"""Finds loss spikes: a loss or a gradient norm that is not finite, or one that jumps.

The rule, for each of the two numbers by itself:

1. A value is compared with a level: the median of the last 32 usual values or of the last 5,
   whichever is lower. The short one follows a loss that falls, the long one a level that creeps up.
2. A value jumps if it exceeds the level by more than the factor allows: 1.25 for the loss, 100 for
   the gradient norm, which reaches 44 in ordinary runs with small batches. With fewer than 8 usual
   values behind it the excess must be larger, 8/n times after n values, because the start of a run
   is rough: a loss needs 3 times the level after one iteration, 2 after two, 1.5 after four.
3. It must also exceed the level by 12 times the noise: from one usual value to the next, the mean
   rise or the mean fall, whichever is smaller, because a trend has only one of them. The noise is
   taken from all usual values or from the last 8 steps, whichever is larger.
4. An unusual value never enters the medians. 32 unusual values in a row that are finite are the
   new level.

Falling is never unusual. A value of exactly zero comes from a batch in which no token counts: it is
neither judged nor learned. For negative values the excess is measured by the level's magnitude.

What is looked at is the same on every rank, so that all of them find the same without asking each
other.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WINDOW = 32  #: usual values of the long median; also how long a new level must last
RECENT = 5  #: usual values of the short median
ENOUGH = 8  #: usual values from which on the factor holds as it is given
NOISE = 12  #: times the noise that a jump must exceed the level by

LOSS, GRAD_NORM = "loss", "gradient norm"

Levels = dict[str, list[float]]  #: the last usual values, oldest first, by what they are


@dataclass(frozen=True, slots=True)
class Jumps:
    """The factor by which a value may exceed its level; 0: jumps of it are not looked for."""

    loss: float = 1.25
    grad_norm: float = 100.0

    @classmethod
    def parse(
        cls, collect_loss_jump: float | None = None, collect_grad_norm_jump: float | None = None
    ) -> "Jumps":
        """Read the flags of the same names.

        Raises:
            ValueError: a factor that every iteration exceeds, or none.
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
    """Return the levels that a checkpoint holds.

    Raises:
        ValueError: it holds something else.
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
    """One number of a run: its usual values, and the unusual ones since the last of them."""

    def __init__(self, name: str, factor: float, usual: Sequence[float]):
        self.name, self._factor = name, factor
        self.usual: deque[float] = deque(usual, maxlen=WINDOW)
        self._unusual: deque[float] = deque(maxlen=WINDOW)

    def judge(self, value: float) -> str | None:
        """Return why a value is unusual, or None; learn it if it is usual."""
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
        """Return the largest value that is usual."""
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
    """Return the mean rise or the mean fall, whichever is smaller: a trend is no noise."""
    if not steps:
        return 0.0
    rise, fall = (statistics.fmean(max(sign * step, 0.0) for step in steps) for sign in (1, -1))
    return min(rise, fall)


class Anomalies:
    """Tells when things get unusual, once each time that they do."""

    def __init__(self, jumps: Jumps, levels: Mapping[str, Sequence[float]] | None = None):
        """Begin with the values of a run that is resumed, or with none."""
        levels = levels or {}
        self._watched = [
            _Watched(LOSS, jumps.loss, levels.get(LOSS, ())),
            _Watched(GRAD_NORM, jumps.grad_norm, levels.get(GRAD_NORM, ())),
        ]
        self._unusual = False  #: whether the last iteration was

    @property
    def levels(self) -> Levels:
        """The last usual values, for a run that goes on from here."""
        return {watched.name: list(watched.usual) for watched in self._watched}

    def look(self, iteration: int, loss: float | None, grad_norm: float | None) -> str | None:
        """Return what is unusual about an iteration, if the one before was not; otherwise None.

        Args:
            iteration: for the message.
            loss: None: not known.
            grad_norm: the same.
        """
        reasons = [
            why
            for watched, value in zip(self._watched, (loss, grad_norm), strict=True)
            if value is not None and (why := watched.judge(value)) is not None
        ]
        first, self._unusual = bool(reasons) and not self._unusual, bool(reasons)
        return f"{' and '.join(reasons)} at iteration {iteration}" if first else None
