"""Write collected tensors in background threads, so that training only has to copy them.

Copies waiting to be written occupy host memory, which is bounded. When the memory is used up,
training waits for the disk (back-pressure), but never so long that the other ranks, which wait for
this one, run into a timeout. If a write fails, or the disk accepts no data for minutes, this rank
stops writing and discards all pending records. Training continues.
"""

import contextlib
import logging
import math
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from megatron.collection.host_buffers import HostBuffers, HostCopy
from megatron.collection.limits import OVERHEAD, Disk
from megatron.collection.record_writer import RecordWriter
from megatron.tensor_record import TensorRecord

logger = logging.getLogger(__name__)

THREADS = 3  #: number of writer threads: one computes a checksum while two wait for the disk
PATIENCE = 300.0  #: time without progress after which the disk is considered dead, in seconds


class Writer:
    """Base class for writers of one rank's records; most of its methods do nothing."""

    error: str | None = None  #: reason why writing has stopped; None while it continues
    slow: str | None = None  #: reason why training no longer waits for the disk in this iteration
    disk: Disk | None = None  #: disk usage after the last write; None before the first write
    records: int = 0  #: number of records that are written or pending
    bytes: int = 0  #: size of the written files plus `pending_bytes`
    pending: int = 0  #: number of records that are queued or being written
    pending_bytes: int = 0  #: upper bound on the size of the pending files, in bytes

    @property
    def written(self) -> tuple[int, int]:
        """Number of files written and their total size in bytes."""
        return 0, 0

    def begin_iteration(self) -> None:
        """Reset the time that training has spent waiting for the disk."""

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None:
        """Copy a tensor and its scales to host memory; return None if there is no room for them."""
        raise NotImplementedError

    def submit(self, copy: HostCopy, record: TensorRecord) -> None:
        """Queue a copy for writing; its memory is released after the write."""
        raise NotImplementedError

    def fail(self, why: str) -> None:
        """Stop writing records; the message `why` says what happened and what to do."""

    def append(self, line: dict[str, Any], *, patience: float = 1.0) -> None:
        """Append an event, such as a reached limit, to the index file."""

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card or replace the existing one."""

    def wait(self) -> None:
        """Block training until the pending records are written."""

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait for writes for at most `seconds`; return True if nothing is left to write."""
        return True

    def close(self) -> None:
        """Write all pending records and close all files."""


