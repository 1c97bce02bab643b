"""Scan a dump's folder for tensor files, indexes and run cards.

The fields of a tensor come from the run's index if it has one, otherwise from the metadata in the
file, otherwise from the file's name. Nothing is written. An unreadable file is listed as a
`Problem` and does not affect the others.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.analysis.dump.record_columns import Columns, Row, WrongTypeError
from megatron.analysis.dump.tensor_files import (
    Problem,
    UnreadableTensorError,
    in_printable_form,
    read_run_card,
    read_tensor,
    reason,
)
from megatron.bounded_files import UnusableFileError, printable, walk
from megatron.tensor_record import FILENAME_FORM, parse_filename, read_lines

MOST_EVENTS = 100_000  #: events in one index; a rank writes a few
MOST_INDEXES = 100_000  #: indexes below one folder; there is one per rank and run
#: File names without a folder; the surrogates U+DC80 to U+DCFF stand for bytes that are not UTF-8.
_FILE_NAME = re.compile(r"[^/\0\ud800-\udc7f\udd00-\udfff]{1,252}\.pt")


@dataclass(frozen=True)
class ScanResult:
    """The contents of a dump's folder."""

    records: pd.DataFrame  #: one row per tensor, in the order of writing
    missing: pd.DataFrame  #: records in an index whose file is missing
    events: list[dict[str, Any]]  #: lines of the indexes that are not records
    cards: dict[str, dict[str, Any]]  #: run cards by run id
    problems: list[Problem]  #: files that were left out


@dataclass
class _Files:
    """The paths of the files below a folder, by kind."""

    tensors: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)


def scan(folder: Path) -> ScanResult:
    """Find all tensors in a folder and its subfolders.

    Only files that no index names are opened.

    Raises:
        ValueError: the folder is missing, is no folder, or holds no `.pt` file.
    """
    if not folder.exists():
        raise ValueError(f"no folder {folder}; collect tensors first, or name another folder")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds the .pt files")
    problems: list[Problem] = []
    events: list[dict[str, Any]] = []
    files = _walk(folder, problems)
    columns = Columns()
    for index in files.indexes:
        _read_index(index, columns, events, problems)
    indexed = _by_path(columns.of["path"], problems)
    present = []
    for path in files.tensors:
        position = indexed.pop(path, None)
        if position is None:
            try:
                row, source = _row_of_file(Path(path))
                columns.add([row], [path], source)
            except UnreadableTensorError as error:
                problems.append(Problem(Path(path), error.why))
                continue
            except WrongTypeError as error:
                problems.append(Problem(Path(path), f"in its metadata, {error}"))
                continue
            position = len(columns) - 1
        present.append(position)
    if not files.tensors:
        detail = f" ({len(indexed)} are in its index)" if indexed else ""
        if files.cards and not indexed:
            detail = f" ({Path(files.cards[0]).name} is of a run that has saved none)"
        if problems:  # for example, a folder that cannot be listed
            raise ValueError(f"no .pt file can be read in {folder} or below{detail}; {problems[0]}")
        raise ValueError(
            f"no .pt file in {folder} or below{detail}; collect tensors first, or name "
            "another folder"
        )
    records, missing = (
        columns.table(columns.order(each)) for each in (present, list(indexed.values()))
    )
    return ScanResult(records, missing, events, _read_cards(files.cards, problems), problems)


def _by_path(paths: list[str], problems: list[Problem]) -> dict[str, int]:
    """Return the row of each file.

    A file with several rows is a problem, and its last row counts.
    """
    indexed = {path: position for position, path in enumerate(paths)}
    if len(indexed) < len(paths):
        for path, count in Counter(paths).items():
            if count > 1:
                why = f"{count} lines of indexes name it; the last counts"
                problems.append(Problem(Path(path), why))
    return indexed


