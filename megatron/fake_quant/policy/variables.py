"""Refuse environment variables that are probably misspelled names of this project's variables.

A misspelled variable would otherwise be ignored, and the run would train in high precision or
collect nothing.
"""

import difflib
from collections.abc import Mapping

TENSOR_SAVE = ("TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "TENSOR_SAVE_LAUNCH")
OF_SCRIPTS = ("QUANT_TYPE",)  #: variables that only the shell scripts read
#: Beginnings of names that no other program uses.
_OWN = ("CUSTOM_QUANT", "TENSOR_SAVE_")
_SIMILAR = 0.88  #: least similarity of a misspelled name, as `difflib` measures it


def check_names(environ: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raise ValueError if a variable has nearly the name of one of this project's variables.

    Args:
        environ: environment variables; empty ones are ignored.
        known: names of the variables that set formats.
    """
    names = (*known, *TENSOR_SAVE, *OF_SCRIPTS)
    for name, value in environ.items():
        if not value or name in names:
            continue
        similar = difflib.get_close_matches(name, names, 1, _SIMILAR)
        if similar or name.startswith(_OWN):
            meant = f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(names)}"
            raise ValueError(f"environment variable {name} is unknown; {meant}")
