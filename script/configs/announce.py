"""Print the size of a tensor collection before it starts; ask the user to confirm a large one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from configs.collection_size import Size, collection_size
from configs.lookup import ConfigError
from configs.resolve import say

LARGE = 10_000_000_000  #: size in bytes above which a collection requires --yes or a limit


def announce(words: Sequence[str], *, types: int, yes: bool, dry_run: bool) -> None:
    """Print the size of a training command's collection, and ask for confirmation if it is large.

    Args:
        words: arguments of the training command.
        types: number of quantization types that are collected in turn.
        yes: whether the user has agreed in advance.
        dry_run: whether the command is only printed.

    Raises:
        ConfigError: if the collection is large and the user does not agree to it.
    """
    size = collection_size(words)
    if size is None:
        say("Collection: unknown size, because of the model's flags; see --collect-plan.")
        return
    say(_described(size, types))
    total = size.bytes * types
    if total <= LARGE or size.limited or yes:
        return
    if dry_run:
        say(f"Above {gb(LARGE)}, a run requires --yes or a limit.")
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        print("Collect that much? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(
        f"the collection would write {gb(total)}, more than {gb(LARGE)}; give --yes (or "
        "COLLECT_YES=1), set a limit (--collect-max-gib X, --collect-max-files N), or collect "
        "less (--collect-layers first,last --collect-slice s=0:2048)"
    )


def _described(size: Size, types: int) -> str:
    """Return a sentence that describes the size of a collection."""
    text = f"{size.files:,} files, {gb(size.bytes)}"
    if types > 1:
        text += f" per type; {size.files * types:,} files, {gb(size.bytes * types)} for {types}"
        text += " types"
    notes = []
    if size.ranks > 1:
        notes.append(f"{gb(size.bytes / size.ranks)} for each of {size.ranks} ranks")
    if size.iterations != 1:
        count = f"{size.iterations:,} iterations"
        notes.append(count if size.iterations else "unlimited iterations")
    if size.limited:
        notes.append("stops at the limit")
    if size.optional:
        notes.append("at most, only if triggered")
    if size.codes:
        notes.append("without codes")
    return f"Collection: {text} ({', '.join(notes)})." if notes else f"Collection: {text}."


def gb(size: float) -> str:
    """Format a number of bytes in kB, MB, GB or TB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if size >= unit:
            return f"{size / unit:,.3g} {name}"
    return f"{size / 1000:.3g} kB"
