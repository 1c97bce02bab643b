"""Plot functions, one per module: tidy data in, Axes out. They load, compute and save nothing.

The module `heatmap` defines `plot_heatmap`, and so on for every other module. A function can also
be imported from this package, which then imports its module alone.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `plot_<module>` from its module."""
    module = f"{__name__}.{name.removeprefix('plot_')}"
    if not name.startswith("plot_") or find_spec(module) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
