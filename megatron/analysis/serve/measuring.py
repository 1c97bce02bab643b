"""Measure the tensors that are not measured yet, without slowing down the pages.

A process of low priority measures small batches, the visible tensors first, and stores the results
in the cache that `stats`, `draw` and `report` share. What these commands measured is read from the
cache. A thread would slow down the server, because unpacking results holds the interpreter lock.

A tensor that a user opens is measured at once, in a thread of the server, because the process waits
while a view is drawn; see `priority`.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from megatron.analysis.serve.catalog import AXES, Catalog
from megatron.analysis.serve.follower import LINKED, Follower
from megatron.analysis.serve.priority import Priority, blocked_signals, obey
from megatron.analysis.serve.statistics import ERRORS, VALUES, Measured, Numbers, pick
from megatron.analysis.stats.cache import Cache, open_cache
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.jobs import Failure, Job, measure_job
from megatron.analysis.stats.logical_tensors import LogicalTensor, logical_tensors
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.result import TensorArrays
from megatron.analysis.stats.result_columns import arrays_of, format_numbers, value_numbers
from megatron.analysis.stats.tensor import measure as measure_tensor
from megatron.fake_quant.names import get_format

BATCH_SECONDS = 0.25  #: desired duration of a batch
MOST = 64  #: maximum number of tensors in a batch
SAVE_PERIOD = 30.0  #: minimum time between two writes of the numbers, in seconds
MOST_OTHERS = 8  #: maximum number of formats that pages have added to those of the command line
PRIORITY = 10  #: niceness of the measuring process


@dataclass(frozen=True)
class Work:
    """Tensors to measure, in a form that can be sent to another process."""

    records: pd.DataFrame  #: records of all files of the tensors
    beside: pd.DataFrame  #: records of V tensors, from which the size of a head is read
    formats: tuple[str, ...]
    cache: Path | None
    folder: Path


@dataclass(frozen=True)
class Answer:
    """Result of measuring one tensor."""

    path: str  #: path of the tensor's first file
    measured: Measured | None
    arrays: TensorArrays | None
    formats: dict[tuple[str, str], dict[str, float]]  #: all numbers by format and axis
    why: str = ""  #: reason why the tensor could not be measured


def _cache_of(work: Work) -> AbstractContextManager[Cache | None]:
    """Open the cache; yield None if the dump was deleted, so that its folder is not recreated."""
    return open_cache(work.cache if work.folder.is_dir() else None, work.folder)


def measure(work: Work, *, with_arrays: bool = False) -> list[Answer]:
    """Measure tensors, or read their results from the cache."""
    answers = []
    with _cache_of(work) as cache:
        for tensor in logical_tensors(work.records, dump=work.beside):
            merger = ResultMerger([tensor], work.formats, cache)
            answers.append(_answer(tensor, merger, merger.jobs(), with_arrays=with_arrays))
    return answers


def cached(work: Work) -> list[Answer] | None:
    """Return the results of tensors if all of them are in the cache, otherwise None."""
    if work.cache is None:
        return None
    answers = []
    with _cache_of(work) as cache:
        for tensor in logical_tensors(work.records, dump=work.beside):
            merger = ResultMerger([tensor], work.formats, cache)
            if jobs := merger.jobs():
                return None
            answers.append(_answer(tensor, merger, jobs, with_arrays=True))
    return answers


def _answer(
    tensor: LogicalTensor, merger: ResultMerger, jobs: Sequence[Job], *, with_arrays: bool
) -> Answer:
    why = ""
    for _, result in merger.results((job.number, measure_job(job)) for job in jobs):
        if isinstance(result, Failure):
            why = result.why
            continue
        values, errors = result
        rows = {
            (name, axis): format_numbers(get_format(name), own)
            for (name, axis), own in errors.items()
        }
        numbers = dict(value_numbers(values))
        numbers["zero_share"] = (
            numbers["zeros"] / numbers["count"] if numbers["count"] else math.nan
        )
        in_formats = {name: _both_axes(name, rows) for name in merger.formats}
        arrays = arrays_of(values, errors) if with_arrays else None
        return Answer(
            tensor.row.path, Measured(pick(numbers, VALUES), in_formats), arrays, rows, why
        )
    return Answer(tensor.row.path, None, None, {}, why or "its files cannot be read")


def load_kernels(formats: Sequence[str]) -> None:
    """Load the kernels by measuring small tensors, so that a user need not wait for them."""
    for dtype in (torch.bfloat16, torch.float32):
        with contextlib.suppress(Exception):  # the same error would appear for a real tensor
            shape = (64, 64)
            matrix = matrix_view_of(shape, layer_type="linear", tensor_name="input")
            measure_tensor(torch.ones(shape, dtype=dtype), matrix, group_formats(formats))


def _both_axes(name: str, rows: dict[tuple[str, str], dict[str, float]]) -> tuple[float, ...]:
    found: tuple[float, ...] = ()
    for axis in AXES:
        numbers = rows.get((name, axis), rows.get((name, "all")))
        if numbers is None:
            return ()
        found += pick(numbers, ERRORS)
    return found


def _prepare_process() -> None:
    """Lower the priority of the measuring process, and make it exit when the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    obey()
    with contextlib.suppress(OSError):
        os.nice(PRIORITY)
    torch.set_num_threads(1)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class Measurer:
    """A thread that keeps the measuring process busy until all tensors are measured.

    Args:
        follower: source of the records.
        numbers: table to which the results are added.
        formats: formats that are measured for every tensor.
        cache: folder of the cache; None if it cannot be written.
        priority: tells the measuring process to wait while a view is drawn.
        in_process: measure on a thread of this process, for tests.
    """

    def __init__(
        self,
        follower: Follower,
        numbers: Numbers,
        formats: Sequence[str],
        *,
        cache: Path | None,
        priority: Priority | None = None,
        in_process: bool = False,
    ):
        self.follower, self.numbers, self.cache = follower, numbers, cache
        self._priority = priority or Priority()
        #: executor with a single thread, because each measuring thread has its own tables of counts
        self._asked = ThreadPoolExecutor(1, "asked")
        self._always = tuple(formats)
        self.formats: list[str] = [*formats]
        self._in_process = in_process
        self._executor: Executor | None = None
        self._visible: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._size = 4
        self.done = self.total = 0  #: number of measured tensors, and number of all tensors
        self.visible_left = 0  #: number of visible tensors that are not measured yet
        self.rate = 0.0  #: tensors per second
        self._saved = (0, 0.0)  #: version of the numbers in the file, and time of writing
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="measurer", daemon=True)

    def fork(self) -> None:
        """Start the measuring process as a copy of this one, which must not have threads yet.

        A copy shares the memory of the imported modules, and need not import them again. Without
        this call, or if the process is killed, a new process is started when it is needed.
        """
        if sys.platform == "linux" and not self._in_process:
            context = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(
                1, mp_context=context, initializer=_prepare_process
            )
            with blocked_signals():
                self._executor.submit(load_kernels, self._always)

    def start(self) -> None:
        """Read the results that an earlier server saved, and start to measure."""
        if self.cache is not None:
            self.numbers.load(self.cache)
        self._thread.start()

    def close(self) -> None:
        """Stop measuring, and save the results."""
        self._stop.set()
        self._wake.set()
        self._end_process()
        if self._thread.is_alive():
            self._thread.join(3)
        self._save(0)

    def look_at(self, ids: NDArray[np.uint64], fmt: str = "") -> None:
        """Request that the given tensors be measured first, because a page shows them."""
        if fmt and fmt not in self.formats:
            others = [name for name in self.formats if name not in self._always]
            forgotten = others[: max(len(others) + 1 - MOST_OTHERS, 0)]
            kept = [name for name in self.formats if name not in forgotten]
            self.formats = [*kept, fmt]
            for name in forgotten:
                self.numbers.forget(name)
        if not np.array_equal(ids, self._visible):
            self.visible_left = len(ids)  # set first: the thread recounts if `_visible` changes
            self._visible = ids
        self._wake.set()

    def answer(self, catalog: Catalog, tensor: int, formats: Sequence[str]) -> Answer:
        """Return all statistics of one tensor, from the cache or measured now.

        The result for a tensor that is measured here is not stored in the cache, whose lock the
        measuring process may hold while it waits. That process measures the tensor again, because
        it is visible.
        """
        if not self._allowed(catalog, np.array([tensor])):
            return Answer("", None, None, {}, LINKED)
        work = self._work_of(catalog, np.array([tensor]), tuple(formats))
        answers = cached(work)
        if answers is None:
            work = replace(work, cache=None)
            future = self._asked.submit(measure, work, with_arrays=True)
            answers = future.result()
            if self.cache is not None and answers[0].measured is not None:
                return answers[0]
        answer: Answer = answers[0]
        self._add(catalog, [tensor], [answer])
        return answer

    def _submit(self, function: Any, work: Work, **options: Any) -> Any:
        for attempt in range(2):
            with self._lock:
                executor = self._executor = self._executor or self._new_executor()
            try:
                with blocked_signals():
                    future = executor.submit(function, work, **options)
                for process in getattr(executor, "_processes", None) or {}:
                    self._priority.add(process)
                return future.result()
            except BrokenProcessPool:  # the process was killed, for example because memory ran out
                with self._lock:
                    if self._executor is executor:
                        self._executor = None
                self._priority.remove_all()
                if attempt or self._stop.is_set():
                    raise
        raise AssertionError("unreachable")

    def _new_executor(self) -> Executor:
        if self._in_process:
            return ThreadPoolExecutor(1, "measuring")
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_process)

    def _end_process(self) -> None:
        self._priority.remove_all()
        self._asked.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            processes = [*(getattr(executor, "_processes", None) or {}).values()]
            executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()

    def _work_of(
        self, catalog: Catalog, tensors: NDArray[np.int64], formats: tuple[str, ...]
    ) -> Work:
        rows = catalog.records_of(tensors)
        records = catalog.records.frame(rows)
        beside = catalog.records.frame(catalog.values_of_layers(tensors))
        return Work(records, beside, formats, self.cache, self.follower.root)

    def _add(self, catalog: Catalog, tensors: Sequence[int], answers: Sequence[Answer]) -> None:
        by_path = {catalog.records.path(int(catalog.rows[tensor])): tensor for tensor in tensors}
        for answer in answers:
            tensor = by_path.pop(answer.path, None)
            if tensor is None:
                continue
            identity = int(catalog.ids[tensor])
            if answer.measured is None:
                self._fail(catalog, tensor, answer.why)
            else:
                # A page may request the errors in any format; only `self.formats` are kept.
                errors = {n: e for n, e in answer.measured.errors.items() if n in self.formats}
                measured = replace(answer.measured, errors=errors)
                self.numbers.add(identity, int(catalog.stamps[tensor]), measured)
        for tensor in by_path.values():
            self._fail(catalog, tensor, "its records do not fit together")

    def _fail(self, catalog: Catalog, tensor: int, why: str) -> None:
        self.numbers.fail(int(catalog.ids[tensor]), int(catalog.stamps[tensor]), why)

    def _work(self) -> None:
        """Measure one batch of tensors after another until the server stops."""
        has_kernels = self._in_process
        state: Any = None
        pending: NDArray[np.int64] = np.zeros(0, np.int64)
        while not self._stop.is_set():
            reading, visible = self.follower.reading_index, self._visible
            newest_only, catalog = self.follower.newest_only, self.follower.catalog
            now = (catalog.version, id(visible), tuple(self.formats), newest_only)
            if reading and not newest_only:  # the visible tensors change with every step
                pending, state = pending[:0], None
            elif now != state:
                pending, state = self._pending(catalog, visible), now
            if newest_only and len(visible):  # the others wait until the index is read
                pending = pending[: self.visible_left]
            if not len(pending):
                self._save(SAVE_PERIOD)
                self._wake.wait(0.1 if reading else 0.5)
                self._wake.clear()
                continue
            self._priority.wait(self._stop)
            if not has_kernels and not reading:
                has_kernels = True
                self._asked.submit(load_kernels, self._always)
            batch, pending = pending[: self._size], pending[self._size :]
            self._measure(catalog, batch)
            self.visible_left = max(self.visible_left - len(batch), 0)
            self._save(SAVE_PERIOD)

    def _pending(self, catalog: Catalog, visible: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return unmeasured tensors: visible ones, operands, others; each group newest first."""
        rows = self.numbers.rows_of(catalog.ids, catalog.stamps)
        lacking = self.numbers.missing(rows, self.formats)
        lacking &= ~self.numbers.failed(catalog.ids, catalog.stamps)
        pending = np.flatnonzero(lacking)
        self.total, self.done = len(catalog), len(catalog) - len(pending)
        hidden = ~np.isin(catalog.ids[pending], visible)
        self.visible_left = len(pending) - int(hidden.sum())
        order = np.lexsort((-catalog.iteration[pending], ~catalog.operand[pending], hidden))
        return pending[order]

    def _measure(self, catalog: Catalog, batch: NDArray[np.int64]) -> None:
        started = time.monotonic()
        tensors = self._allowed(catalog, batch)
        if not tensors:
            return
        try:
            work = self._work_of(catalog, np.array(tensors), tuple(self.formats))
            self._add(catalog, tensors, self._submit(measure, work))
        except Exception as error:  # a damaged file must not stop the measuring
            if self._stop.is_set():
                return
            if len(tensors) > 1:  # find the tensor at fault
                for tensor in tensors:
                    self._measure(catalog, np.array([tensor]))
                return
            why = f"cannot be measured ({type(error).__name__})"
            self._fail(catalog, tensors[0], why)
        seconds = max(time.monotonic() - started, 1e-3)
        self.done += len(tensors)
        speed = len(tensors) / seconds
        self.rate = speed if not self.rate else 0.8 * self.rate + 0.2 * speed
        self._size = int(min(max(self._size * BATCH_SECONDS / seconds, 1), 2 * self._size, MOST))

    def _allowed(self, catalog: Catalog, batch: NDArray[np.int64]) -> list[int]:
        """Return the tensors whose files lie in the folder; the others count as failed."""
        allowed = []
        for tensor in batch.tolist():
            rows = catalog.records_of([tensor])
            outside = [r for r in rows if not self.follower.allows(catalog.records.path(int(r)))]
            if outside:
                self._fail(catalog, tensor, LINKED)
            else:
                allowed.append(tensor)
        return allowed

    def _save(self, period: float) -> None:
        version, written = self._saved
        now = time.monotonic()
        if self.cache is None or version == self.numbers.version or now - written < period:
            return
        if not self.follower.root.is_dir():  # the dump was deleted
            return
        self._saved = (self.numbers.version, now)
        with contextlib.suppress(OSError):  # everything can be measured again
            self.numbers.save(self.cache)
