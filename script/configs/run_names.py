"""Name runs so that runs with different models, data or formats never share a folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.lookup import ConfigError, last_value
from configs.quantizations import AS_SET, UNQUANTIZED, formats, plain_type
from configs.resolve import FOREIGN_LEFT_OUT, REPO, say
from megatron.bounded_files import UnusableFileError, read_json

#: Flags of `pretrain_gpt.py` that set formats. The keys are those of the argument `flags` of
#: `megatron.fake_quant.policy.resolve`.
FORMAT_FLAGS = {
    "custom_quant_type": "--custom-quant-type",
    "linear": "--linear-quant",
    "qk": "--qk-quant",
    "pv": "--pv-quant",
    "recipe": "--quant-recipe",
}
TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
#: Environment variable in which a driver script passes on the effective quantization type.
RESOLVED_VARIABLE = "LAB_EFFECTIVE_TYPE"
#: Environment variable with the canonical name of a quantization type that a driver has checked.
CHECKED_VARIABLE = "LAB_CHECKED_TYPE"


def sets_operations() -> bool:
    """Return whether an environment variable sets the format of linear layers, QK^T, or PV."""
    return any(os.environ.get(f"{name}_QUANT_TYPE") for name in ("LINEAR", "QK", "PV"))


def settings_file() -> Path | None:
    """Return the settings file of `megatron.fake_quant.policy.settings`; None if it sets nothing.

    The path is also returned if QUANT_SETTINGS_FILE names a file that does not exist, or if the
    file cannot be read. Training then reports the error.
    """
    named = os.environ.get("QUANT_SETTINGS_FILE")
    path = Path(named or REPO / ".quant_settings.json")
    try:
        return None if read_json(path, limit=1 << 16) == {} else path
    except FileNotFoundError:
        return path if named else None
    except (OSError, UnusableFileError):
        return path


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats of a run: the flags that set them, and their part of the run's name."""

    name: str  #: part of the run's name that stands for the formats
    flags: Sequence[str]  #: flags of `pretrain_gpt.py` that set the formats

    def effective_name(self, flags: Sequence[str], python: str) -> str:
        """Return the part of the run's name that stands for the formats in effect.

        It is `name` unless the user's flags set formats, or `name` is `AS_SET` and the environment
        or the settings file sets them. A driver script may have resolved it before.

        Args:
            flags: the user's flags for `pretrain_gpt.py`, which take precedence.
            python: interpreter with torch; in a dry run, torch may be missing.

        Raises:
            ConfigError: if the formats cannot be resolved; training would fail in the same way.
        """
        if resolved := os.environ.get(RESOLVED_VARIABLE):
            return resolved
        if self.name != AS_SET and not _given(flags):
            return self.name
        every_flag = [*self.flags, *flags]
        return _plain(_given(every_flag)) or _resolved(every_flag, python) or self.name


def _given(flags: Sequence[str]) -> dict[str, str]:
    """Return the values of the format flags among `flags`, by the names of `FORMAT_FLAGS`."""
    values = {name: last_value(flag, flags) for name, flag in FORMAT_FLAGS.items()}
    return {name: value for name, value in values.items() if value is not None}


def _plain(given: Mapping[str, str]) -> str | None:
    """Return the effective type in the usual cases, without importing torch; otherwise None.

    These cases are: no format is set; or all types that are set are known to `plain_type` or have
    been checked by a driver. A flag has precedence over CUSTOM_QUANT_TYPE. Return None in all other
    cases, and for everything that may be an error.

    Args:
        given: the values of the format flags.
    """
    by_flag, by_environment = given.get("custom_quant_type"), os.environ.get(TYPE_VARIABLE) or None
    names = [name for name in (by_flag, by_environment) if name is not None]
    checked = os.environ.get(CHECKED_VARIABLE)
    types = [checked if name == checked else plain_type(name) for name in names]
    if None in types or given.keys() - {"custom_quant_type"} or sets_operations():
        return None
    if by_flag is None and os.environ.get("QUANT_RECIPE"):
        return None
    if settings_file() and not (types and _settings_are_plain()):
        return None
    return types[0] if types else UNQUANTIZED[0]


def _settings_are_plain() -> bool:
    """Return whether each value in the settings file is bf16, none or a format of the matrix."""
    try:
        settings = read_json(settings_file(), limit=1 << 16)
    except (OSError, UnusableFileError):
        return False
    if not isinstance(settings, dict) or settings.keys() - {"linear", "qk", "pv"}:
        return False
    return all(value in (*formats(), *UNQUANTIZED) for value in settings.values())


#: Program that prints the effective quantization type. On an error, it prints the same message as
#: training and exits with status 2.
_ASK = """
import json, sys
from megatron.fake_quant.policy import resolve
try:
    print(resolve(json.loads(sys.argv[1])).quant_type)
except ValueError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def _resolved(flags: Sequence[str], python: str) -> str | None:
    """Return the quantization type to which flags, environment and settings file resolve.

    The type is resolved by the code that training uses. Return None if `python` cannot run this
    code, which happens only in a dry run.
    """
    answer = subprocess.run(
        [python, "-c", FOREIGN_LEFT_OUT + _ASK, json.dumps(_given(flags))],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 2:
        raise ConfigError(answer.stderr.strip())
    if answer.returncode:
        say(f"{python} lacks torch: a run replaces {AS_SET!r} by the effective formats.")
        return None
    return answer.stdout.strip()


def data_name(prefix: str) -> str:
    """Return a name for data outside the experiment matrix; `prefix` is the path of its files."""
    name = Path(prefix).name
    for suffix in (".bin", ".idx", "_text_document"):
        name = name.removesuffix(suffix)
    return name


def join(*parts: str | None) -> str:
    """Join the nonempty parts into a name that is safe for files."""
    return "_".join(part for part in parts if part).replace(":", "-").replace(",", "_")
