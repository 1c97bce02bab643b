"""Writes records off the training path: training copies a tensor and goes on, threads write it.

Tensors that wait take host memory, and that is bounded: where it is used up, training waits for the
disk (back-pressure), for so long at most that other ranks, which wait for this one, do not give up.
A write that fails, or a disk that takes nothing for minutes, ends the writing of this rank. It
never ends or holds up training: what still waits is dropped.
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
from typing import Any, Protocol

import torch

from megatron.collection.host_buffers import HostBuffers, HostCopy
from megatron.collection.limits import OVERHEAD, Disk
from megatron.collection.record_writer import RecordWriter
from megatron.tensor_record import TensorRecord

logger = logging.getLogger(__name__)

THREADS = 3  #: two wait for the disk while one computes a checksum
PATIENCE = 300.0  #: seconds in which the disk takes nothing after which it counts as dead


class Writer(Protocol):
    """Where records go; what the parts are for, `BackgroundWriter` says."""

    error: str | None
    records: int
    bytes: int
    pending: int
    pending_bytes: int
    disk: Disk | None
    written: tuple[int, int]
    slow: str | None

    def begin_iteration(self) -> None: ...

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None: ...
    def submit(self, copy: HostCopy, record: TensorRecord) -> None: ...
    def fail(self, why: str) -> None: ...
    def append(self, line: dict[str, Any]) -> None: ...
    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None: ...
    def wait(self) -> None: ...
    def drain(self, seconds: float = math.inf) -> bool: ...
    def close(self) -> None: ...


class BackgroundWriter:
    """One rank's writer threads, and what waits for them."""

    def __init__(
        self,
        writer: RecordWriter,
        memory: HostBuffers,
        *,
        complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        patience: float = PATIENCE,
        longest: float = math.inf,
    ):
        """`complete` makes an event what stands in the index; `longest` is for how many seconds
        training may wait in one iteration.
        """
        self.error: str | None = None  #: why writing has ended
        self.pending = 0  #: records that wait or are being written
        self.pending_bytes = 0  #: that they take on disk at most
        self.disk: Disk | None = None  #: as it was after the last write
        self.slow: str | None = None  #: why training waits no more in this iteration
        self.memory = memory
        self._longest = longest
        self._waited = 0.0  #: seconds, in this iteration
        self._writer = writer
        self._complete = complete
        self._patience = patience
        self._latest = time.monotonic()  #: when a write last finished
        self._jobs: queue.SimpleQueue[tuple[HostCopy, TensorRecord] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._index = threading.Lock()
        self._events: deque[dict[str, Any]] = deque()  #: that the disk has not taken yet
        self._dead = False  #: the disk may hold up whoever touches it

    @property
    def records(self) -> int:
        """Written and pending."""
        return self._writer.records + self.pending

    @property
    def bytes(self) -> int:
        """Of files written, and the most that pending ones will take."""
        return self._writer.bytes + self.pending_bytes

    @property
    def written(self) -> tuple[int, int]:
        """Files and bytes on disk."""
        return self._writer.records, self._writer.bytes

    def begin_iteration(self) -> None:
        """All ranks were at one place, so that none waits for this one yet."""
        self.slow, self._waited = None, 0.0

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> HostCopy | None:
        """A copy to submit; waits for the disk while memory is short.

        Args:
            tensor: what training may change afterwards.
            scales: of codes, stored beside them.
            evict: gives memory back that no write will free; False: there is none.

        Returns:
            None if there is no room for it, or the writing has ended.
        """
        if self.error is not None:
            return None

        def make_room() -> bool:
            return self._let_training_wait() if self.pending else evict()

        copy = self.memory.copy(tensor, make_room)
        for name, part in scales.items() if copy is not None else ():
            of_part = self.memory.copy(part, make_room)
            if of_part is None:
                copy.release()
                return None
            copy.scales[name] = of_part
        return copy

    def submit(self, copy: HostCopy, record: TensorRecord) -> None:
        """Have it written; the memory is given back afterwards."""
        with self.memory.changed:
            if self.error is None:
                if self.pending == 0:
                    self._latest = time.monotonic()
                self.pending += 1
                self.pending_bytes += _most(copy)
                self._jobs.put((copy, record))
                self._start()
                return
        copy.release()

    def append(self, line: dict[str, Any]) -> None:
        """Add an event to the index, at the end if the disk does not let it now."""
        self._events.append(self._complete(line))
        self._write_events()

    def _write_events(self) -> None:
        if not self._index.acquire(timeout=1.0):  # a thread hangs in the file system with it
            return
        try:
            with contextlib.suppress(OSError):
                while self._events and not self._dead:
                    self._writer.append(self._events[0])
                    self._events.popleft()
        finally:
            self._index.release()

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write this run's card, or replace it by the last one."""
        if not self._dead:
            self._writer.write_run_card(card, last=last)

    def wait(self) -> None:
        """Have training wait until everything is written, or for as long as it may."""
        while self.pending and self._let_training_wait():
            pass

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait until everything is written, or the writing has ended; False: neither is so after
        `seconds`.
        """
        end = time.monotonic() + seconds
        while self.pending and self.error is None and time.monotonic() < end:
            self._wait_for_one(end)
        return not self.pending or self.error is not None

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        if not self._dead:  # else one of them hangs in the file system
            for thread in self._threads:
                thread.join(self._patience)
            self._dead = any(thread.is_alive() for thread in self._threads)
        if not self._dead:
            self._write_events()
            self._writer.close()

    def _let_training_wait(self) -> bool:
        """Until a write has finished; False if the writing has ended, or training may not wait."""
        began = time.monotonic()
        found = self._wait_for_one(began + self._longest - self._waited)
        self._waited += time.monotonic() - began
        if not found and self.error is None:
            self.slow = (
                f"the disk is slow, for which training has waited {self._waited:.3g} s in one "
                "iteration, and the other ranks (--distributed-timeout-minutes) wait no longer "
                "than twice that; select less, or give more --collect-max-host-gib"
            )
        return found

    def _wait_for_one(self, end: float) -> bool:
        """Until a write has finished; False if the writing has ended, or none has before `end`."""
        with self.memory.changed:
            before = self.pending
            while self.error is None and 0 < self.pending == before:
                now = time.monotonic()
                if now >= end:
                    return False
                # A large file takes a slow disk long: it is at work while it takes pieces of it.
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
        """Threads that run once there is something to write: a fork before that has none."""
        if len(self._threads) >= min(THREADS, self.pending):
            return
        thread = threading.Thread(
            target=self._run, name=f"tensor-writer-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # there may be no further one; while Python 3.12 ends, none at all
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
            except Exception as error:  # whatever it is, training goes on
                self._fail_to_write(str(error) or repr(error))
            finally:
                self._finished(copy)

    def _finished(self, copy: HostCopy) -> None:
        with self.memory.changed:
            self._latest = time.monotonic()
            self.pending -= 1
            self.pending_bytes -= _most(copy)
            copy.release()

    def _fail_to_write(self, why: str) -> None:
        folder = self._writer.directory
        advice = "free space or name another --tensor-save-dir"
        self.fail(f"cannot write to {folder}: {why}; {advice}")

    def fail(self, why: str) -> None:
        """End the writing, once; `why` is what happened and what to do."""
        with self.memory.changed:
            if self.error is not None:
                return
            self.error = f"collection stopped after {self._writer.records} tensors: {why}"
            self.memory.changed.notify_all()
        logger.error(self.error)
        self.append({"event": "failed", "why": self.error})


def _most(copy: HostCopy) -> int:
    """Bytes that a file takes at most."""
    return copy.nbytes + OVERHEAD
