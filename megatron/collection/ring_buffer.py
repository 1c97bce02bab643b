"""Keep the last iterations of a run in host memory and write them only when something happens, so
that the iterations before a loss spike can be inspected.

`--collect-ring K` holds K iterations, or as many as fit into `--collect-max-host-gib`. When
`LossSpikeDetector` finds an unusual iteration, the ring writes it and the iterations before it, and
starts empty again. It ends after a few such events, because a run that stays broken would fill the
disk.

If a single iteration does not fit into memory, the ring holds the tensors that came first.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.collection.host_buffers import HostCopy
from megatron.collection.loss_spikes import Jumps, Levels, LossSpikeDetector

logger = logging.getLogger(__name__)

EVENTS = 3  #: how often a ring is written by default

Lost = list[tuple[int, dict[str, Any]]]  #: bytes and fields of the tensors that did not fit


@dataclass(frozen=True, slots=True)
class RingSettings:
    """The values of the ring's flags."""

    iterations: int
    events: int = EVENTS
    jumps: Jumps = field(default_factory=Jumps)

    @classmethod
    def parse(
        cls,
        collect_ring: int | None = None,
        collect_ring_events: int | None = None,
        **jumps: float | None,
    ) -> "RingSettings | None":
        """Read the flags of the same names; return None if no ring is requested.

        Raises:
            ValueError: if the ring has no iterations, or its flags are given without a ring.
        """
        if collect_ring is None:
            given = {"collect_ring_events": collect_ring_events, **jumps}
            for flag, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"--{flag.replace('_', '-')} {value} is for a ring of iterations; add "
                        "--collect-ring K, or leave it out"
                    )
            return None
        events = EVENTS if collect_ring_events is None else collect_ring_events
        for flag, value in {
            "--collect-ring": collect_ring,
            "--collect-ring-events": events,
        }.items():
            if value < 1:
                raise ValueError(f"{flag} is {value}; give 1 or more")
        return cls(collect_ring, events, Jumps.parse(**jumps))

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for the run card."""
        return {
            "iterations": self.iterations,
            "events": self.events,
            "loss_jump": self.jumps.loss,
            "grad_norm_jump": self.jumps.grad_norm,
        }


@dataclass
class _Iteration:
    number: int
    held: list[tuple[HostCopy, dict[str, Any]]] = field(default_factory=list)
    lost: Lost = field(default_factory=list)


class RingBuffer:
    """The ring of one rank."""

    def __init__(self, settings: RingSettings, levels: Levels | None = None):
        """Start empty, with the usual losses and gradient norms of a resumed run, or with none."""
        self.settings = settings
        self.kept = 0  #: events so far
        self._shortened = False  #: whether the ring is known to hold fewer iterations
        self._anomalies = LossSpikeDetector(settings.jumps, levels)
        self._iterations: deque[_Iteration] = deque()

    @property
    def over(self) -> bool:
        """Return whether the ring has been written as often as allowed; the same on every rank."""
        return self.kept >= self.settings.events

    def begin(self, iteration: int) -> None:
        """Add an iteration, and drop the oldest one if the ring is full."""
        while len(self._iterations) >= self.settings.iterations:
            self._drop_oldest()
        self._iterations.append(_Iteration(iteration))

    def add(self, copy: HostCopy, fields: dict[str, Any]) -> None:
        """Add one tensor of the current iteration."""
        self._iterations[-1].held.append((copy, fields))

    def lose(self, size: int, fields: dict[str, Any]) -> None:
        """Record one tensor of the current iteration that does not fit into memory."""
        self._iterations[-1].lost.append((size, fields))

    @property
    def cut(self) -> bool:
        """Return whether the current iteration has lost a tensor; it then loses all later ones."""
        return bool(self._iterations[-1].lost)

    @property
    def numbers(self) -> list[int]:
        """Return the iterations in the ring, oldest first."""
        return [iteration.number for iteration in self._iterations]

    def evict(self) -> bool:
        """Free the memory of the oldest iteration; False if only the current one is left."""
        if len(self._iterations) <= 1:
            return False
        if not (self._shortened or self.cut):
            self._shortened = True
            logger.warning(
                "the ring holds fewer than %d iterations: --collect-max-host-gib has no room for "
                "more than %d of this size; raise it, or select less",
                *(self.settings.iterations, len(self._iterations) - 1),
            )
        self._drop_oldest()
        return True

    def look(self, iteration: int, loss: float | None, grad_norm: float | None) -> str | None:
        """Return why the ring must be written now, or None; the same on every rank."""
        why = self._anomalies.look(iteration, loss, grad_norm)
        return None if self.over else why

    def release(
        self,
        submit: Callable[[HostCopy, dict[str, Any]], bool],
        leave_out: Callable[[Lost], None],
    ) -> list[int]:
        """Pass all tensors to `submit`, oldest first, and lost tensors to `leave_out`.

        The event counts even on a rank that writes none of the iterations, because all ranks must
        agree on when the ring is over.

        Returns:
            The iterations of which `submit` accepted at least one tensor.
        """
        self.kept += bool(self._iterations)
        numbers = []
        while self._iterations:
            iteration = self._iterations.popleft()
            taken = [submit(copy, fields) for copy, fields in iteration.held]
            if any(taken):
                numbers.append(iteration.number)
            if iteration.lost:
                leave_out(iteration.lost)
        return numbers

    def clear(self) -> None:
        """Free all memory of the ring."""
        while self._iterations:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for copy, _ in self._iterations.popleft().held:
            copy.release()
