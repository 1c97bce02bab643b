"""Training on megatron-core: what Megatron-LM has in this place and the wheel leaves out.

Flags, log lines and checkpoint folders are Megatron-LM's. Everything that computes comes from
`megatron.core`, that is from the installed wheel with this tree's files laid over it; a run that
silently used the plain wheel would train without any number format and collect nothing, so
importing this package checks that the overlay is in place.
"""

import sys
from pathlib import Path

import megatron

_TREE = Path(__file__).resolve().parents[2]


def _check_overlay() -> None:
    """Refuse to start where another `megatron` would be, or already was, imported before this
    tree's.

    Raises:
        ImportError: the first place searched for `megatron.core` is not this tree.
    """
    core = sys.modules.get("megatron.core")
    for package in (megatron, core):
        if package is None:
            continue
        first = Path(next(iter(package.__path__))).resolve()
        if not first.is_relative_to(_TREE):
            raise ImportError(
                f"{package.__name__} was imported from {first}, so that this tree's number formats "
                f"and tensor collection would not be used; start Python in {_TREE} or with "
                f"PYTHONPATH={_TREE}"
            )


_check_overlay()
