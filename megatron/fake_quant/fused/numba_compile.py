"""Compilation of CPU kernels by numba, with a cache on disk."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba

Function = Callable[..., Any]


def inlined(function: Function) -> Any:
    """Compile a function that numba inlines into its callers."""
    return numba.njit(inline="always", error_model="numpy")(function)


def kernel_compiler(
    name: str, folder: Path, sources: Callable[[], Iterable[Path]]
) -> Callable[[Function], Any]:
    """Return a decorator that compiles kernels and caches them on disk.

    numba checks only the file of a kernel. It would keep using a cached kernel after a helper in
    another file, which it inlined, was edited. The name of the cache's folder therefore depends on
    the contents of all sources.

    Args:
        name: beginning of the name of the cache's folder.
        folder: folder of the kernels, whose `__pycache__` holds the cache unless
            `NUMBA_CACHE_DIR` is set.
        sources: returns the files that the kernels are compiled from.
    """

    @functools.cache
    def cache() -> Path:
        contents = b"".join(path.read_bytes() for path in sources())
        digest = hashlib.sha256(contents).hexdigest()[:16]
        return (
            Path(os.environ.get("NUMBA_CACHE_DIR") or folder / "__pycache__") / f"{name}-{digest}"
        )

    def kernel(function: Function) -> Any:
        """Compile a kernel that runs without the interpreter's lock."""
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(cache())
        try:
            return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # The cache cannot be written.
            return numba.njit(nogil=True, error_model="numpy")(function)
        finally:
            config.CACHE_DIR = before

    return kernel
