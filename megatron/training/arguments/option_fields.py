"""A flag is a field of a dataclass: how a field says what argparse needs to know, and how argparse
is told.

A bool that is on by default gets `--no-x` beside `--x`; `flags` gives the spelling where a field's
name is not it.
"""

import argparse
from dataclasses import field, fields
from typing import Any


def option(default: Any, help: str, *, flags: tuple[str, ...] = (), **argparse_options: Any) -> Any:
    """A field with what argparse needs to know about it."""
    return field(
        default=default, metadata={"help": help, "flags": flags, "argparse": argparse_options}
    )


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a group with one flag for each field of the dataclass; its title is the class's
    docstring.
    """
    group = parser.add_argument_group(options.__doc__)
    for f in fields(options):
        how = dict(f.metadata["argparse"])
        flags = f.metadata["flags"] or ("--" + f.name.replace("_", "-"),)
        if "choices" not in how and f.type in (bool, bool | None):
            off_only = f.default is not False and not f.metadata["flags"]
            how["action"] = argparse.BooleanOptionalAction if off_only else "store_true"
        elif how.get("type") is int and "choices" not in how:
            how.setdefault("metavar", "N")
        elif how.get("type") is float:
            how.setdefault("metavar", "X")
        text = f.metadata["help"].replace("%", "%%")
        if f.default not in (None, False) and "default" not in text:
            text = f"{text} (default: {f.default})".strip()
        group.add_argument(*flags, dest=f.name, default=f.default, help=text, **how)