def _walk(folder: Path, problems: list[Problem]) -> _Files:
    """Return the paths of the files below a folder.

    Links to folders are not followed, so that no link leads in a circle. A folder that cannot be
    listed, or whose name is that of a dump's file, is a problem.
    """
    files = _Files()
    by_kind = {_TENSOR: files.tensors, _INDEX: files.indexes, _CARD: files.cards}

    def unreadable(error: OSError) -> None:
        problems.append(Problem(Path(str(error.filename)), reason(error)))

    for parent, folders, names in walk(folder, unreadable):
        for name in folders:
            kind = _kind_of(name)
            if kind is not None:
                why = f"a folder, not {kind}; rename it or move it elsewhere"
                problems.append(Problem(Path(parent, name), why))
        for name in names:
            kind = _kind_of(name)
            if kind is not None:
                by_kind[kind].append(f"{parent}{os.sep}{name}")
    files.tensors.sort()
    files.indexes.sort()
    files.cards.sort()
    return files


_TENSOR, _INDEX, _CARD = "a tensor file", "an index", "a run card"


def _kind_of(name: str) -> str | None:
    """Return the kind of dump file that has such a name; None if there is none."""
    if name.endswith(".pt"):
        return _TENSOR
    if name.startswith("index_") and name.endswith(".jsonl"):
        return _INDEX
    return _CARD if name.startswith("run_") and name.endswith(".json") else None


def _read_cards(paths: list[str], problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Return the run cards by the run id in the file's name; the first card of a run counts."""
    cards: dict[str, dict[str, Any]] = {}
    for path in map(Path, paths):
        try:
            # the run ids in records have the same printable form
            run_id = printable(path.stem.removeprefix("run_"), limit=1000)
            cards.setdefault(run_id, read_run_card(path))
        except ValueError as error:
            problems.append(Problem(path, str(error)))
    return cards


def _read_index(
    index: str, columns: Columns, events: list[dict[str, Any]], problems: list[Problem]
) -> None:
    """Add the records and events of one index; a damaged index is a problem and adds nothing."""
    parent = index[: index.rindex(os.sep) + 1]
    before = len(columns)
    own_events: list[dict[str, Any]] = []
    try:
        for lines in read_lines(Path(index)):
            rows = [line for line in lines if "event" not in line]
            if len(rows) < len(lines):
                own_events += [in_printable_form(line) for line in lines if "event" in line]
                if len(own_events) > MOST_EVENTS:
                    raise ValueError(f"more than {MOST_EVENTS} events")
            columns.add(rows, _paths(rows, parent), "index")
    except (OSError, ValueError, RecursionError) as error:
        columns.truncate(before)
        what = error.why if isinstance(error, UnusableFileError) else reason(error)
        what = f"in one of its records, {error}" if isinstance(error, WrongTypeError) else what
        why = f"not read ({what}); its files are opened instead"
        problems.append(Problem(Path(index), why))
        return
    events += own_events


def _paths(lines: list[Row], parent: str) -> list[str]:
    """Return the paths of the files that the lines of an index name.

    Raises:
        WrongTypeError: if a line names no file, or one in another folder.
    """
    try:
        names = [line["file"] for line in lines]
        wrong = [name for name in names if not _FILE_NAME.fullmatch(name)]
    except (KeyError, TypeError):
        raise WrongTypeError("file is missing or not a str") from None
    if wrong:
        raise WrongTypeError(
            f"file is {printable(repr(wrong[0]))}, not a plain file name that ends in .pt"
        )
    return [parent + name for name in names]


def _row_of_file(path: Path) -> tuple[Row, str]:
    """Return the row of a file that no index names, and its source: "file" or "name"."""
    tensor, metadata = read_tensor(path)
    named = parse_filename(path.name)
    if named is not None:
        named["rank"] = {"world": named["rank"]}
    if metadata is None and named is None:
        raise UnreadableTensorError(
            path,
            f"no metadata in it, and its name is not {FILENAME_FORM}",
        )
    actual = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    row = (named or {}) | actual | (metadata or {}) | {"bytes": path.stat().st_size}
    return row, "name" if metadata is None else "file"
