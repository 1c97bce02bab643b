"""Refuse environment variables that are probably misspelled names of this project's variables.

A misspelled variable would otherwise be ignored, and the run would train in high precision or
collect nothing.
"""

import difflib
from collections.abc import Mapping, Sequence

TENSOR_SAVE = ("TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "TENSOR_SAVE_LAUNCH")
#: Short names that users expect, and that nothing reads, with the variables that are read.
EXPECTED = {"QUANT_TYPE": "CUSTOM_QUANT_TYPE"}
#: Beginnings of names that no other program uses.
_OWN = ("CUSTOM_QUANT", "TENSOR_SAVE")
_SIMILAR = 0.88  #: least similarity of a misspelled name, as `difflib` measures it


def check_names(environ: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raise ValueError if a variable's name looks like a misspelling of this project's names.

    Args:
        environ: environment variables; empty ones are ignored.
        known: names of the variables that set formats.
    """
    names = (*known, *TENSOR_SAVE)
    for name, value in environ.items():
        if not value or name in names:
            continue
        meant = EXPECTED.get(name) or _meant(name.upper(), names)
        if meant is not None or name.upper().startswith(_OWN):
            advice = (
                f"choose from {', '.join(names)}" if meant is None else f"did you mean {meant}?"
            )
            raise ValueError(f"environment variable {name} is unknown; {advice}")


def _meant(name: str, names: Sequence[str]) -> str | None:
    """Return the variable that a misspelled name stands for; None if it resembles none.

    A name resembles a variable if it is similar, or if words are missing at its end or follow it,
    as in LINEAR_QUANT and QUANT_RECIPE_FILE.
    """
    if similar := difflib.get_close_matches(name, names, 1, _SIMILAR):
        return similar[0]
    for variable in names:
        shorter = "_" in name and variable.startswith(f"{name}_")
        if shorter or name.startswith(f"{variable}_"):
            return variable
    return None
