"""One rank's collection: decides what is collected, numbers it and hands it to the writer.

A write that fails and a limit that is reached both end the writing of this rank and nothing else:
layers go on showing their tensors, because the ranks of a parallel group must communicate alike.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron.collection import outcomes
from megatron.collection.background_writer import BackgroundWriter, Writer
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.host_buffers import HostBuffers, HostCopy
from megatron.collection.loss_spikes import Levels
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.record_writer import RecordWriter
from megatron.collection.ring_buffer import RingBuffer
from megatron.collection.run_card import collect_run_card, rank_coordinates
from megatron.collection.settings import Settings
from megatron.collection.training_clock import clock
from megatron.collection.weight_dedup import WeightDedup
from megatron.collection.write_budget import WriteBudget
from megatron.tensor_record import TIMESTAMP, TensorRecord

logger = logging.getLogger(__name__)


class Collector:
    """See the module's docstring."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        card: dict[str, Any] | None = None,
        writer: Writer | None = None,
        *,
        coordinates: Mapping[str, int] | None = None,
        levels: Levels | None = None,
    ):
        self.settings = settings
        self.ranks: list[dict[str, Any]] = []  #: how each rank fared, known after `settle`
        self.coordinates = dict(coordinates or rank_coordinates())
        self.run_id = run_id
        self.collected = 0  #: iterations
        self.blocked = 0.0  #: seconds that training spent here
        self._counter = 0
        self._wanted: dict[tuple[ModuleIdentity, str], bool] = {}
        self._weights = WeightDedup()
        self._writes = self.coordinates["world"] in settings.selection.ranks
        self._card = card or {}
        self._ring = None if settings.ring is None else RingBuffer(settings.ring, levels)
        self._flag = settings.flag_file
        self._writer = writer or self._background_writer()
        self._budget = WriteBudget(settings, self._writer, self.coordinates["world"])
        self.write_card("running")

    @classmethod
    def start(
        cls,
        settings: Settings,
        run_id: str,
        args: dict[str, Any],
        *,
        coordinates: Mapping[str, int] | None = None,
        levels: Levels | None = None,
        **more: Any,
    ):
        """One that writes; `more` goes to the run card."""
        card = {}
        coordinates = coordinates or rank_coordinates()
        if coordinates["world"] == 0:
            card = collect_run_card(run_id, args, coordinates) | more | settings.describe()
        return cls(settings, run_id, card, coordinates=coordinates, levels=levels)

    def _background_writer(self) -> BackgroundWriter:
        limits = self.settings.limits
        assert limits.host_bytes is not None, "the limits are a rank's share"
        files = RecordWriter(self.settings.directory, self.run_id, self.coordinates["world"])
        return BackgroundWriter(
            files,
            HostBuffers(limits.host_bytes),
            complete=self._complete,
            longest=self.settings.longest_wait,
        )

    def _complete(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event of this run, as the index has it."""
        now = {"run_id": self.run_id, "rank": self.coordinates, "wall_time": time.time()}
        return event | now

    @property
    def error(self) -> str | None:
        """Why the writing of this rank has ended, if it has."""
        return self._writer.error

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.coordinates["world"] == 0

    @property
    def complete(self) -> bool:
        """Whether as many iterations are done as `control_iter` says; the same on every rank."""
        return 0 < self.settings.control_iter <= self.collected

    @property
    def has_ring(self) -> bool:
        """Whether anything waits for `observe`."""
        return self._ring is not None

    def begin_iteration(self) -> None:
        """Look whether the iteration that begins now is collected; collective with a flag file."""
        self._writer.begin_iteration()
        if self._flag is not None and self._flag.look():
            state = "on" if self._flag.on else "off"
            if self.is_first:  # a warning is seen where logging is not set up
                logger.warning("collection %s from iteration %d on", state, clock.iteration)
            self._writer.append({"event": "switched", "to": state, "iteration": clock.iteration})
        self._weights.begin_iteration()
        if self._ring is not None and self._collects(clock.iteration):
            self._ring.begin(clock.iteration)

    def end_iteration(self) -> None:
        """Count the iteration that is now done if it was collected."""
        if self._collects(clock.iteration):
            self.collected += 1

    def observe(self, loss: float | None, grad_norm: float | None) -> str | None:
        """Look at what an iteration came to, and write the ring if that is unusual.

        Returns:
            What happened, if the ring was to be written; on every rank, or on none.
        """
        if self._ring is None:
            return None
        why = self._ring.look(clock.iteration, loss, grad_norm)
        return None if why is None else self.keep(why)

    def keep(self, why: str) -> str | None:
        """Write the ring; returns a line about it, which says how this rank fared, or None if
        nothing was in it.
        """
        assert self._ring is not None, "there is a ring"
        before = self._ring.kept
        iterations = self._ring.release(self._submit_if_room, self._budget.leave_out)
        if self._ring.kept == before:
            return None
        self._writer.append({"event": "kept", "why": why, "iterations": iterations})
        how = "is kept" if iterations or not self._writes else "cannot be kept"
        return f"{why}: the ring {how} ({self._ring.kept} of {self._ring.settings.events})"

    def _let_go(self, why: str) -> None:
        """Say that a ring is not written."""
        assert self._ring is not None, "there is a ring"
        if iterations := self._ring.numbers:
            if self.is_first:
                logger.warning("%s: the ring of iterations %s is not kept", why, iterations)
            self._writer.append({"event": "let_go", "why": why, "iterations": iterations})

    def _collects(self, iteration: int) -> bool:
        """The same on every rank."""
        return (
            not self.complete
            and (self._flag is None or self._flag.on)
            and (self._ring is None or not self._ring.over)
            and iteration in self.settings.selection.iterations
        )

    def wants(self, identity: ModuleIdentity, layer_type: str) -> bool:
        """Whether a layer shows its tensors at this moment; the same on every rank that has it."""
        now, selection = clock.micro_batch, self.settings.selection
        if now is None or not self._collects(now.iteration):
            return False
        if selection.micro_batches and now.index >= selection.micro_batches:
            return False
        key = (identity, layer_type)
        if key not in self._wanted:
            self._wanted[key] = selection.wants(identity, layer_type)
        return self._wanted[key]

    def selects(self, tensor_name: str) -> bool:
        """Whether tensors of that name are collected, by any rank."""
        return tensor_name in self.settings.selection.names

    def takes(self, tensor_name: str) -> bool:
        """Whether this rank writes tensors of that name."""
        return self._writes and self.error is None and self.selects(tensor_name)

    def save(
        self, tensor: torch.Tensor, *, scales: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> None:
        """Take one tensor, or the part that is selected, and the scales of codes; a failure or a
        limit ends the collection of this rank, not the training.
        """
        if self.error is not None or not self._weights.is_new(fields):
            return
        part, where = self.settings.selection.slices.cut(tensor.detach(), fields["dims"])
        if part is None:
            self._budget.leave_outside(list(tensor.shape), fields)
            return
        started = time.perf_counter()
        try:
            with signals_deferred:
                self._take(part, scales or {}, fields | {"slice": where, "wall_time": time.time()})
        except (RuntimeError, MemoryError) as error:  # of torch's allocators
            self.give_up(f"no memory to copy {fields['tensor_name']}: {error}")
        self.blocked += time.perf_counter() - started

    def give_up(self, why: str) -> None:
        """End the collection of this rank for want of memory, not the training."""
        self._writer.fail(f"{why}; select less, or lower --collect-max-host-gib")

    def _take(
        self, part: torch.Tensor, scales: dict[str, torch.Tensor], fields: dict[str, Any]
    ) -> None:
        """Copy a tensor to the host, for the writer or for the ring."""
        size = sum(each.numel() * each.element_size() for each in (part, *scales.values()))
        ring, copy = self._ring, None
        if ring is None and not self._budget.take(size, fields):
            return
        if ring is None or not (self._budget.full or ring.cut):
            evict = _nothing_to_evict if ring is None else ring.evict
            copy = self._writer.hold(part, scales, evict)
        if copy is not None:
            add = self._submit if ring is None else ring.add
            add(copy, fields)
        elif self.error is None and ring is None:
            self._budget.drop_for_memory(size, fields)
        elif self.error is None:
            self._budget.warn_of_ring(size, fields)
            ring.lose(size, fields)

    def _submit_if_room(self, copy: HostCopy, fields: dict[str, Any]) -> bool:
        found = self.error is None and self._budget.take(copy.nbytes, fields)
        if found:
            self._submit(copy, fields)
        else:
            copy.release()
        return found

    def _submit(self, copy: HostCopy, fields: dict[str, Any]) -> None:
        self._counter += 1
        record = TensorRecord(
            run_id=self.run_id,
            counter=self._counter,
            timestamp=time.strftime(TIMESTAMP, time.localtime(fields["wall_time"])),
            quant_type=self.settings.quant_type,
            shape=list(copy.tensor.shape),
            dtype=str(copy.tensor.dtype).removeprefix("torch."),
            rank=self.coordinates,
            **fields,
        )
        self._writer.submit(copy, record)

    def outcome(self) -> dict[str, Any]:
        """How this rank fared, as plain values; waits until everything is on disk."""
        with signals_deferred:
            self._writer.drain()
        tensors, size = self._writer.written
        return {
            "rank": self.coordinates["world"],
            "tensors": tensors,
            "bytes": size,
            "error": self.error,
            "limit": self._budget.limit,
            "dropped_tensors": self._budget.dropped,
            "dropped_bytes": self._budget.dropped_bytes,
            "outside_slice": self._budget.outside_slice,
            "seconds_in_training": round(self.blocked, 6),
        }

    def write_card(self, status: str, reason: str | None = None) -> None:
        """Write the run card with how the run stands, from the first rank."""
        if self.is_first:
            ranks = self.ranks or [self.outcome()]
            outcome = outcomes.of_run(ranks, status, reason)
            card = self._card | {"iterations": clock.completed} | outcome
            self._writer.write_run_card(card, last=status != "running")

    def settled(self, seconds: float) -> bool:
        """Whether everything is on disk, after a wait of so many seconds at most."""
        with signals_deferred:
            return self._writer.drain(seconds)

    def close(self, aborted: str | None = None, *, interrupted: bool = False) -> str | None:
        """End the collection; returns what went wrong with it, if anything did.

        Args:
            aborted: why the training ended before its time, if it did. A ring is kept then.
            interrupted: it was told to end, which is nothing to keep a ring for.
        """
        if self._ring is not None:
            if aborted is not None and not self._ring.over:
                self._let_go(aborted) if interrupted else self.keep(aborted)
            self._ring.clear()
        ranks = self.ranks or [self.outcome()]
        self._budget.close()
        failure = outcomes.failure(ranks)
        try:
            self.write_card(outcomes.status(ranks, aborted), aborted)
        except OSError as error:
            failure = failure or f"the run card in {self.settings.directory}: {error}"
        with contextlib.suppress(OSError):
            self._writer.close()
        return failure


def _nothing_to_evict() -> bool:
    return False
