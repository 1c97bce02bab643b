"""Run jobs on threads of this process or on a Dask cluster, and yield each result when it is ready.

Threads are sufficient, because most of the time is spent in compiled loops, which release the
global interpreter lock. Separate processes would each have to load and compile these loops.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch

from megatron.analysis.stats.jobs import Job, JobResult, measure_jobs
from megatron.analysis.stats.kernels.class_tables import TABLE_BYTES

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

PATIENCE = "20s"  #: maximum time to wait for a scheduler to answer
#: A batch is complete when it reaches this size in bytes or this number of jobs.
BATCH_BYTES, BATCH_JOBS = 1 << 23, 64
#: Memory, in bytes, that a process needs without its threads, and maximum memory of each thread. A
#: thread needs three tables of counts, the mapped pages of a large tensor, and the arrays for one
#: chunk of the tensor.
BASE, PER_WORKER = 420 << 20, 3 * TABLE_BYTES + (96 << 20)


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def affordable(workers: int | None, max_memory: int | None) -> int:
    """Return the requested number of threads, or fewer if they would need too much memory.

    Args:
        workers: requested number of threads; None means one per processor.
        max_memory: maximum memory of this process, in bytes; None means no limit.

    Raises:
        ValueError: if the memory does not suffice for one thread.
    """
    wanted = workers or processors()
    if max_memory is None:
        return wanted
    fit = (max_memory - BASE) // PER_WORKER
    if fit < 1:
        raise ValueError(
            f"{max_memory >> 20} MiB of memory are too few; one worker takes up to "
            f"{(BASE + PER_WORKER) >> 20} MiB, and each further one {PER_WORKER >> 20} MiB"
        )
    return min(wanted, fit)


def batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Group jobs into batches, and yield the batches in descending order of tensor size.

    A large tensor at the end would keep one worker busy while the others are idle.
    """
    batch: list[Job] = []
    size = 0
    for job in sorted(jobs, key=lambda job: -job.part.nbytes):
        batch.append(job)
        size += job.part.nbytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_JOBS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def on_threads(jobs: Sequence[Job], workers: int) -> Iterator[tuple[int, JobResult]]:
    """Run the jobs on threads, and yield each job's number and result as soon as it finishes.

    Only a few results are in memory at a time.
    """
    for results in run_on_threads(measure_jobs, batches(jobs), workers):
        yield from results


def run_on_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[_Result]:
    """Call a function for each item on threads, and yield each result as soon as it is ready.

    At most two items per thread are taken from `items` in advance.
    """
    waiting = iter(items)
    with one_torch_thread(), ThreadPoolExecutor(workers, "analysis") as threads:
        running: set[Future[_Result]] = set()
        try:
            while True:
                taken = islice(waiting, max(2 * workers - len(running), 0))
                running |= {threads.submit(function, item) for item in taken}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:  # after an interrupt or an error under --strict, cancel the remaining jobs
            threads.shutdown(cancel_futures=True)


def check_scheduler(address: str) -> None:
    """Check that a Dask scheduler answers at an address, without creating a client.

    A client that cannot connect would wait another 40 seconds when it is deleted.

    Raises:
        ValueError: if no scheduler answers.
    """
    core: Any = importlib.import_module("distributed.core")
    websocket: Any = importlib.import_module("tornado.websocket")
    seconds: Any = importlib.import_module("dask.utils").parse_timedelta(PATIENCE)

    async def connect() -> None:
        comm = await asyncio.wait_for(core.connect(address, timeout=seconds), 2 * seconds)
        comm.abort()  # a peer that is not a scheduler may never close the connection

    refused = (
        *(OSError, ValueError, TimeoutError, asyncio.TimeoutError, websocket.WebSocketError),
        MemoryError,  # an older client interprets bytes of another protocol as a size
    )
    try:
        asyncio.run(connect())
    except refused as error:
        why = str(error) or type(error).__name__
        raise ValueError(
            f"no Dask scheduler answers at {address!r} ({why}); give --scheduler the address that "
            "`dask scheduler` prints, as in tcp://HOST:8786, or leave the option out"
        ) from None


def on_cluster(jobs: Sequence[Job], address: str) -> Iterator[tuple[int, JobResult]]:
    """Run the jobs on a Dask cluster, and yield each job's number and result.

    The workers must see the dump under the same path and be able to import this package.

    Args:
        address: address of the Dask scheduler.

    Raises:
        ValueError: if Dask is not installed, no scheduler answers, or a worker lacks a module or
            is killed repeatedly.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise ValueError(
            "--scheduler needs Dask; install it with pip install -e .[cluster], or leave the "
            "option out: the work is then done by threads"
        ) from None
    check_scheduler(address)
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ValueError(f"no Dask scheduler answers at {address!r} ({error})") from None
    with client:
        waiting = batches(jobs)
        most = 3 * max(sum(client.nthreads().values()), 1)  # maximum number of batches in progress
        first = [client.submit(measure_jobs, batch, pure=False) for batch in islice(waiting, most)]
        completed = distributed.as_completed(first, loop=client.loop, with_results=True)
        running = len(first)
        while running:
            try:
                _, results = next(completed)
            except ImportError as error:
                raise ValueError(
                    f"a worker of {address} has no module {error.name!r}; start the workers with "
                    "this tree in PYTHONPATH and the requirements of setup.py"
                ) from None
            except distributed.KilledWorker as error:
                raise ValueError(
                    f"workers of {address} ended repeatedly while they measured ({error}); give "
                    "them more memory (dask worker --memory-limit, fewer --nthreads) and check "
                    "their logs; the results so far are cached, so the next call continues from "
                    "there"
                ) from None
            running -= 1
            if (batch := next(waiting, None)) is not None:
                completed.add(client.submit(measure_jobs, batch, pure=False))
                running += 1
            yield from results


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread inside the `with` block.

    The thread pool already uses all processors; torch's own threads would compete with it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
