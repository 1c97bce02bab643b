"""Disable or postpone Python's garbage collection while code creates very many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within the `with` block.

    While many objects are created, the collector would repeatedly visit all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def one_garbage_collection() -> Iterator[None]:
    """Collect garbage once, at the end of the `with` block, and visit only the newest objects.

    A figure consists of many thousand objects with cyclic references. Collecting while they are
    created costs a fifth of the time of drawing, and frees nothing.
    """
    with no_garbage_collection():
        try:
            yield
        finally:
            gc.collect(0)
