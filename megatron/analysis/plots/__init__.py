"""Plot functions that draw tidy data on Matplotlib Axes, with one function per module.

They do not load, compute or save anything. The module `heatmap` defines `plot_heatmap`, and every
other module except `style` and `text` follows the same pattern. A function can also be imported
from this package, which then imports only the module of the function.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_MODULES = {f"plot_{module.name}": module.name for module in iter_modules(__path__)}
del _MODULES["plot_style"], _MODULES["plot_text"]  # these modules have no plot function

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Return a plot function, importing its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
