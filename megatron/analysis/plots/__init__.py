"""Plot functions, one per module: tidy data in, Axes out. They load, compute and save nothing.

The module `heatmap` defines `plot_heatmap`, and so on for every module except `style`. A function
can also be imported from this package, which then imports its module alone.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_MODULES = {f"plot_{module.name}": module.name for module in iter_modules(__path__)}
del _MODULES["plot_style"]  # colors and axes that all plots share

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a plot function on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
