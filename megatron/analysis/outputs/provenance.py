"""The outputs that an earlier call left in the output folder.

Figures of another dump are kept under a name with their time. Figures of the same dump are
replaced, or left as they are if the same would be drawn again. A small file in the folder records
the dump of each output, its files, and a fingerprint of everything that they depend on.
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
from megatron.analysis.outputs.registry import QUICK, REPORT
from megatron.analysis.outputs.render import Made
from megatron.analysis.stats.cache import code_version
from megatron.bounded_files import read_json, walk

NAME = ".drawn.json"  #: file in the output folder that records earlier outputs
_SOURCES = {".py", ".css", ".html", ".js"}
_LIBRARIES = ("matplotlib", "numpy", "pandas", "plotly", "torch")


def fingerprint(dump: Path, excluded: Sequence[Path], *options: object) -> str:
    """Return a hash of everything that the outputs depend on.

    These are every file of the dump (name, size, time of the last change), the sources of this
    package and of `fake_quant`, the versions of the libraries, and the options.

    Args:
        excluded: folders within the dump that do not belong to it.
    """
    digest = hashlib.sha256(json.dumps([str(dump.resolve()), *options]).encode())
    # a library that is not installed has no version: only the report needs plotly
    versions = [[package.version for package in distributions(name=name)] for name in _LIBRARIES]
    digest.update(json.dumps([code_version(), *versions]).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.read_bytes())
    left_out = {str(path.resolve()) for path in excluded}
    dump = dump.resolve()
    for parent, folders, names in walk(dump, lambda error: None):
        folders[:] = sorted(name for name in folders if f"{parent}{os.sep}{name}" not in left_out)
        files = [(name, *_stamp(Path(parent, name))) for name in sorted(names)]
        digest.update(json.dumps([os.path.relpath(parent, dump), files]).encode())
    return digest.hexdigest()[:32]


def unchanged(output: Path, names: Iterable[str], follows: str) -> dict[str, Made]:
    """Return the outputs that would be drawn again exactly as they are in the folder.

    Args:
        follows: the current `fingerprint`.
    """
    drawn, current = _read(output), {}
    for name in names:
        entry = drawn.get(name)
        if not isinstance(entry, dict) or entry.get("follows") != follows:
            continue
        files = _files(drawn, name)
        if all(_stamp(output / file) == tuple(stamp) for file, stamp in files.items()):
            current[name] = Made(name, [output / file for file in files], entry["missing"])
    return current


def set_aside(output: Path, names: Iterable[str], dump: Path) -> list[Path]:
    """Rename the outputs of other dumps that would be overwritten, and return their new names.

    The two files of the first look are left to `quick_analysis`, which keeps them itself.
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
    """Record the files of each output, and delete older files that were not drawn again.

    Only files of the same dump are deleted. A figure of a format that is no longer requested would
    otherwise look as current as the others.
    """
    drawn = _read(output)
    for part in made:
        new = {path.relative_to(output).as_posix(): _stamp(path) for path in part.files}
        same = _of(drawn, part.name) == str(dump.resolve())
        for old in _files(drawn, part.name) if same else ():
            path = output / old
            # the output's folder may be a link, which must not lead to files elsewhere
            if old not in new and path.resolve().is_relative_to(output.resolve() / part.name):
                path.unlink(missing_ok=True)
        drawn[part.name] = {
            "dump": str(dump.resolve()),
            "follows": "" if part.failed else follows,  # a figure that failed is drawn again
            "missing": part.missing,
            "files": new,
        }
    write(output / NAME, (json.dumps(drawn, indent=1) + "\n").encode())


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size and the time of the last change; a missing file gets a stamp of its own."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _of(drawn: Mapping[str, Any], name: str) -> str | None:
    """Return the dump of an output, or None if it is not recorded."""
    entry = drawn.get(name)
    known = entry.get("dump") if isinstance(entry, dict) else None
    return known if isinstance(known, str) else None


def _files(drawn: Mapping[str, Any], name: str) -> dict[str, list[int]]:
    """Return the files of an output, relative to the output folder, with their stamps."""
    files = drawn[name].get("files")
    return files if isinstance(files, dict) else {}


def _read(output: Path) -> dict[str, Any]:
    """Return the valid entries of the record of earlier outputs, which may be forged."""
    try:
        drawn = read_json(output / NAME)
    except (OSError, ValueError):
        return {}
    entries = drawn.items() if isinstance(drawn, dict) else ()
    return {name: entry for name, entry in entries if _is_valid(entry)}


def _is_valid(entry: Any) -> bool:
    """Return whether an entry has the form that `remember` writes."""
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
