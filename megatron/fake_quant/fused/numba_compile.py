"""Compile CPU kernels with numba and cache them on disk."""

import contextlib
import fcntl
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

Function = Callable[..., Any]


def inlined(function: Function) -> Any:
    """Compile a helper function that numba inlines into its callers."""
    return numba.njit(inline="always", error_model="numpy")(function)


def called(function: Function) -> Any:
    """Compile a helper function that kernels call, so that it is compiled only once.

    This suits functions that take a microsecond or more and are called in several places.
    """
    return numba.njit(error_model="numpy")(function)


def kernel_compiler(
    name: str,
    folder: Path,
    sources: Callable[[], Iterable[Path]],
    *,
    reorder_sums: bool = False,
) -> Callable[[Function], Any]:
    """Return a decorator that compiles kernels and caches them on disk.

    To detect changes, numba checks only the file that defines the kernel. It would keep using a
    cached kernel after an edit of an inlined helper in another file. The name of the cache folder
    therefore contains a hash of all source files.

    Args:
        name: first part of the name of the cache folder.
        folder: folder that contains the kernels; its `__pycache__` holds the cache unless
            `NUMBA_CACHE_DIR` is set.
        sources: function that returns the source files from which the kernels are compiled.
        reorder_sums: True if sums of floating-point numbers may be computed in any order, in
            several lanes of a vector register.
    """

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if reorder_sums:
        options["fastmath"] = {"reassoc"}

    @functools.cache
    def cache() -> Path:
        contents = b"".join(path.read_bytes() for path in sources())
        digest = hashlib.sha256(contents).hexdigest()[:16]
        return (
            Path(os.environ.get("NUMBA_CACHE_DIR") or folder / "__pycache__") / f"{name}-{digest}"
        )

    def kernel(function: Function) -> Any:
        """Compile a kernel that releases the interpreter lock (GIL) while it runs."""
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(cache())
        try:
            kernel = numba.njit(**options, cache=True)(function)
            return _compiled_once(kernel, cache() / f"{function.__name__}.lock")
        except RuntimeError:  # The cache folder is not writable.
            return numba.njit(**options)(function)
        finally:
            config.CACHE_DIR = before

    return kernel


def _compiled_once(kernel: Any, lock: Path) -> Any:
    """Make processes that need the same kernel at the same time compile it only once.

    The ranks of a run start together and need the same kernels. Without a lock, each would find
    none in the cache and compile all of them. Here the first one compiles a kernel while the others
    wait; they then load it from the cache.
    """
    compile_or_load = kernel.compile

    def compile_alone(signature: Any) -> Any:
        with global_compiler_lock, _locked(lock):
            return compile_or_load(signature)

    kernel.compile = compile_alone
    return kernel


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, or none if the file cannot be opened or locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, even in a crash
        yield
