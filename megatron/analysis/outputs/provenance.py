"""What stands in the output folder from before: figures of another dump are kept under a name with
their time; those of the same dump make room, or stay where the same would be drawn again.

A small file in the folder says of each output which dump it is of, which files belong to it, and
what they follow from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.outputs.names import QUICK, REPORT
from megatron.analysis.outputs.render import Made
from megatron.analysis.stats.cache import code_version
from megatron.bounded_files import read_json, walk

NAME = ".drawn.json"
_SOURCES = {".py", ".css", ".html", ".js"}
_LIBRARIES = ("matplotlib", "numpy", "pandas", "plotly", "torch")


def fingerprint(dump: Path, but: Sequence[Path], *options: object) -> str:
    """Of all that outputs follow from: every file of the dump (name, size, time of the last
    change), the sources of this package and of `fake_quant`, the libraries, and the options.

    Args:
        but: folders within the dump that do not belong to it.
    """
    digest = hashlib.sha256(json.dumps([str(dump.resolve()), *options]).encode())
    # one that is not installed (plotly, for figures alone) has no version
    found = [[each.version for each in distributions(name=name)] for name in _LIBRARIES]
    digest.update(json.dumps([code_version(), *found]).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.read_bytes())
    left_out = {str(path.resolve()) for path in but}
    dump = dump.resolve()
    for place, folders, names in walk(dump, lambda error: None):
        folders[:] = sorted(each for each in folders if f"{place}{os.sep}{each}" not in left_out)
        files = [(name, *_stamp(Path(place, name))) for name in sorted(names)]
        digest.update(json.dumps([os.path.relpath(place, dump), files]).encode())
    return digest.hexdigest()[:32]


def unchanged(output: Path, names: Iterable[str], follows: str) -> dict[str, Made]:
    """Those of the outputs that would be drawn again as they are there.

    Args:
        follows: the `fingerprint` of now.
    """
    drawn, found = _read(output), {}
    for name in names:
        entry = drawn.get(name)
        if not isinstance(entry, dict) or entry.get("follows") != follows:
            continue
        files = _files(drawn, name)
        if all(_stamp(output / file) == tuple(stamp) for file, stamp in files.items()):
            found[name] = Made(name, [output / file for file in files], entry["missing"])
    return found


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


def remember(output: Path, dump: Path, made: Iterable[Made], follows: str) -> None:
    """Note the files of each output, and delete those of the same dump that were not made again:
    a figure of a format that is no longer asked for would look as new as the others.
    """
    drawn = _read(output)
    for each in made:
        new = {path.relative_to(output).as_posix(): _stamp(path) for path in each.files}
        same = _of(drawn, each.name) == str(dump.resolve())
        for old in _files(drawn, each.name) if same else ():
            path = output / old
            # a link in the place of the output's folder must not lead to files elsewhere
            if old not in new and path.resolve().is_relative_to(output.resolve() / each.name):
                path.unlink(missing_ok=True)
        drawn[each.name] = {
            "dump": str(dump.resolve()),
            "follows": "" if each.failed else follows,  # what failed is tried again
            "missing": each.missing,
            "files": new,
        }
    write(output / NAME, (json.dumps(drawn, indent=1) + "\n").encode())


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of the last change; of a file that is not there like no other."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _of(drawn: Mapping[str, Any], name: str) -> str | None:
    """The dump of an output, if that is known."""
    entry = drawn.get(name)
    known = entry.get("dump") if isinstance(entry, dict) else None
    return known if isinstance(known, str) else None


def _files(drawn: Mapping[str, Any], name: str) -> dict[str, list[int]]:
    """Names within the output folder, with their stamps."""
    files = drawn[name].get("files")
    return files if isinstance(files, dict) else {}


def _read(output: Path) -> dict[str, Any]:
    """Return the sound entries of the notes on earlier outputs; anyone may have made the file."""
    try:
        drawn = read_json(output / NAME)
    except (OSError, ValueError):
        return {}
    entries = drawn.items() if isinstance(drawn, dict) else ()
    return {name: entry for name, entry in entries if _is_sound(entry)}


def _is_sound(entry: Any) -> bool:
    """Whether an entry is such as `remember` writes."""
    if not isinstance(entry, dict) or entry.keys() != {"dump", "follows", "missing", "files"}:
        return False
    files, missing = entry["files"], entry["missing"]
    return (
        isinstance(files, dict)
        and all("\0" not in name and _is_stamp(stamp) for name, stamp in files.items())
        and isinstance(missing, dict)
        and all(isinstance(why, str) for why in missing.values())
    )


def _is_stamp(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, int]
