"""What stands in the output folder from before: figures of another dump are kept under a name with
their time, those of the same dump make room.

A small file in the folder says which dump each output is of and which files belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.analysis.output import write
from megatron.analysis.output_names import QUICK, REPORT

NAME = ".drawn.json"


def set_aside(output: Path, names: Iterable[str], dump: Path) -> list[Path]:
    """Rename outputs of other dumps that would be written over; returns their new names. (The quick
    look keeps its two files by itself.)
    """
    drawn, kept = _read(output), []
    for name in names:
        path = output / ("report.html" if name == REPORT else name)
        if name == QUICK or not path.exists() or _of(drawn, name) in (None, str(dump.resolve())):
            continue
        written = datetime.fromtimestamp(path.stat().st_mtime)
        aside = path.with_name(f"{path.stem}_{written:%Y%m%d_%H%M%S}{path.suffix}")
        if not aside.exists():
            kept.append(path.rename(aside))
    return kept


def remember(output: Path, dump: Path, made: Mapping[str, Sequence[Path]]) -> None:
    """Note the files of each output, and delete those of the same dump that were not made again:
    a figure of a format that is no longer asked for would look as new as the others.
    """
    drawn = _read(output)
    for name, files in made.items():
        new = sorted(path.relative_to(output).as_posix() for path in files)
        same = _of(drawn, name) == str(dump.resolve())
        for old in _files(drawn, name) if same else ():
            path = output / old
            if old not in new and path.resolve().is_relative_to((output / name).resolve()):
                path.unlink(missing_ok=True)
        drawn[name] = {"dump": str(dump.resolve()), "files": new}
    write(output / NAME, (json.dumps(drawn, indent=1) + "\n").encode())


def _of(drawn: Mapping[str, Any], name: str) -> str | None:
    """The dump of an output, if that is known."""
    entry = drawn.get(name)
    known = entry.get("dump") if isinstance(entry, dict) else None
    return known if isinstance(known, str) else None


def _files(drawn: Mapping[str, Any], name: str) -> list[str]:
    files = drawn[name].get("files")
    return [each for each in files if isinstance(each, str)] if isinstance(files, list) else []


def _read(output: Path) -> dict[str, Any]:
    try:
        drawn = json.loads((output / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return drawn if isinstance(drawn, dict) else {}
