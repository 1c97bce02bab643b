"""What a run is called: two runs that differ in model, data or formats never share a folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.lookup import ConfigError, last_value
from configs.quantizations import AS_SET, accepted
from configs.resolve import FOREIGN_LEFT_OUT, REPO, say

#: Flags of `pretrain_gpt.py` that say formats, by what `megatron.fake_quant.policy` calls them.
FORMAT_FLAGS = {
    "custom_quant_type": "--custom-quant-type",
    "linear": "--linear-quant",
    "qk": "--qk-quant",
    "pv": "--pv-quant",
    "recipe": "--quant-recipe",
}


#: Types whose effective name is their own name; that of `none` is not.
QUANTIZED = accepted().keys() - {AS_SET, "none"}


def of_operations() -> bool:
    """Return whether an environment variable sets the format of a single operation."""
    return any(os.environ.get(f"{name}_QUANT_TYPE") for name in ("LINEAR", "QK", "PV"))


def settings_file() -> Path | None:
    """Return the settings file that `megatron.fake_quant.settings` reads, if it is there."""
    path = Path(os.environ.get("QUANT_SETTINGS_FILE") or REPO / ".quant_settings.json")
    return path if path.exists() else None


@dataclass(frozen=True, kw_only=True)
class Formats:
    """What is quantized."""

    name: str  #: in the run's name
    flags: Sequence[str]

    def effective_name(self, flags: Sequence[str], python: str) -> str:
        """The name; of formats that something else decides, what it decides.

        Args:
            flags: the user's, for `pretrain_gpt.py`: these win.
            python: has torch, unless this is a dry run.

        Raises:
            ConfigError: the formats cannot be resolved; training would say the same.
        """
        said = [flag for flag in FORMAT_FLAGS.values() if last_value(flag, flags) is not None]
        if self.name != AS_SET and not said:
            return self.name
        of_all = FORMAT_FLAGS["custom_quant_type"]
        name = last_value(of_all, flags)
        if said == [of_all] and name in QUANTIZED and not (of_operations() or settings_file()):
            return name  # the same result, without importing torch, which takes seconds
        return _resolved([*self.flags, *flags], python) or self.name


#: Prints the effective type, or says what is wrong and ends with 2, as training would.
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
    """The effective type by the code that training uses, of flags, environment and settings file;
    None where that Python cannot run it, which only a dry run meets.
    """
    said = {name: last_value(flag, flags) for name, flag in FORMAT_FLAGS.items()}
    asked = subprocess.run(
        [python, "-c", FOREIGN_LEFT_OUT + _ASK, json.dumps(said)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 2:
        raise ConfigError(asked.stderr.strip())
    if asked.returncode:
        say(f"{python} lacks torch: a run puts the effective formats in place of {AS_SET!r}.")
        return None
    return asked.stdout.strip()


def data_name(prefix: str) -> str:
    """The name of data that belong to no dataset of the matrix."""
    name = Path(prefix).name
    for suffix in (".bin", ".idx", "_text_document"):
        name = name.removesuffix(suffix)
    return name


def join(*parts: str | None) -> str:
    """A name for files, of the parts that there are."""
    return "_".join(part for part in parts if part).replace(":", "-").replace(",", "_")
