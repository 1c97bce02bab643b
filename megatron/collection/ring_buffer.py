"""Keep the tensors of the last iterations in memory, and write them only after an event.

The iterations before a loss spike can then be inspected.

`--collect-ring K` keeps K iterations, or as many as fit into `--collect-max-host-gib`. When
`LossSpikeDetector` finds an unusual iteration, the ring buffer writes it and the iterations before
it, and then starts empty again. Collection ends after a few such events, because a run that remains
unstable would fill the disk.

If not even one iteration fits into memory, the ring buffer keeps only its first tensors.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.collection.host_buffers import HostCopy
from megatron.collection.loss_spikes import Jumps, Levels, LossSpikeDetector

logger = logging.getLogger(__name__)

EVENTS = 3  #: default maximum number of times that the ring buffer is written

#: Size in bytes and record fields of each tensor that did not fit into host memory.
Lost = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class RingSettings:
    """Settings of the ring buffer, parsed from the command-line flags."""

    iterations: int  #: maximum number of iterations in the ring buffer
    events: int = EVENTS  #: maximum number of times that the ring buffer is written
    jumps: Jumps = field(default_factory=Jumps)

    @classmethod
    def parse(
        cls,
        collect_ring: int | None = None,
        collect_ring_events: int | None = None,
        **jumps: float | None,
    ) -> "RingSettings | None":
        """Create the ring buffer's settings from flags; each parameter is named after its flag.

        Return None without `--collect-ring`.

        Raises:
            ValueError: if a value is invalid, or if `--collect-ring` is missing but another flag of
                the ring buffer is set.
        """
        if collect_ring is None:
            given = {"collect_ring_events": collect_ring_events, **jumps}
            for flag, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"--{flag.replace('_', '-')} {value} needs a ring of iterations; add "
                        "--collect-ring K, or leave this flag out"
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

    def with_vocabulary(self, tokens: int | None) -> "RingSettings":
        """Return these settings for a vocabulary of `tokens` tokens; None means an unknown size."""
        return replace(self, jumps=replace(self.jumps, vocabulary=tokens))

    def describe(self) -> dict[str, Any]:
        """Return the ring buffer's settings as plain values, for the run card."""
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
    """Ring buffer that keeps copies of the tensors of one rank's last iterations."""

    def __init__(self, settings: RingSettings, levels: Levels | None = None):
        """Create an empty ring buffer.

        Args:
            settings: settings of the ring buffer.
            levels: recent normal losses and gradient norms of a resumed run; None for a new run.
        """
        self.settings = settings
        self.kept = 0  #: number of events (such as loss spikes) so far
        self._shortened = False  #: True once a warning about too little memory was logged
        self._anomalies = LossSpikeDetector(settings.jumps, levels)
        self._iterations: deque[_Iteration] = deque()

    @property
    def over(self) -> bool:
        """True once `settings.events` events, such as loss spikes, have occurred.

        All ranks have the same value.
        """
        return self.kept >= self.settings.events

    def begin(self, iteration: int) -> None:
        """Start a new iteration; drop the oldest one if the ring buffer is full."""
        while len(self._iterations) >= self.settings.iterations:
            self._drop_oldest()
        self._iterations.append(_Iteration(iteration))

    def add(self, copy: HostCopy, fields: dict[str, Any]) -> None:
        """Add the copy of one tensor to the current iteration."""
        self._iterations[-1].held.append((copy, fields))

    def lose(self, size: int, fields: dict[str, Any]) -> None:
        """Record that one tensor of the current iteration does not fit into memory."""
        self._iterations[-1].lost.append((size, fields))

    @property
    def cut(self) -> bool:
        """True if a tensor of the current iteration did not fit into memory.

        Later tensors of the iteration are then left out.
        """
        return bool(self._iterations[-1].lost)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the iterations in the ring buffer, oldest first."""
        return [iteration.number for iteration in self._iterations]

    def evict(self) -> bool:
        """Release the oldest iteration's memory; if only one is left, keep it and return False."""
        if len(self._iterations) <= 1:
            return False
        if not (self._shortened or self.cut):
            self._shortened = True
            logger.warning(
                "the ring holds fewer than %d iterations: --collect-max-host-gib has room for "
                "only %d of this size; raise this limit, or select less",
                *(self.settings.iterations, len(self._iterations) - 1),
            )
        self._drop_oldest()
        return True

    def look(self, iteration: int, loss: float | None, grad_norm: float | None) -> str | None:
        """Check an iteration's loss and gradient norm; return why to save the ring buffer, or None.

        The result is the same on every rank.
        """
        why = self._anomalies.look(iteration, loss, grad_norm)
        return None if self.over else why

    def release(
        self,
        submit: Callable[[HostCopy, dict[str, Any]], bool],
        leave_out: Callable[[Lost], None],
    ) -> list[int]:
        """Pass all tensors to `submit` after an event such as a loss spike; empty the ring buffer.

        The event counts even on a rank that writes none of the iterations, because all ranks must
        stop after the same event.

        Args:
            submit: called with the copy and the fields of each kept tensor, oldest first; returns
                whether the tensor is written.
            leave_out: called with the lost tensors of each iteration that has any.

        Returns:
            Numbers of the iterations of which `submit` accepted at least one tensor.
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

    def drop_newest(self) -> None:
        """Release the memory of the current iteration, which ended with an exception."""
        for copy, _ in self._iterations.pop().held:
            copy.release()

    def clear(self) -> None:
        """Release all memory of the ring buffer."""
        while self._iterations:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for copy, _ in self._iterations.popleft().held:
            copy.release()
