"""Keep track of the figures and other outputs that earlier calls wrote to the output folder.

Outputs of other dumps are renamed before new ones are drawn; the new name contains the modification
time. Outputs of the same dump are replaced, or left unchanged if they are up to date. A small file
in the folder records the dump of each output, the files of the output, and a fingerprint of
everything that the output depends on.
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

NAME = ".drawn.json"  #: name of the file that records the outputs in the output folder
_SOURCES = {".py", ".css", ".html", ".js"}
_LIBRARIES = ("matplotlib", "numpy", "pandas", "plotly", "torch")


def fingerprint(dump: Path, excluded: Sequence[Path], *options: object) -> str:
    """Return a hash of everything that the outputs depend on.

    The hash covers the name, size and modification time of every file of the dump, the source code
    of this package and of `fake_quant`, the versions of libraries, and the options.

    Args:
        dump: folder of the dump.
        excluded: folders inside the dump's folder that do not belong to the dump.
        options: values that affect the outputs; they must be serializable as JSON.
    """
    digest = hashlib.sha256(json.dumps([str(dump.resolve()), *options]).encode())
    # one list of versions per library, empty if the library is not installed; plotly, which only
    # the report needs, may be missing
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
    """Return the outputs in the output folder that are up to date and need not be redrawn.

    Args:
        output: output folder.
        names: names of the outputs to check.
        follows: current `fingerprint`.
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
    """Rename existing outputs that were drawn from other dumps, and return the new paths.

    The output "quick" is left out, because `quick_analysis` renames its own files.
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
    """Record the files of each output, and delete earlier files that were not written again.

    If they were kept, a figure of a format that is no longer requested would appear to be up to
    date. Only files of the same dump are deleted.
    """
    drawn = _read(output)
    for part in made:
        new = {path.relative_to(output).as_posix(): _stamp(path) for path in part.files}
        same = _of(drawn, part.name) == str(dump.resolve())
        for old in _files(drawn, part.name) if same else ():
            path = output / old
            # `output / part.name` may be a link; never delete files that lie outside `output`
            if old not in new and path.resolve().is_relative_to(output.resolve() / part.name):
                path.unlink(missing_ok=True)
        drawn[part.name] = {
            "dump": str(dump.resolve()),
            "follows": "" if part.failed else follows,  # a failed output is drawn again next time
            "missing": part.missing,
            "files": new,
        }
    write(output / NAME, (json.dumps(drawn, indent=1) + "\n").encode())


def files_of(output: Path, dump: Path, *, apart_from: Iterable[str]) -> list[str]:
    """Return the existing files that were drawn from a dump, relative to the output folder.

    Args:
        output: output folder.
        dump: folder of the dump.
        apart_from: names of outputs to leave out.
    """
    drawn, left_out = _read(output), set(apart_from)
    names = [name for name in drawn if _of(drawn, name) == str(dump.resolve())]
    names = [name for name in names if name not in left_out]
    files = [file for name in names for file in _files(drawn, name)]
    return [file for file in files if (output / file).is_file()]


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in ns, or (-1, -1) if it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _of(drawn: Mapping[str, Any], name: str) -> str | None:
    """Return the path of the dump that an output was drawn from, or None if it is not recorded."""
    entry = drawn.get(name)
    known = entry.get("dump") if isinstance(entry, dict) else None
    return known if isinstance(known, str) else None


def _files(drawn: Mapping[str, Any], name: str) -> dict[str, list[int]]:
    """Return the recorded size and modification time of each file of an output.

    Paths are relative to the output folder.
    """
    files = drawn[name].get("files")
    return files if isinstance(files, dict) else {}


def _read(output: Path) -> dict[str, Any]:
    """Return the entries of the file `NAME` in the output folder; ignore damaged entries."""
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
