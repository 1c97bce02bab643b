"""Write and compare the first lines of logs, which distinguish runs with different results.

A command refers to files, which can change between two calls. The first line of a log therefore has
the command and, after `#`, what else determines the result: the checkpoint from which the run
starts, the contents of its recipe, the state of its files, its processes and the versions of the
packages. A finished run is used again only if all of these are unchanged. Files are identified by
their paths, sizes and modification times, because a checkpoint can be too large to read.

The source code of this project is left out, because any edit would repeat all runs. It has a
version number instead, `configs.trained_model.VERSION`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from configs.lookup import ConfigError, last_value
from configs.resolve import has_data
from megatron.bounded_files import printable
from megatron.training.checkpointing.files import (
    TRACKER,
    checkpoint_folder,
    latest_iteration,
)

_MARK = " # "  #: text between the command and the rest
COMMAND = "command"
MOST_NAMED = 3  #: maximum number of flags that a message names
#: causes of a run's result, for messages, by their names in the first line of a log
CAUSES = {
    COMMAND: "the command",
    "start": "the checkpoint at the start",
    "recipe": "the recipe",
    "files": "the data or the tokenizer",
    "processes": "the processes or the device",
    "versions": "the versions of the packages",
}


def head_of(arguments: Sequence[str], causes: Mapping[str, str]) -> str:
    """Return the first line of a run's log.

    Args:
        arguments: arguments of `pretrain_gpt.py`.
        causes: values for the names in `CAUSES`; empty ones are left out.
    """
    given = {name: value for name, value in causes.items() if value}
    return f"pretrain_gpt.py {shlex.join(arguments)}{_MARK}{json.dumps(given)}\n"


def changed(log: str, head: str) -> list[str]:
    """Return what differs between the runs of `log` and `head`, as texts from `CAUSES`.

    Logs of earlier versions of the study contain only the command, so all else counts as changed.
    """
    before, now = (_causes(text.partition("\n")[0]) for text in (log, head))
    texts = [text for name, text in CAUSES.items() if before.get(name) != now.get(name)]
    if before[COMMAND] != now[COMMAND]:
        texts[0] += _differences(before[COMMAND], now[COMMAND])
    return texts


def _differences(before: str, now: str) -> str:
    """Return the flags in which two commands differ, as ` (--lr 0.001, now 0.002)`, or ""."""
    old, new = (_flags(command) for command in (before, now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    none = "left out"
    parts = [
        f"{printable(name)} {printable(old.get(name, none))}, now {printable(new.get(name, none))}"
        for name in names
    ]
    more = [f"{len(parts) - MOST_NAMED} more"] if len(parts) > MOST_NAMED else []
    return f" ({'; '.join([*parts[:MOST_NAMED], *more])})" if parts else ""


def _flags(command: str) -> dict[str, str]:
    """Return the value of each flag of a command, by name; of a repeated flag, the last value."""
    flags: dict[str, str] = {}
    name = ""
    try:
        words = shlex.split(command)
    except ValueError:  # a damaged log
        return flags
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            flags[name] = value or "set"
        elif name:
            flags[name] = word if flags[name] == "set" else f"{flags[name]} {word}"
    return flags


def _causes(line: str) -> dict[str, str]:
    command, _, rest = line.rpartition(_MARK)
    try:
        return {COMMAND: command, **json.loads(rest)}
    except (ValueError, TypeError):
        return {COMMAND: line}


def state_of(paths: Iterable[Path]) -> str:
    """Return a hash of the paths, sizes and modification times of files."""
    digest = hashlib.sha256()
    for path in sorted(path.resolve() for path in paths):
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def files_in(arguments: Sequence[str]) -> list[Path]:
    """Return the files that a command names directly, by a data prefix or by their folder.

    The arguments must not name a folder that the run writes.
    """
    files = []
    for word in arguments:
        _, equals, value = word.partition("=")
        name = value if word.startswith("-") and equals else word
        if has_data(name):
            files += [Path(f"{name}{suffix}") for suffix in (".bin", ".idx")]
        elif os.sep in name and Path(name).is_dir():
            files += [path for path in Path(name).iterdir() if path.is_file()]
        elif Path(name).is_file():
            files.append(Path(name))
    return files


def checkpoint_files(folder: Path, flags: Sequence[str]) -> list[Path]:
    """Return the files of the checkpoint that `--load` with this folder reads.

    Args:
        folder: folder of checkpoints.
        flags: the user's flags for `pretrain_gpt.py`, which may have `--ckpt-step`.

    Raises:
        ConfigError: if the folder has no checkpoint.
    """
    step = last_value("--ckpt-step", flags)
    if step is not None and step.isdecimal():
        iteration: int | None = int(step)
    else:
        iteration = latest_iteration(str(folder))
    if iteration is None:
        raise ConfigError(
            f"--load {folder} has no {TRACKER}; name the folder that a run with --save has written"
        )
    checkpoint = checkpoint_folder(str(folder), iteration)
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    if not files:
        raise ConfigError(
            f"--load {folder} has no checkpoint of iteration {iteration}, because {checkpoint} has "
            "no files; name another folder, or another iteration in --ckpt-step after --"
        )
    return files
