"""Write records in background threads: training copies a tensor and continues.

Copies that wait to be written take host memory, which is bounded. When it is used up, training
waits for the disk (back-pressure). It never waits so long that the other ranks, which wait for this
one, run into a timeout. A failed write, or a disk that accepts nothing for minutes, ends the
writing of this rank and drops what still waits. It neither ends nor blocks training.
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

THREADS = 3  #: so that one computes a checksum while two wait for the disk
PATIENCE = 300.0  #: seconds without progress after which the disk counts as dead


class Writer:
    """The destination of one rank's records. This base class stores nothing and never fails."""

    error: str | None = None  #: why writing has ended; None while it goes on
    slow: str | None = None  #: why training no longer waits for the disk in this iteration
    disk: Disk | None = None  #: usage of the disk after the last write
    records: int = 0  #: records written and pending
    bytes: int = 0  #: bytes of the files written, and the upper bound of the pending ones
    pending: int = 0  #: records that wait or are being written
    pending_bytes: int = 0  #: upper bound of the bytes that pending records take on disk

    @property
    def written(self) -> tuple[int, int]:
        """The number of files on disk, and their bytes."""
        return 0, 0

    def begin_iteration(self) -> None:
        """Reset the time that training has waited for the disk."""

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None:
        """Return a copy of a tensor and its scales to submit; None if there is no memory."""
        raise NotImplementedError

    def submit(self, copy: HostCopy, record: TensorRecord) -> None:
        """Have a copy written; its memory is given back afterwards."""
        raise NotImplementedError

    def fail(self, why: str) -> None:
        """End the writing; `why` says what happened and what to do."""

    def append(self, line: dict[str, Any]) -> None:
        """Add an event to the index."""

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card, or replace it."""

    def wait(self) -> None:
        """Make training wait for the disk."""

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait for at most `seconds`, and return whether nothing is left to be written."""
        return True

    def close(self) -> None:
        """Write everything that is left, and close all files."""


class BackgroundWriter(Writer):
    """One rank's writer threads, and the queue in front of them."""

    def __init__(
        self,
        writer: RecordWriter,
        memory: HostBuffers,
        *,
        complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        patience: float = PATIENCE,
        longest: float = math.inf,
    ):
        """Start without threads.

        Args:
            writer: writes one record.
            memory: host memory for the copies.
            complete: adds the fields that every line of the index has to an event.
            patience: seconds without progress after which the disk counts as dead.
            longest: seconds that training may wait per iteration.
        """
        self.memory = memory
        self._longest = longest
        self._waited = 0.0  #: seconds that training has waited in this iteration
        self._writer = writer
        self._complete = complete
        self._patience = patience
        self._latest = time.monotonic()  #: when a write last finished; monotonic
        self._jobs: queue.SimpleQueue[tuple[HostCopy, TensorRecord] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._index = threading.Lock()
        self._events: deque[dict[str, Any]] = deque()  #: events that are not in the index yet
        self._dead = False  #: whether a call on the disk may hang

    @property
    def records(self) -> int:  # type: ignore[override]
        """The number of records written and pending."""
        return self._writer.records + self.pending

    @property
    def bytes(self) -> int:  # type: ignore[override]
        """The bytes of the files written, and the upper bound of the pending ones."""
        return self._writer.bytes + self.pending_bytes

    @property
    def written(self) -> tuple[int, int]:
        """The number of files on disk, and their bytes."""
        return self._writer.records, self._writer.bytes

    def begin_iteration(self) -> None:
        """Reset the waiting time: all ranks have just met, so none waits for this one yet."""
        self.slow, self._waited = None, 0.0

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None:
        """Return a copy to submit, after waiting for the disk while memory is short.

        Args:
            tensor: a tensor that training may change afterwards.
            scales: scales of codes, by name; they are stored in the same file.
            evict: frees memory that no write will free; returns False if there is none.

        Returns:
            The copy; None if memory has no room for it, or the writing has ended.
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
        """Queue a copy for writing; its memory is given back afterwards."""
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

    def append(self, line: dict[str, Any]) -> None:
        """Add an event to the index, or keep it for the end if the disk does not accept it now."""
        self._events.append(self._complete(line))
        self._write_events()

    def _write_events(self) -> None:
        if not self._index.acquire(timeout=1.0):  # a thread that holds it hangs in the file system
            return
        try:
            with contextlib.suppress(OSError):
                while self._events and not self._dead:
                    self._writer.append(self._events[0])
                    self._events.popleft()
        finally:
            self._index.release()

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card, or replace it, unless the disk is dead."""
        if not self._dead:
            self._writer.write_run_card(card, last=last)

    def wait(self) -> None:
        """Make training wait until everything is written, for no longer than allowed."""
        while self.pending and self._let_training_wait():
            pass

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait for at most `seconds`, and return whether everything is written.

        The result is also true if the writing has failed, because then nothing is left to wait for.
        """
        end = time.monotonic() + seconds
        while self.pending and self.error is None and time.monotonic() < end:
            self._wait_for_one(end)
        return not self.pending or self.error is not None

    def close(self) -> None:
        """Write everything that waits, and end the threads."""
        self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        if not self._dead:  # a thread of a dead disk hangs in the file system
            for thread in self._threads:
                thread.join(self._patience)
            self._dead = any(thread.is_alive() for thread in self._threads)
        if not self._dead:
            self._write_events()
            self._writer.close()

    def _let_training_wait(self) -> bool:
        """Wait until a write finishes; False if writing has ended or training may not wait."""
        began = time.monotonic()
        finished = self._wait_for_one(began + self._longest - self._waited)
        self._waited += time.monotonic() - began
        if not finished and self.error is None:
            self.slow = (
                f"the disk is slow, for which training has waited {self._waited:.3g} s in one "
                "iteration, and the other ranks (--distributed-timeout-minutes) wait no longer "
                "than twice that; select less, or give more --collect-max-host-gib"
            )
        return finished

    def _wait_for_one(self, end: float) -> bool:
        """Wait for a write until `end`; False if none has finished, or the writing has ended."""
        with self.memory.changed:
            before = self.pending
            while self.error is None and 0 < self.pending == before:
                now = time.monotonic()
                if now >= end:
                    return False
                # A slow disk needs long for a large file, but is alive while it accepts parts.
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
        """Start a thread if one is needed; a process that forks before the first write has none."""
        if len(self._threads) >= min(THREADS, self.pending):
            return
        thread = threading.Thread(
            target=self._run, name=f"tensor-writer-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the limit on threads, or Python 3.12 at its exit
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
                    self.disk = shutil.disk_usage(self._writer.directory)
            except Exception as error:  # no error of a write may end training
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
        """End the writing, once; `why` says what happened and what to do."""
        with self.memory.changed:
            if self.error is not None:
                return
            self.error = f"collection stopped after {self._writer.records} tensors: {why}"
            self.memory.changed.notify_all()
        logger.error(self.error)
        self.append({"event": "failed", "why": self.error})


def _upper_bound(copy: HostCopy) -> int:
    """Return the upper bound of the bytes that a file takes."""
    return copy.nbytes + OVERHEAD
