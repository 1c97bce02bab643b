"""Compile the kernels of this package.

They run without the interpreter's lock, and the compiled code is cached on disk.
"""

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
    """Return the cache folder for the current source code of all kernels.

    numba checks only the file of a kernel. It would not notice that a helper in another file, which
    it had inlined, was edited.
    """
    here = Path(__file__).parent
    texts = [path.read_bytes() for path in sorted(here.parent.rglob("*.py"))]
    texts = [text for text in texts if b"@kernel" in text or b"@inlined" in text]
    texts += [path.read_bytes() for path in sorted(Path(fused.__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    folder = os.environ.get("NUMBA_CACHE_DIR")
    return Path(folder or here / "__pycache__") / f"stats-{digest}"


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that runs without the interpreter's lock; cache it if possible."""
    return numba_bits.kernel(function, _cache())
