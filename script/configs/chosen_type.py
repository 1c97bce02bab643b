"""Choose the quantization type of a tensor collection for the driver scripts.

The first of these that is set takes effect: the type that the user gives; CUSTOM_QUANT_TYPE, if no
other variable sets the format of a single operation; the type that the environment and the settings
file of quant_type_modifier.py result in; and `DEFAULT`. This module resolves the type names of the
experiment matrix. The training code, which needs torch, resolves all other names.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from configs.lookup import ConfigError
from configs.quantizations import AS_SET, plain_type
from configs.resolve import FOREIGN_LEFT_OUT, REPO, say
from configs.run_names import TYPE_VARIABLE, sets_operations, settings_file

DEFAULT = "mxfp8"
_POLICY = (
    FOREIGN_LEFT_OUT
    + "import runpy; runpy.run_module('megatron.fake_quant.policy', run_name='__main__', "
    "alter_sys=True)"
)


@dataclass(frozen=True, kw_only=True)
class ChosenType:
    """Quantization type of a tensor collection, and whether a flag sets it."""

    name: str  #: canonical name of the type, which appears in the names of folders and files
    by_flag: bool  #: True to pass the type as a flag; False if training resolves it itself


def chosen_type(given: str | None, python: str, *, dry_run: bool) -> ChosenType:
    """Return the type for a collection: the user's choice, the configured type, or `DEFAULT`.

    Args:
        given: quantization type as the user wrote it, or None.
        python: interpreter with torch; in a dry run, torch may be missing.
        dry_run: whether the command is only printed.

    Raises:
        ConfigError: if the quantization type does not exist.
    """
    from_environment = os.environ.get(TYPE_VARIABLE)
    if given is None and from_environment and not sets_operations():
        given = from_environment
        say(f"No type given: {TYPE_VARIABLE} sets {given}.")
    if given is not None:
        return ChosenType(name=canonical(given, python, dry_run=dry_run), by_flag=True)
    if not (from_environment or sets_operations() or settings_file()):
        return ChosenType(name=DEFAULT, by_flag=True)
    lines = _ask(["--set-type"], python, dry_run=dry_run)
    if lines is None:
        return ChosenType(name=AS_SET, by_flag=False)
    if not lines:
        return ChosenType(name=DEFAULT, by_flag=True)
    name, *sources = lines
    say(f"No type given: {name} is set ({'; '.join(sources)}).")
    return ChosenType(name=name, by_flag=False)


def canonical(name: str, python: str, *, dry_run: bool) -> str:
    """Return the canonical name of a quantization type; names of files and folders contain it.

    Raises:
        ConfigError: if the quantization type does not exist.
    """
    if known := plain_type(name):
        return known
    lines = _ask(["--check-type", name], python, dry_run=dry_run)
    return name if lines is None else lines[0]


def _ask(words: list[str], python: str, *, dry_run: bool) -> list[str] | None:
    """Query the training code; return its output lines, or None in a dry run without torch.

    Raises:
        ConfigError: if the training code refuses the quantization type, or cannot be run.
    """
    answer = subprocess.run(
        [python, "-c", _POLICY, *words],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 2:
        raise ConfigError(answer.stderr.strip().removeprefix("[ERROR] "))
    if answer.returncode and dry_run:
        say(f"{python} lacks torch: the type is shown as given, without a check.")
        return None
    if answer.returncode:
        raise ConfigError(f"{python} cannot check the type: {answer.stderr.strip()}")
    return answer.stdout.splitlines()
