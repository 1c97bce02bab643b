"""Compiles the kernels of this package: without the interpreter's lock, and cached on disk."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fake_quant import fused
from megatron.fake_quant.fused import numba_bits


@functools.cache
def _cache() -> Path:
    """A folder for the very sources of these kernels: numba itself would not see that a helper in
    another file, which it inlined, was edited.
    """
    here = Path(__file__).parent
    texts = [path.read_bytes() for path in sorted(here.parent.rglob("*.py"))]
    texts = [text for text in texts if b"@kernel" in text or b"@inlined" in text]
    texts += [path.read_bytes() for path in sorted(Path(fused.__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen or here / "__pycache__") / f"stats-{digest}"


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled without the interpreter's lock; cached where that can be written."""
    return numba_bits.kernel(function, _cache())
