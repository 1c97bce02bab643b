"""Work on several threads: those that torch computes with, where they can be had.

torch's OpenMP threads do not sleep after an operation but turn in a loop for some milliseconds, to
be ready for the next one. Threads of our own would share the cores with them: on two cores a
kernel right behind a copy took 1.4 to 1.9 times as long (MXFP8 and HiFloat8, memory used again).
Therefore the work is given to these very threads, by the function that compilers call for
`#pragma omp parallel`. It is GNU's, and part of its binary interface; LLVM's and Intel's runtimes
export it too.
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

PARTS = 4  #: for each thread, so that one that is held up leaves its rest to the others
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_forked = False  #: OpenMP's threads do not come along, and GNU's runtime waits for them forever


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(work: Work, count: int, least: int = 1) -> list[Any]:
    """Call `work(start, stop)` on parts of `range(count)` that are at least `least` long.

    On as many threads as torch may use. Returns what the parts gave, in their order; raises what a
    part raised.
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
            except IndexError:  # another thread was faster
                return
            try:
                results[part] = work(edges[part], edges[part + 1])
            except BaseException as error:  # must not get into the runtime
                errors.append(error)

    parallel = None if _forked else _openmp()
    (parallel or _on_own_threads)(body, threads)
    if errors:
        raise errors[0]
    return results


@functools.cache
def _openmp() -> Parallel | None:
    """Run a function on each of some of torch's threads; None where torch has other ones."""
    if not sys.platform.startswith("linux") or "backend: OpenMP" not in _backend():
        return None
    try:
        # Looks for the name in what the library depends on, too: the runtime that torch uses.
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
