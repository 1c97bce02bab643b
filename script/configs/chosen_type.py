"""Choose the quantization type of a collection, for the drivers.

What the user names wins, then a recipe that the environment names, then what the environment and
the settings file of quant_type_modifier.py set, then `DEFAULT`. The names of the matrix are known
here; all others are read by the code of training, which needs torch.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from configs.names import ConfigError
from configs.quantizations import AS_SET, UNQUANTIZED, accepted
from configs.resolve import REPO, say
from configs.run_names import of_operations, settings_file

DEFAULT = "mxfp8"
TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"


@dataclass(frozen=True, kw_only=True)
class ChosenType:
    """The type of a collection."""

    name: str  #: as its folder and its files spell it
    by_flag: bool  #: whether `--custom-quant-type` gives it; otherwise the training reads it itself


def chosen_type(given: str | None, python: str, *, dry_run: bool) -> ChosenType:
    """Return the type that the user names, or the one that is set.

    Args:
        given: as named by the user.
        python: has torch, unless this is a dry run.
        dry_run: torch may be missing.

    Raises:
        ConfigError: there is no such type.
    """
    of_all = os.environ.get(TYPE_VARIABLE)
    if given is None and of_all and not of_operations():
        given = of_all
        say(f"No type named: {TYPE_VARIABLE} sets {given}.")
    if given is not None:
        return ChosenType(name=canonical(given, python, dry_run=dry_run), by_flag=True)
    if not (of_all or of_operations() or settings_file()):
        return ChosenType(name=DEFAULT, by_flag=True)
    lines = _ask(["--set-type"], python, dry_run=dry_run)
    if lines is None:
        return ChosenType(name=AS_SET, by_flag=False)
    if not lines:
        return ChosenType(name=DEFAULT, by_flag=True)
    name, *sources = lines
    say(f"No type named: {name} is set ({'; '.join(sources)}).")
    return ChosenType(name=name, by_flag=False)


def canonical(name: str, python: str, *, dry_run: bool) -> str:
    """Return a type as files and folders spell it.

    Raises:
        ConfigError: there is no such type.
    """
    known = {each.lower(): each for each in accepted() if each != AS_SET}
    known |= dict.fromkeys(UNQUANTIZED, UNQUANTIZED[0])
    if name.lower() in known:
        return known[name.lower()]
    lines = _ask(["--check-type", name], python, dry_run=dry_run)
    return name if lines is None else lines[0]


def _ask(words: list[str], python: str, *, dry_run: bool) -> list[str] | None:
    """Return what the code of training answers; None where a dry run lacks torch for it.

    Raises:
        ConfigError: it refuses the type.
    """
    asked = subprocess.run(
        [python, "-m", "megatron.fake_quant.policy", *words],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 2:
        raise ConfigError(asked.stderr.strip().removeprefix("[ERROR] "))
    if asked.returncode and dry_run:
        say(f"{python} lacks torch: the type is shown as it was given and not checked.")
        return None
    if asked.returncode:
        raise ConfigError(f"{python} cannot read the type: {asked.stderr.strip()}")
    return asked.stdout.splitlines()
