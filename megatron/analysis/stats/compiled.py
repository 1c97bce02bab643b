"""Compiles the kernels of this package: without the interpreter's lock, and cached on disk."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from megatron.fake_quant import fused


@functools.cache
def _cache() -> Path:
    """A folder for these very sources: numba itself would not see that an inlined helper in another
    file was edited.
    """
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), *sorted(Path(fused.__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen or here / "__pycache__") / f"stats-{digest}"


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled without the interpreter's lock; cached where that can be written."""
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(_cache())
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(nogil=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
