"""What a user names, looked up; and how a mistake of theirs is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


class ConfigError(Exception):
    """The command line cannot be run; the message reads `what; what to do`."""

    status = 2  #: of the process, as argparse has it


class MissingFile(ConfigError):
    """The command line is right, but a file that it names is not there."""

    status = 1


def pick(kind: str, name: str, table: Mapping[str, Entry], more: str = "") -> Entry:
    """The entry of that name.

    Args:
        kind: what the table holds, for the message.
        name: as the user wrote it.
        table: by name.
        more: what else can be done, for the message.

    Raises:
        ConfigError: there is none; names the nearest and all.
    """
    if name in table:
        return table[name]
    folded = {each.lower(): each for each in table}
    near = [folded[each] for each in difflib.get_close_matches(name.lower(), folded, n=3)]
    meant = f", did you mean {' or '.join(near)}?" if near else ";"
    raise ConfigError(f"unknown {kind} {name!r}{meant} choose one of {', '.join(table)}{more}")


def spelled(name: str, table: Iterable[str]) -> str:
    """Return the entry of a table that equals `name` except for case, or else `name` itself."""
    return {each.lower(): each for each in table}.get(name.lower(), name)


def number(value: float) -> str:
    """A number as people write it on a command line: 1e-5, 0.0003, 500000."""
    return f"{value:.12g}".replace("e-0", "e-")


def last_value(flag: str, words: Sequence[str]) -> str | None:
    """What follows a flag the last time that it is given, which is what counts."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == flag:
            value = text if equals else next(iter(words[index + 1 : index + 2]), "")
    return value
