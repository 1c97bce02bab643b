"""Name runs so that runs with different models, data or formats never share a folder."""

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

#: Flags of `pretrain_gpt.py` that set formats. The keys are those of the argument `flags` of
#: `megatron.fake_quant.policy.resolve`.
FORMAT_FLAGS = {
    "custom_quant_type": "--custom-quant-type",
    "linear": "--linear-quant",
    "qk": "--qk-quant",
    "pv": "--pv-quant",
    "recipe": "--quant-recipe",
}


#: Quantization types that appear in the run name unchanged; `none` appears as bf16.
QUANTIZED = accepted().keys() - {AS_SET, "none"}


def sets_operations() -> bool:
    """Return whether an environment variable sets the format of linear layers, QK^T, or PV."""
    return any(os.environ.get(f"{name}_QUANT_TYPE") for name in ("LINEAR", "QK", "PV"))


def settings_file() -> Path | None:
    """Return the settings file that `megatron.fake_quant.settings` reads, if it exists."""
    path = Path(os.environ.get("QUANT_SETTINGS_FILE") or REPO / ".quant_settings.json")
    return path if path.exists() else None


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats of a run: the flags that set them, and their part of the run's name."""

    name: str  #: part of the run's name that stands for the formats
    flags: Sequence[str]  #: flags of `pretrain_gpt.py` that set the formats

    def effective_name(self, flags: Sequence[str], python: str) -> str:
        """Return the part of the run's name that stands for the formats in effect.

        It is `name` unless the user's flags set formats, or `name` is `AS_SET` and the environment
        or the settings file sets them.

        Args:
            flags: the user's flags for `pretrain_gpt.py`, which take precedence.
            python: interpreter with torch; in a dry run, torch may be missing.

        Raises:
            ConfigError: if the formats cannot be resolved; training would fail in the same way.
        """
        given = [flag for flag in FORMAT_FLAGS.values() if last_value(flag, flags) is not None]
        if self.name != AS_SET and not given:
            return self.name
        type_flag = FORMAT_FLAGS["custom_quant_type"]
        name = last_value(type_flag, flags)
        nothing_else = given == [type_flag] and not (sets_operations() or settings_file())
        if nothing_else and name in QUANTIZED:
            return name  # avoids importing torch, which takes seconds
        return _resolved([*self.flags, *flags], python) or self.name


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
    given = {name: last_value(flag, flags) for name, flag in FORMAT_FLAGS.items()}
    answer = subprocess.run(
        [python, "-c", FOREIGN_LEFT_OUT + _ASK, json.dumps(given)],
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
