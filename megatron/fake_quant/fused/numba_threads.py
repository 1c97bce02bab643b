"""Run a kernel on several threads, if possible on those that torch computes with.

torch's OpenMP threads do not sleep after an operation. They spin for some milliseconds, to be ready
for the next one. Threads of our own would compete with them for the cores: on two cores a kernel
right after a copy took 1.4 to 1.9 times as long (MXFP8 and HiFloat8, memory used again). Work
therefore runs on torch's threads, through the function that compilers call for
`#pragma omp parallel`. The function is part of GNU's binary interface; the runtimes of LLVM and
Intel export it too.
"""

import ctypes
import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

Work = Callable[[int, int], Any]
Parallel = Callable[[Callable[[], None], int], None]

PARTS = 4  #: parts per thread, so that other threads can take over from a delayed one
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_forked = False  #: True after a fork, which OpenMP's threads do not survive; GNU's runtime hangs


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(work: Work, count: int, least: int = 1) -> list[Any]:
    """Call `work(start, stop)` on parts of `range(count)` that are at least `least` long.

    The parts run on as many threads as torch may use. Return their results in order, or raise the
    error of a part.
    """
    pieces = max(1, count // least)
    threads = min(torch.get_num_threads(), pieces)
    if threads == 1:
        return [work(0, count)]
    pieces = min(threads * PARTS, pieces)
    edges = [count * i // pieces for i in range(pieces + 1)]
    waiting, results, errors = deque(range(pieces)), [None] * pieces, deque[BaseException]()

    def body() -> None:
        while waiting and not errors:
            try:
                part = waiting.popleft()
            except IndexError:  # Another thread took the last part.
                return
            try:
                results[part] = work(edges[part], edges[part + 1])
            except BaseException as error:  # must not reach the OpenMP runtime
                errors.append(error)

    parallel = None if _forked else _openmp()
    (parallel or _on_own_threads)(body, threads)
    if errors:
        raise errors[0]
    return results


@functools.cache
def _openmp() -> Parallel | None:
    """Return a function that runs work on torch's threads, None if they are not OpenMP's."""
    if not sys.platform.startswith("linux") or "backend: OpenMP" not in _backend():
        return None
    try:
        # The lookup includes the library's dependencies, among them the runtime that torch uses.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        start = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None

    def parallel(body: Callable[[], None], threads: int) -> None:
        start(_BODY(lambda _: body()), None, threads, 0)

    return parallel


def _backend() -> str:
    return torch.__config__.parallel_info()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "fake_quant")


def _on_own_threads(body: Callable[[], None], threads: int) -> None:
    others = [_pool(threads - 1).submit(body) for _ in range(threads - 1)]
    body()
    for other in others:
        other.result()
