"""Analyze collected tensors: read a dump, verify it, compute statistics, and draw figures.

`python -m megatron.analysis` is the command-line interface. In Python, the names in `__all__`
are the entry points; the module that defines a name is imported when the name is first used.

This package needs torch, numpy, pandas and matplotlib, but not megatron-core, so that a dump can be
analyzed on a laptop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.analysis.drawing import draw
    from megatron.analysis.quick import quick_analysis
    from megatron.analysis.stats.engine import compute
    from megatron.analysis.store import TensorStore
    from megatron.analysis.verification.verify import verify

__all__ = ["TensorStore", "compute", "draw", "quick_analysis", "verify"]

_MODULES = {
    "TensorStore": "store",
    "compute": "stats.engine",
    "draw": "drawing",
    "quick_analysis": "quick",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because importing pandas and torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
