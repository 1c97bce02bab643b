"""Which number format each matmul runs in, and who said so.

A quantization *type* says where a format applies: `mxfp8` everywhere (linear, QK^T and PV),
`linear_mxfp8` in the linear layers, `FA_mxfp8` in QK^T, `FA_linear_mxfp8` in both; `bf16` and
`none` nowhere. The three operations can also be set apart. One function, `resolve`, decides;
whoever asks later (`current`) gets the same answer, with the source of each value.

Precedence, the first that speaks wins: a flag for the operation, the flag for all; the environment
variable for the operation, then `CUSTOM_QUANT_TYPE`; the local settings file; the default, `bf16`.
A type speaks for all three operations: `FA_mxfp8` on the command line switches off what the
environment says of the linear layers.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.names import get_format

_Parsed = TypeVar("_Parsed")

OPERATIONS = ("linear", "qk", "pv")
DEFAULT_TYPE = "bf16"
UNQUANTIZED = ("bf16", "none")  #: types that quantize nothing
TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
OPERATION_VARIABLES = {op: f"{op.upper()}_QUANT_TYPE" for op in OPERATIONS}
SETTINGS_VARIABLE = "QUANT_SETTINGS_FILE"
SETTINGS_FILE = Path(__file__).resolve().parents[2] / ".quant_settings.json"

_PREFIXES = {  # longest first: `FA_linear_` also starts with `FA_`
    "FA_linear_": ("linear", "qk"),
    "FA_": ("qk",),
    "linear_": ("linear",),
    "": OPERATIONS,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The format of one operation's operands and where it was said."""

    format: Format | None  #: None: as they are
    source: str  #: e.g. "environment variable CUSTOM_QUANT_TYPE"

    @property
    def name(self) -> str:
        """The format's name, `bf16` where nothing is quantized."""
        return DEFAULT_TYPE if self.format is None else self.format.name


@dataclass(frozen=True, slots=True)
class Policy:
    """What is quantized in this process."""

    linear: Choice
    qk: Choice
    pv: Choice

    @property
    def quant_type(self) -> str:
        """The shortest type that says the same; operations are spelled out where none does."""
        used = {choice.name for choice in self.choices.values() if choice.format is not None}
        if not used:
            return DEFAULT_TYPE
        where = tuple(op for op, choice in self.choices.items() if choice.format is not None)
        for prefix, operations in _PREFIXES.items():
            if len(used) == 1 and where == operations:
                return prefix + used.pop()
        return "_".join(f"{op}-{choice.name}" for op, choice in self.choices.items())

    @property
    def choices(self) -> dict[str, Choice]:
        """By operation."""
        return {"linear": self.linear, "qk": self.qk, "pv": self.pv}

    def describe(self) -> list[str]:
        """One line an operation: its effective format and the source."""
        return [f"{op}: {choice.name} ({choice.source})" for op, choice in self.choices.items()]


def parse_format(name: str) -> Format | None:
    """A format's name, or one of `UNQUANTIZED`.

    Raises:
        ValueError: no such format; the message lists the known ones.
    """
    return None if name.lower() in UNQUANTIZED else get_format(name)


def parse_type(name: str) -> dict[str, Format | None]:
    """The format of each operation that the quantization type `name` asks for.

    Raises:
        ValueError: no such type.
    """
    prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
    try:
        fmt = parse_format(name.removeprefix(prefix))
    except ValueError:
        raise ValueError(
            f"unknown quantization type {name!r}; give a format, or linear_, FA_ or FA_linear_ "
            f"before a format; formats: none, {', '.join(sorted(FORMATS))}, or spelled out as in "
            "mx:e3m4:b16:rceil"
        ) from None
    return {op: fmt if op in _PREFIXES[prefix] else None for op in OPERATIONS}


def _level(
    of_type: str | None,
    of_operation: Mapping[str, str | None],
    type_source: str,
    sources: Mapping[str, str],
) -> dict[str, Choice]:
    """The choices that one level of precedence makes; an operation's own value beats the type."""
    choices: dict[str, Choice] = {}
    if of_type:
        choices = {
            op: Choice(fmt, type_source)
            for op, fmt in _said(parse_type, of_type, type_source).items()
        }
    for op in OPERATIONS:
        if name := of_operation.get(op):
            choices[op] = Choice(_said(parse_format, name, sources[op]), sources[op])
    return choices


def _said(parse: Callable[[str], _Parsed], name: str, source: str) -> _Parsed:
    """Parse, and let an error say which source was wrong."""
    try:
        return parse(name)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_settings(path: Path) -> dict[str, str]:
    """The local settings file: a JSON object with any of the keys linear, qk, pv. No file: nothing
    is set.

    Raises:
        ValueError: the file is not such an object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"settings file {path} cannot be read: {error}; mend or remove it"
        ) from None
    known = isinstance(settings, dict) and settings.keys() <= set(OPERATIONS)
    if not known or not all(isinstance(value, str) for value in settings.values()):
        raise ValueError(
            f"settings file {path} holds {settings!r}; it takes an object with any of the keys "
            f"{', '.join(OPERATIONS)} and a format's name each; mend or remove it"
        )
    return dict(settings)


def resolve(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Policy:
    """Decide the format of each operation from flags, environment, settings file and default.

    Args:
        flags: any of the keys `custom_quant_type`, `linear`, `qk`, `pv`; None: not given.
        environ: the environment, the process's own by default.

    Raises:
        ValueError: a value is no type or format; the message names its source.
    """
    flags = {} if flags is None else flags
    environ = os.environ if environ is None else environ
    settings_file = Path(environ.get(SETTINGS_VARIABLE) or SETTINGS_FILE)
    levels = [
        _level(
            flags.get("custom_quant_type"),
            flags,
            "flag --custom-quant-type",
            {op: f"flag --{op}-quant" for op in OPERATIONS},
        ),
        _level(
            environ.get(TYPE_VARIABLE),
            {op: environ.get(variable) for op, variable in OPERATION_VARIABLES.items()},
            f"environment variable {TYPE_VARIABLE}",
            {op: f"environment variable {OPERATION_VARIABLES[op]}" for op in OPERATIONS},
        ),
        _level(
            None,
            read_settings(settings_file),
            "",
            dict.fromkeys(OPERATIONS, f"settings file {settings_file.name}"),
        ),
        _level(DEFAULT_TYPE, {}, "default", {}),
    ]
    return Policy(**{op: next(level[op] for level in levels if op in level) for op in OPERATIONS})


_current: Policy | None = None


def configure(
    *,
    custom_quant_type: str | None = None,
    linear: str | None = None,
    qk: str | None = None,
    pv: str | None = None,
) -> Policy:
    """Fix this process's policy from a trainer's flags; call it before the model is built.

    Raises:
        ValueError: see `resolve`.
    """
    global _current
    _current = resolve(
        {"custom_quant_type": custom_quant_type, "linear": linear, "qk": qk, "pv": pv}
    )
    return _current


def current() -> Policy:
    """This process's policy; under a trainer that never calls `configure`, what the environment
    says.
    """
    return configure() if _current is None else _current


def main(arguments: list[str] | None = None) -> int:
    """Check a quantization type for a shell script: `python -m megatron.fake_quant.policy
    --check-type mxfp8`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron.fake_quant.policy", description=main.__doc__
    )
    parser.add_argument(
        "--check-type", metavar="TYPE", required=True, help="exit 2 unless TYPE is one"
    )
    name = parser.parse_args(arguments).check_type
    try:
        parse_type(name)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
