"""When a training run does something unusual: a loss or a gradient norm that is not finite, or one
that jumps.

A jump is measured against the median of the last iterations, which neither one bad iteration moves
nor the slow fall of a loss. What is looked at is the same on every rank, so that all of them find
the same without asking each other.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

WINDOW = 32  #: iterations whose median counts
ENOUGH = 8  #: of them before a jump can be told from the noise of the start


@dataclass(frozen=True, slots=True)
class Jumps:
    """How many times its median a number may be; 0: it is not looked at."""

    loss: float = 1.2
    grad_norm: float = 4.0

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


class Anomalies:
    """Tells when things get unusual, once each time that they do."""

    def __init__(self, jumps: Jumps):
        self._factors = {"loss": jumps.loss, "gradient norm": jumps.grad_norm}
        self._history: dict[str, deque[float]] = {
            name: deque(maxlen=WINDOW) for name in self._factors
        }
        self._unusual = False  #: whether the last iteration was

    def look(self, iteration: int, loss: float | None, grad_norm: float | None) -> str | None:
        """What is unusual about an iteration, if the one before was not; None otherwise.

        Args:
            iteration: for the message.
            loss: None: not known.
            grad_norm: the same.
        """
        numbers = {"loss": loss, "gradient norm": grad_norm}
        found = [
            why
            for name, value in numbers.items()
            if value is not None and (why := self._judge(name, value)) is not None
        ]
        first, self._unusual = bool(found) and not self._unusual, bool(found)
        return f"{' and '.join(found)} at iteration {iteration}" if first else None

    def _judge(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} {value}"
        history, factor = self._history[name], self._factors[name]
        usual = statistics.median(history) if len(history) >= ENOUGH else None
        history.append(value)
        if usual is None or not factor or not 0 < usual * factor < value:
            return None
        return f"{name} {value:.6g}, {value / usual:.3g} times the median of the iterations before"
