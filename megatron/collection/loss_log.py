"""Record the loss and the gradient norm of each iteration in the index of a dump.

A run of a million short iterations must not fill the index with a million lines, and must not wait
for the disk in each iteration. Numbers of several iterations therefore share one event, and events
become rarer as the run grows older: a run of a day writes fewer than 20,000.
"""

import math
import time
from collections.abc import Callable
from typing import Any

INTERVAL = 1.0  #: minimum time between two events, in seconds
SHARE = 1 / 5000  #: minimum time between two events, as a fraction of the run's age
MOST = 1000  #: maximum number of iterations in one event

#: An iteration, its loss and its gradient norm; None for a number that is unknown.
Numbers = tuple[int, float | None, float | None]


class LossLog:
    """Losses and gradient norms of one rank that are not yet in the index."""

    def __init__(self, append: Callable[..., None], now: Callable[[], float] = time.monotonic):
        """Create an empty log.

        Args:
            append: function that writes an event to the index; see `Writer.append`.
            now: function that returns the time in seconds.
        """
        self._append, self._now = append, now
        self._began = now()
        self._written = -math.inf  #: time of the last event
        self._pending: list[Numbers] = []

    def add(self, iteration: int, loss: float | None, grad_norm: float | None) -> None:
        """Record an iteration's loss and gradient norm; write all pending ones if this is due."""
        if loss is None and grad_norm is None:
            return
        self._pending.append((iteration, loss, grad_norm))
        now = self._now()
        interval = max(INTERVAL, SHARE * (now - self._began))
        if now - self._written >= interval or len(self._pending) >= MOST:
            self._write(patience=0.0)

    def flush(self) -> None:
        """Write all pending losses and gradient norms to the index."""
        if self._pending:
            self._write()

    def _write(self, **options: float) -> None:
        iterations, losses, grad_norms = zip(*self._pending, strict=True)
        self._pending.clear()
        event: dict[str, Any] = {"event": "trained", "iterations": list(iterations)}
        event |= {"loss": _plain(losses), "grad_norm": _plain(grad_norms)}
        self._append(event, **options)
        self._written = self._now()


def _plain(values: tuple[float | None, ...]) -> list[float | str | None]:
    """Return numbers in a form for JSON: as the texts "nan", "inf" and "-inf" if not finite."""
    return [x if x is None or math.isfinite(x) else str(x) for x in map(_float, values)]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