class BackgroundWriter(Writer):
    """Writer that queues one rank's records and writes them to disk in background threads."""

    def __init__(
        self,
        writer: RecordWriter,
        memory: HostBuffers,
        *,
        complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        patience: float = PATIENCE,
        longest: float = math.inf,
    ):
        """Create the writer; its threads start when the first records are submitted.

        Args:
            writer: writes one record to disk.
            memory: pool of host memory for the copies.
            complete: adds to an event the fields that every line of the index has.
            patience: time without progress after which the disk is considered dead, in seconds.
            longest: maximum time that training may wait per iteration, in seconds.
        """
        self.memory = memory
        self._longest = longest
        self._waited = 0.0  #: seconds that training has waited for the disk in this iteration
        self._writer = writer
        self._complete = complete
        self._patience = patience
        self._latest = time.monotonic()  #: monotonic time at which a write last finished
        self._jobs: queue.SimpleQueue[tuple[HostCopy, TensorRecord] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._index = threading.Lock()
        self._query = threading.Lock()  #: makes the queries of the free space sequential
        self._events: deque[dict[str, Any]] = deque()  #: events that are not yet in the index
        self._dead = False  #: True if the disk is considered dead; writes to it may then hang

    @property
    def records(self) -> int:  # type: ignore[override]
        """Number of records that are written or pending.

        A record whose write ends during this call counts twice, because pending records are
        counted first.
        """
        return self.pending + self._writer.records

    @property
    def bytes(self) -> int:  # type: ignore[override]
        """Size of the written files plus an upper bound on the size of pending files, in bytes.

        A file whose write ends during this call counts twice, because pending files are counted
        first.
        """
        return self.pending_bytes + self._writer.bytes

    @property
    def written(self) -> tuple[int, int]:
        """Number of files written and their total size in bytes."""
        return self._writer.records, self._writer.bytes

    def begin_iteration(self) -> None:
        """Reset the time that training has spent waiting for the disk.

        The ranks have just synchronized, so no other rank is waiting for this one.
        """
        self.slow, self._waited = None, 0.0

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None:
        """Copy a tensor and its scales to host memory; if memory is short, wait for pending writes.

        Args:
            tensor: a tensor that training may change afterward.
            scales: scales of quantized codes, by name; they are stored in the same file.
            evict: called if no write is pending, to free other memory; returns False if there is
                nothing to free.

        Returns:
            The copy, to be passed to `submit`; None if memory has no room for it or writing has
            stopped.
        """
        if self.error is not None:
            return None

        def make_room() -> bool:
            return self._let_training_wait() if self.pending else evict()

        copy = self.memory.copy(tensor, make_room)
        for name, part in scales.items() if copy is not None else ():
            scale_copy = self.memory.copy(part, make_room)
            if scale_copy is None:
                copy.release()
                return None
            copy.scales[name] = scale_copy
        return copy

    def submit(self, copy: HostCopy, record: TensorRecord) -> None:
        """Queue a copy for writing; its memory is released after the write."""
        with self.memory.changed:
            if self.error is None:
                if self.pending == 0:
                    self._latest = time.monotonic()
                self.pending += 1
                self.pending_bytes += _upper_bound(copy)
                self._jobs.put((copy, record))
                self._start()
                return
        copy.release()

    def append(self, line: dict[str, Any], *, patience: float = 1.0) -> None:
        """Append an event to the index file; if that fails, keep the event for a later attempt.

        Args:
            line: the event.
            patience: seconds to wait for another thread that is writing to the index.
        """
        self._events.append(self._complete(line))
        self._write_events(patience)

    def _write_events(self, patience: float = 1.0) -> None:
        if not self._index.acquire(timeout=patience):  # the thread that holds the lock may hang
            return
        try:
            with contextlib.suppress(OSError):
                while self._events and not self._dead:
                    self._writer.append(self._events[0])
                    self._events.popleft()
        finally:
            self._index.release()

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card or replace the existing one, unless the disk does not respond."""
        if not self._dead:
            self._writer.write_run_card(card, last=last)

    def wait(self) -> None:
        """Block training until all records are written, writing stops or time runs out."""
        while self.pending and self._let_training_wait():
            pass

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait for writes for at most `seconds`; return True if nothing is left to write.

        The result is also True if writing has failed, because nothing more will be written then.
        """
        end = time.monotonic() + seconds
        while self.pending and self.error is None and time.monotonic() < end:
            self._wait_for_one(end)
        return not self.pending or self.error is not None

    def close(self) -> None:
        """Write all pending records, then end the threads and close all files."""
        self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        if not self._dead:  # a thread that writes to a dead disk may never end
            for thread in self._threads:
                thread.join(self._patience)
            self._dead = any(thread.is_alive() for thread in self._threads)
        if not self._dead:
            self._write_events()
            self._writer.close()

    def _let_training_wait(self) -> bool:
        """Wait for a write to finish; return False if writing stops or time runs out."""
        began = time.monotonic()
        finished = self._wait_for_one(began + self._longest - self._waited)
        self._waited += time.monotonic() - began
        if not finished and self.error is None:
            self.slow = (
                f"the disk is slow: training has waited {self._waited:.3g} s for it in one "
                "iteration, and the other ranks wait at most twice as long for this rank "
                "(--distributed-timeout-minutes); select less, or increase --collect-max-host-gib"
            )
        return finished

    def _wait_for_one(self, end: float) -> bool:
        """Wait until a write finishes, or until the monotonic clock reaches `end`.

        Return True if a write has finished, and False at `end` or if writing has stopped.
        """
        with self.memory.changed:
            before = self.pending
            while self.error is None and 0 < self.pending == before:
                now = time.monotonic()
                if now >= end:
                    return False
                # Writing a large file to a slow disk takes a long time, so the disk counts as alive
                # while it accepts data.
                left = max(self._latest, self._writer.latest) + self._patience - now
                if left <= 0:
                    break
                self.memory.changed.wait(min(left, end - now))
            else:
                return self.error is None
        self._dead = True
        self._fail_to_write(f"no write has finished for {self._patience:g} s")
        return False

    def _start(self) -> None:
        """Start a writer thread, unless `THREADS` threads or one per pending record already exist.

        No thread exists before the first write, so a process may fork until then.
        """
        if len(self._threads) >= min(THREADS, self.pending):
            return
        thread = threading.Thread(
            target=self._run, name=f"tensor-writer-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # The thread limit is reached, or Python (3.12 or newer) is shutting down.
            if not self._threads:
                self._jobs.put(None)
                self._run()
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, record = job
            try:
                if self.error is None:
                    copy.wait()
                    scales = {name: part.tensor for name, part in copy.scales.items()}
                    self._writer.write(copy.tensor, record, self._index, scales)
                    with self._query:
                        self.disk = shutil.disk_usage(self._writer.directory)
            except Exception as error:  # training continues after any write error
                self._fail_to_write(str(error) or repr(error))
            finally:
                self._finished(copy)

    def _finished(self, copy: HostCopy) -> None:
        with self.memory.changed:
            self._latest = time.monotonic()
            self.pending -= 1
            self.pending_bytes -= _upper_bound(copy)
            copy.release()

    def _fail_to_write(self, why: str) -> None:
        folder = self._writer.directory
        advice = "free space or name another --tensor-save-dir"
        self.fail(f"cannot write to {folder}: {why}; {advice}")

    def fail(self, why: str) -> None:
        """Stop writing and log the reason; only the first call has an effect.

        The message `why` says what happened and what to do.
        """
        with self.memory.changed:
            if self.error is not None:
                return
            self.error = f"collection stopped after {self._writer.records} tensors: {why}"
            self.memory.changed.notify_all()
        logger.error(self.error)
        self.append({"event": "failed", "why": self.error})


def _upper_bound(copy: HostCopy) -> int:
    """Return an upper bound on the size of a copy's file, in bytes."""
    return copy.nbytes + OVERHEAD
