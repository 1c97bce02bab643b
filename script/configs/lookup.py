"""Look up names that the user gives, and report unknown ones with suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


class ConfigError(Exception):
    """Error in a command line; its message states the problem and, after a semicolon, a remedy."""

    status = 2  #: exit status, the same as argparse's


class MissingFile(ConfigError):
    """Error for a correct command line that needs a file that does not exist."""

    status = 1


def pick(kind: str, name: str, table: Mapping[str, Entry], more: str = "") -> Entry:
    """Return the entry with the name `name` from a table.

    Args:
        kind: kind of entry, for the error message.
        name: name of the entry as the user wrote it.
        table: entries by name.
        more: further advice for the error message.

    Raises:
        ConfigError: if there is no such entry; the message lists similar names and all names.
    """
    if name in table:
        return table[name]
    folded = {entry.lower(): entry for entry in table}
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3)]
    meant = f", did you mean {' or '.join(near)}?" if near else ";"
    raise ConfigError(f"unknown {kind} {name!r}{meant} choose one of {', '.join(table)}{more}")


def spelled(name: str, table: Iterable[str]) -> str:
    """Return `name` in the capitalization of `table`, or unchanged if it is not in `table`."""
    return {entry.lower(): entry for entry in table}.get(name.lower(), name)


def number(value: float) -> str:
    """Format a number as people write it on a command line: 1e-5, 0.0003, 500000."""
    return f"{value:.12g}".replace("e-0", "e-")


def last_value(flag: str, words: Sequence[str]) -> str | None:
    """Return the last value of a flag, which takes effect, or None if the flag is absent."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == flag:
            value = text if equals else next(iter(words[index + 1 : index + 2]), "")
    return value
