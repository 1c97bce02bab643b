"""Decide which tensors one rank collects, number them and pass them to the writer.

A failed write, or a limit that is reached, stops only this rank's writing. Its layers continue to
pass their tensors, because all ranks of a parallel group must run the same collective operations.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron.collection.background_writer import BackgroundWriter, Writer
from megatron.collection.capture import MEMORY_ADVICE
from megatron.collection.collectives import from_all_ranks
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.host_buffers import HostBuffers, HostCopy
from megatron.collection.loss_log import LossLog
from megatron.collection.loss_spikes import Levels
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.record_writer import RecordWriter
from megatron.collection.ring_buffer import RingBuffer
from megatron.collection.run_card import (
    collect_run_card,
    failure_of,
    rank_coordinates,
    run_outcome,
    run_status,
)
from megatron.collection.settings import Settings
from megatron.collection.training_clock import clock
from megatron.collection.weight_dedup import WeightDedup
from megatron.collection.write_budget import UnlimitedBudget, WriteBudget
from megatron.tensor_record import TIMESTAMP, TensorRecord

logger = logging.getLogger(__name__)


class Collector:
    """Collector that selects tensors of one rank and passes them to the writer."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        card: dict[str, Any] | None = None,
        writer: Writer | None = None,
        *,
        coordinates: Mapping[str, int] | None = None,
        levels: Levels | None = None,
        limited: bool = True,
    ):
        """Create the collector of one rank.

        Args:
            settings: what to collect and where.
            run_id: identifier of the run.
            card: content of the run card; used on rank 0 only.
            writer: writer of the tensors; by default a `BackgroundWriter` for
                `settings.directory`.
            coordinates: rank and size of each parallel group, as `rank_coordinates` returns them;
                by default a run without parallel groups.
            levels: recent normal losses and gradient norms of a resumed run.
            limited: whether the limits, the ring buffer and the flag file apply.
        """
        self.settings = settings
        self.ranks: list[dict[str, Any]] = []  #: outcome of every rank; set by `session_end.settle`
        self.coordinates = dict(coordinates or rank_coordinates())
        self.run_id = run_id
        self.collected = 0  #: number of completed iterations that were collected
        self._few_said = False  #: True once a warning about too few micro-batches was logged
        self.blocked = 0.0  #: time that training has spent in `save`, in seconds
        self._counter = 0
        self._any_saved = False  #: True if `save` was called in the current iteration
        #: iteration that ended with an exception after tensors were saved; None if there is none
        self._abandoned: int | None = None
        self._wanted: dict[tuple[ModuleIdentity, str], bool] = {}
        self._weights = WeightDedup()
        self._any_rank_collects = False  #: True if any rank has collected a module
        self._writes = self.coordinates["world"] in settings.selection.ranks
        self._card = card or {}
        self._ring = RingBuffer(settings.ring, levels) if limited and settings.ring else None
        self._flag = settings.flag_file if limited else None
        self._writer = writer or self._background_writer()
        self._losses = LossLog(self._writer.append)
        budget = WriteBudget if limited else UnlimitedBudget
        self._budget = budget(settings, self._writer, self.coordinates["world"])
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
        **further: Any,
    ) -> "Collector":
        """Return a collector that writes to disk; `further` adds entries to the run card."""
        card = {}
        coordinates = coordinates or rank_coordinates()
        if coordinates["world"] == 0:
            card = collect_run_card(run_id, args, coordinates) | further | settings.describe()
        return cls(settings, run_id, card, coordinates=coordinates, levels=levels)

    def _background_writer(self) -> BackgroundWriter:
        limits = self.settings.limits
        assert limits.host_bytes is not None, "the limits are shares of one rank"
        files = RecordWriter(self.settings.directory, self.run_id, self.coordinates["world"])
        return BackgroundWriter(
            files,
            HostBuffers(limits.host_bytes),
            complete=self._complete,
            longest=self.settings.longest_wait,
        )

    def _complete(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return `event` with the fields that every index line has: run ID, rank and time."""
        now = {"run_id": self.run_id, "rank": self.coordinates, "wall_time": time.time()}
        return event | now

    @property
    def error(self) -> str | None:
        """Reason why the collection has stopped on this rank; None if it has not stopped."""
        return self._writer.error

    @property
    def is_first(self) -> bool:
        """True on rank 0, which reports for the whole run."""
        return self.coordinates["world"] == 0

    @property
    def complete(self) -> bool:
        """True once `control_iter` iterations have been collected; the same on all ranks."""
        return 0 < self.settings.control_iter <= self.collected

    @property
    def has_ring(self) -> bool:
        """True if tensors are kept in a ring buffer until an event such as a loss spike.

        The trainer must then call `observe` after each iteration.
        """
        return self._ring is not None

    @property
    def may_be_empty(self) -> bool:
        """True if it is not an error that a run ends without a tensor on this rank.

        This is the case if the rank is not selected, if tensors wait for an event, or if only other
        ranks have the selected modules, such as those of another pipeline stage.
        """
        elsewhere = self._any_rank_collects and not any(self._wanted.values())
        return self.has_ring or self._flag is not None or not self._writes or elsewhere

    @property
    def abandoned(self) -> bool:
        """True if the last iteration ended with an exception and some of its tensors were saved."""
        return self._abandoned is not None

    def begin_iteration(self) -> None:
        """Prepare for a new iteration. With `--collect-flag-file`, all ranks must call this."""
        self._check_abandoned()
        self._any_saved = False
        self._writer.begin_iteration()
        if self._flag is not None and self._flag.look():
            state = "on" if self._flag.on else "off"
            if self.is_first:
                # use the level WARNING, because Python shows it even if logging is not set up
                logger.warning("collection %s from iteration %d on", state, clock.iteration)
            self._writer.append({"event": "switched", "to": state, "iteration": clock.iteration})
        self._weights.begin_iteration()
        if self._ring is not None and self.collects(clock.iteration):
            self._ring.begin(clock.iteration)

    def end_iteration(self) -> None:
        """Count the completed iteration if it was collected. Must be called on all ranks."""
        if self.collects(clock.iteration):
            self.collected += 1
            self._check_micro_batches()
            if not (self._any_rank_collects or self.has_ring or self._flag):
                here = self._writes and any(self._wanted.values())
                self._any_rank_collects = any(from_all_ranks(here))

    def _check_micro_batches(self) -> None:
        """Warn once if an iteration has fewer micro-batches than the selection asks for."""
        asked, there = self.settings.selection.micro_batches, clock.micro_batches
        if self.is_first and not self._few_said and 0 < there < asked:
            self._few_said = True
            logger.warning(
                "iteration %d has %d micro-batch%s, fewer than --collect-micro-batches %d",
                *(clock.iteration, there, "es" * (there > 1), asked),
            )

    def abandon_iteration(self, number: int) -> None:
        """Note that an iteration ended with an exception, which may or may not end the program."""
        if self._any_saved:
            self._abandoned = number

    def _check_abandoned(self) -> None:
        """Stop the collection if the program continues after an exception has ended an iteration.

        With a ring buffer, only this iteration is dropped.
        """
        if self._abandoned is None:
            return
        if self._ring is not None:
            if self._ring.numbers[-1:] == [self._abandoned]:
                self._ring.drop_newest()
            self._abandoned = None
            return
        self.give_up(
            f"iteration {self._abandoned} ended with an exception that the program handled, so the "
            "tensors of this iteration are not complete"
        )

    def observe(self, loss: float | None, grad_norm: float | None) -> str | None:
        """Record an iteration's loss and gradient norm; save the ring buffer if either is unusual.

        Returns:
            A one-line message about the event, on every rank; None if the iteration is normal or
            there is no ring buffer.
        """
        if self.is_first:
            self._losses.add(clock.iteration, loss, grad_norm)
        if self._ring is None:
            return None
        why = self._ring.look(clock.iteration, loss, grad_norm)
        return None if why is None else self.keep(why)

    def flush_losses(self) -> None:
        """Write all pending losses and gradient norms to the index."""
        self._losses.flush()

    def keep(self, why: str) -> str | None:
        """Write the content of the ring buffer to disk, because of the event that `why` describes.

        Returns:
            A one-line message with the reason and the result on this rank; None if the ring buffer
            was empty.
        """
        assert self._ring is not None, "there is a ring"
        before, held = self._ring.kept, self._ring.numbers
        iterations = self._ring.release(self._submit_if_it_fits, self._budget.leave_out)
        if self._ring.kept == before:
            return None
        self.flush_losses()
        self._writer.append({"event": "kept", "why": why, "iterations": iterations})
        how = "is kept" if iterations or not self._writes else "cannot be kept"
        text = f"{why}: the ring {how} (event {self._ring.kept} of {self._ring.settings.events})"
        if (now := clock.iteration) not in held:
            text += f"; iteration {now} was not collected, so the ring ends with {held[-1]}"
        return text

    def _discard(self, why: str) -> None:
        """Report in the log and the index that the tensors in the ring buffer are discarded."""
        assert self._ring is not None, "there is a ring"
        if iterations := self._ring.numbers:
            if self.is_first:
                logger.warning("%s: the ring of iterations %s is not kept", why, iterations)
            self._writer.append({"event": "let_go", "why": why, "iterations": iterations})

    def collects(self, iteration: int) -> bool:
        """Return whether `iteration` is collected. All ranks return the same value."""
        return (
            not self.complete
            and (self._flag is None or self._flag.on)
            and (self._ring is None or not self._ring.over)
            and iteration in self.settings.selection.iterations
        )

    def wants(self, identity: ModuleIdentity, layer_type: str) -> bool:
        """Return whether a layer is collected in the current micro-batch.

        The result is the same on every rank that holds the layer.
        """
        now, selection = clock.micro_batch, self.settings.selection
        if now is None or not self.collects(now.iteration):
            return False
        if selection.micro_batches and now.index >= selection.micro_batches:
            return False
        key = (identity, layer_type)
        if key not in self._wanted:
            self._wanted[key] = selection.wants(identity, layer_type)
        return self._wanted[key]

    def selects(self, tensor_name: str) -> bool:
        """Return whether any rank collects tensors with this name."""
        return tensor_name in self.settings.selection.names

    def takes(self, tensor_name: str) -> bool:
        """Return whether this rank writes tensors with this name."""
        return self._writes and self.error is None and self.selects(tensor_name)

    def save(
        self, tensor: torch.Tensor, *, scales: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> None:
        """Save the part of a tensor that `--collect-slice` selects; save codes with their scales.

        A failure or a limit that is reached stops the collection on this rank, but not training.
        """
        if not tensor.is_inference():  # an inference tensor has no version counter
            self._weights.warn_of_change(fields, tensor._version)
        if self.error is not None or not self._weights.is_new(fields):
            return
        part, where = self.settings.selection.slices.cut(tensor.detach(), fields["dims"])
        if part is None:
            self._budget.leave_outside(list(tensor.shape), fields)
            return
        started = time.perf_counter()
        self._any_saved = True
        try:
            with signals_deferred:
                self._take(part, scales or {}, fields | {"slice": where, "wall_time": time.time()})
        except (RuntimeError, MemoryError) as error:  # torch raises either one if memory is short
            self.give_up(f"no memory to copy {fields['tensor_name']}: {error}; {MEMORY_ADVICE}")
        self.blocked += time.perf_counter() - started

    def give_up(self, why: str) -> None:
        """Stop the collection on this rank for the reason `why`; training continues."""
        self._writer.fail(why)
        own = self.coordinates["world"]
        self.ranks = [self.outcome() if rank["rank"] == own else rank for rank in self.ranks]

    def _take(
        self, part: torch.Tensor, scales: dict[str, torch.Tensor], fields: dict[str, Any]
    ) -> None:
        """Copy a tensor to host memory and pass the copy to the writer or the ring buffer."""
        size = sum(tensor.nbytes for tensor in (part, *scales.values()))
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

    def _submit_if_it_fits(self, copy: HostCopy, fields: dict[str, Any]) -> bool:
        """Queue a tensor from the ring buffer for writing; return False if it is left out."""
        fits = self.error is None and self._budget.take(copy.nbytes, fields)
        if fits:
            self._submit(copy, fields)
        else:
            copy.release()
        return fits

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
        """Wait until all tensors are written or writing has failed; return the rank's outcome."""
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

    def add_to_card(self, name: str, value: list[Any] | dict[str, Any]) -> None:
        """Add `value` to the list or dictionary `name` of the run card, which is written later."""
        if isinstance(value, dict):
            self._card[name] = self._card.get(name, {}) | value
        else:
            before = self._card.get(name, [])
            self._card[name] = [*before, *(each for each in value if each not in before)]

    def set_audit(self, quantization: list[dict[str, Any]]) -> None:
        """Set the format audit in the run card, which is written later."""
        self._card["quantization"] = quantization

    def write_card(self, status: str, reason: str | None = None) -> None:
        """Write the run card with the current state of the run, on rank 0 only."""
        if self.is_first:
            ranks = self.ranks or [self.outcome()]
            outcome = run_outcome(ranks, status, reason)
            card = self._card | {"iterations": clock.completed} | outcome
            self._writer.write_run_card(card, last=status != "running")

    def settled(self, seconds: float) -> bool:
        """Wait for writes for at most `seconds`; return True if nothing is left to write."""
        with signals_deferred:
            return self._writer.drain(seconds)

    def close(
        self, aborted: str | None = None, *, interrupted: bool = False, lacking: str | None = None
    ) -> str | None:
        """End the collection.

        Args:
            aborted: reason why training ended early, which causes the ring buffer to be written;
                None if training ended normally.
            interrupted: whether a signal ended training; the ring buffer is then discarded.
            lacking: message for the run card if fewer iterations than requested were collected.

        Returns:
            An error message if the collection has failed; None otherwise.
        """
        if aborted is None:
            self._check_abandoned()
        if self._ring is not None:
            if aborted is not None and not self._ring.over:
                self._discard(aborted) if interrupted else self.keep(aborted)
            self._ring.clear()
        ranks = self.ranks or [self.outcome()]
        self.flush_losses()
        self._budget.close()
        failure = failure_of(ranks)
        try:
            self.write_card(run_status(ranks, aborted or lacking), aborted or lacking)
        except OSError as error:
            failure = failure or f"the run card in {self.settings.directory}: {error}"
        with contextlib.suppress(OSError):
            self._writer.close()
        return failure


def _nothing_to_evict() -> bool:
    return False
