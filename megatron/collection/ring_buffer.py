"""The last iterations of a run, kept in host memory and written only when something happens, so
that what came before a loss spike is there to be looked at.

`--collect-ring K` holds K iterations, or as many as `--collect-max-host-gib` has room for. When
`LossSpikeDetector` finds one unusual, that iteration and those before it are written, and the ring
starts empty again. After a few such events it ends: a run that stays broken would fill the disk.

Of an iteration that alone is more than there is room for, the ring holds what came first.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.collection.host_buffers import HostCopy
from megatron.collection.loss_spikes import Jumps, Levels, LossSpikeDetector

logger = logging.getLogger(__name__)

EVENTS = 3  #: times that a ring is written

Lost = list[tuple[int, dict[str, Any]]]  #: bytes and fields of tensors that are not held


@dataclass(frozen=True, slots=True)
class RingSettings:
    """What the flags say."""

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
        """Read the flags of the same names; None: no ring.

        Raises:
            ValueError: a ring of no iterations, or flags of a ring without one.
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
        """As plain values, for the run card."""
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
    """One rank's ring."""

    def __init__(self, settings: RingSettings, levels: Levels | None = None):
        """Start empty, with the usual losses and gradient norms of a resumed run, or with none."""
        self.settings = settings
        self.kept = 0  #: events
        self._shortened = False  #: memory had no room for all iterations
        self._anomalies = LossSpikeDetector(settings.jumps, levels)
        self._iterations: deque[_Iteration] = deque()

    @property
    def over(self) -> bool:
        """Whether it has been written as often as it may; the same on every rank."""
        return self.kept >= self.settings.events

    def begin(self, iteration: int) -> None:
        """A further iteration is collected: the oldest makes room."""
        while len(self._iterations) >= self.settings.iterations:
            self._drop_oldest()
        self._iterations.append(_Iteration(iteration))

    def add(self, copy: HostCopy, fields: dict[str, Any]) -> None:
        """Hold one tensor of the iteration under way."""
        self._iterations[-1].held.append((copy, fields))

    def lose(self, size: int, fields: dict[str, Any]) -> None:
        """Note one tensor of the iteration under way for which there is no room."""
        self._iterations[-1].lost.append((size, fields))

    @property
    def cut(self) -> bool:
        """Whether the iteration under way has lost a tensor: it then loses the others too."""
        return bool(self._iterations[-1].lost)

    @property
    def numbers(self) -> list[int]:
        """Iterations in the ring, oldest first."""
        return [iteration.number for iteration in self._iterations]

    def evict(self) -> bool:
        """Give back the memory of the oldest iteration; False: there is only the one under way."""
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
        """Why the ring is to be written now, if it is; the same on every rank."""
        why = self._anomalies.look(iteration, loss, grad_norm)
        return None if self.over else why

    def release(
        self,
        submit: Callable[[HostCopy, dict[str, Any]], bool],
        leave_out: Callable[[Lost], None],
    ) -> list[int]:
        """Hand everything to `submit`, oldest first, and what an iteration has lost to `leave_out`;
        returns the iterations of which `submit` took anything.

        An event counts where iterations were collected, also on a rank that writes none of them:
        all ranks must agree on when the ring is over.
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
        """Give all memory back."""
        while self._iterations:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for copy, _ in self._iterations.popleft().held:
            copy.release()
