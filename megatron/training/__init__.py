"""The training program, which replaces Megatron-LM's package `megatron.training`.

The wheels of megatron-core 0.17 and later contain a package with this name, which is not used.
Flags, log lines and checkpoint folders follow Megatron-LM. `megatron.core` does all the
computation: it is the installed wheel, overlaid with the files of this tree. With the wheel alone,
a run would silently train without quantization and collect no tensors. Importing this package
therefore checks that the overlay is in place.
"""

import sys
from pathlib import Path

import megatron

_TREE = Path(__file__).resolve().parents[2]


def _check_overlay() -> None:
    """Check that Python imports the packages `megatron` and `megatron.core` from this tree.

    Raises:
        ImportError: if Python looks for `megatron` or `megatron.core` in another folder first.
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
