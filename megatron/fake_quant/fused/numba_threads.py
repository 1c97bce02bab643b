"""Run a kernel on several threads, if possible on torch's own threads.

torch's OpenMP threads do not sleep after an operation. They spin for some milliseconds, to be ready
for the next operation. Additional threads would compete with them for the cores: on two cores, a
kernel that ran right after a copy took 1.4 to 1.9 times as long (MXFP8 and HiFloat8, with reused
memory). Kernels therefore run on torch's threads, through the function that compilers call for
`#pragma omp parallel`. This function is part of GNU's binary interface; the runtimes of LLVM and
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

LEAST = 1 << 15  #: number of values that makes an additional thread worthwhile
PARTS = 4  #: number of parts per thread; other threads take the parts of a delayed thread
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

#: True in a forked process. OpenMP's threads do not survive a fork, and GNU's runtime would hang.
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(work: Work, count: int, least: int = 1, *, backwards: bool = False) -> list[Any]:
    """Split `range(count)` into parts, and call `work(start, stop)` for each on several threads.

    Every part has at least `least` items, unless `count` is smaller. The number of threads is at
    most `torch.get_num_threads()`. Return the results in the order of the parts. If a part raises
    an error, raise that error.

    backwards: True to begin with the last part. A second pass over a tensor then finds in the cache
        the values that the first pass read last.
    """
    pieces = max(1, count // least)
    threads = min(torch.get_num_threads(), pieces)
    if threads == 1:
        return [work(0, count)]
    pieces = min(threads * PARTS, pieces)
    edges = [count * i // pieces for i in range(pieces + 1)]
    order = range(pieces)[::-1] if backwards else range(pieces)
    waiting, results, errors = deque(order), [None] * pieces, deque[BaseException]()

    def body() -> None:
        while waiting and not errors:
            try:
                part = waiting.popleft()
            except IndexError:  # Another thread took the last part.
                return
            try:
                results[part] = work(edges[part], edges[part + 1])
            except BaseException as error:  # An error must not reach the OpenMP runtime.
                errors.append(error)

    parallel = None if _forked else _openmp()
    (parallel or _on_own_threads)(body, threads)
    if errors:
        raise errors[0]
    return results


@functools.cache
def _openmp() -> Parallel | None:
    """Return a function that runs a callback on torch's OpenMP threads, or None without OpenMP."""
    if not sys.platform.startswith("linux") or "backend: OpenMP" not in _backend():
        return None
    try:
        # The lookup also searches the library's dependencies, such as torch's OpenMP runtime.
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
