"""Command-line flags that are declared as dataclass fields.

`option` declares a flag, and `add_options` adds all flags of a class to a parser. The flag of a
field `a_b` is `--a-b`, unless `flags` gives other spellings. A Boolean field `x` whose default is
True or None has the flag `--no-x` in addition to `--x`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    minimum: float | None = None,
    **argparse_options: Any,
) -> Any:
    """Return a dataclass field that declares a flag.

    Args:
        default: default value of the flag.
        help: text for `--help`.
        flags: spellings of the flag; derived from the name of the field by default.
        minimum: smallest accepted value, or None.
        argparse_options: further keyword arguments of `add_argument`.
    """
    metadata = {"help": help, "flags": flags, "minimum": minimum, "argparse": argparse_options}
    return field(default=default, metadata=metadata)


def minimums(groups: Sequence[type]) -> dict[str, float]:
    """Return the smallest accepted value of each flag that has one, by field name."""
    return {
        f.name: f.metadata["minimum"]
        for group in groups
        for f in fields(group)
        if f.metadata["minimum"] is not None
    }


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a group of flags to a parser, with one flag per field of a dataclass.

    The docstring of the dataclass is the title of the group.
    """
    group = parser.add_argument_group(options.__doc__)
    for f in fields(options):
        argument = dict(f.metadata["argparse"])
        flags = f.metadata["flags"] or ("--" + f.name.replace("_", "-"),)
        if "choices" not in argument and f.type in (bool, bool | None):
            has_no_form = f.default is not False and not f.metadata["flags"]
            argument["action"] = argparse.BooleanOptionalAction if has_no_form else "store_true"
        elif argument.get("type") is int and "choices" not in argument:
            argument.setdefault("metavar", "N")
        elif argument.get("type") is float:
            argument.setdefault("metavar", "X")
        text = f.metadata["help"].replace("%", "%%")
        if f.default not in (None, False) and "default" not in text:
            text = f"{text} (default: {f.default})".strip()
        group.add_argument(*flags, dest=f.name, default=f.default, help=text, **argument)
