"""Scan a dump's folder for tensor files, indexes and run cards.

An index lists the tensor files that one rank wrote, and a run card describes one run. The fields of
a tensor are read from an index that lists its file. If no index lists the file, they are read from
the metadata in the file, or else from the file name. Nothing is written to the folder. An
unreadable file is listed as a `Problem` and does not affect the others.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.analysis.dump.folder import check_folder
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

MOST_EVENTS = 100_000  #: maximum number of events in one index; a rank normally writes a few
#: Pattern of a `.pt` file name without a folder. Python represents bytes that are not valid UTF-8
#: by the surrogates U+DC80 to U+DCFF, so these are allowed.
_FILE_NAME = re.compile(r"[^/\0\ud800-\udc7f\udd00-\udfff]{1,252}\.pt")


@dataclass(frozen=True)
class ScanResult:
    """The tensors, events, run cards and problems found in a dump's folder."""

    records: pd.DataFrame  #: one row per tensor, sorted by run and time of writing
    missing: pd.DataFrame  #: records in an index whose tensor file does not exist
    events: list[dict[str, Any]]  #: lines of the indexes that report an event instead of a tensor
    cards: dict[str, dict[str, Any]]  #: run cards, keyed by run ID
    problems: list[Problem]  #: files that were left out


@dataclass
class _Files:
    """The paths of the dump files in a folder and its subfolders, grouped by kind."""

    tensors: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)


def scan(folder: Path) -> ScanResult:
    """Find all tensors in a folder and its subfolders.

    A tensor file is opened only if no index lists it.

    Raises:
        ValueError: if the folder does not exist, is not a folder, or contains no `.pt` file.
    """
    check_folder(folder)
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
                row, source = row_of_file(Path(path))
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
        detail = f" ({len(indexed)} are listed in an index)" if indexed else ""
        if files.cards and not indexed:
            detail = f" ({Path(files.cards[0]).name} belongs to a run that saved none)"
        if problems:  # there may be, for example, a subfolder that cannot be listed
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
    """Return a dictionary that maps each path to its row number.

    If a path occurs more than once, its last row is used, and the path is added to `problems`.
    """
    indexed = {path: position for position, path in enumerate(paths)}
    if len(indexed) < len(paths):
        for path, count in Counter(paths).items():
            if count > 1:
                why = f"listed in {count} lines of indexes; the last line is used"
                problems.append(Problem(Path(path), why))
    return indexed


def _walk(folder: Path, problems: list[Problem]) -> _Files:
    """Return the paths of the dump files in a folder and its subfolders.

    Links to folders are not followed, because they may form a cycle. A folder is added to
    `problems` if it cannot be listed or if it has the name of a dump file, and so is a link to a
    dump elsewhere.
    """
    files = _Files()
    by_kind = {TENSOR: files.tensors, INDEX: files.indexes, CARD: files.cards}

    def unreadable(error: OSError) -> None:
        problems.append(Problem(Path(str(error.filename)), reason(error)))

    for parent, folders, names in walk(folder, unreadable):
        for name in folders:
            kind = kind_of(name)
            if kind is not None:
                why = f"a folder, not {kind}; rename it or move it elsewhere"
                problems.append(Problem(Path(parent, name), why))
            elif _leads_to_another_dump(Path(parent, name), folder):
                why = "a link to a folder, which is not followed; give the folder's own path"
                problems.append(Problem(Path(parent, name), why))
        for name in names:
            kind = kind_of(name)
            if kind is not None:
                by_kind[kind].append(f"{parent}{os.sep}{name}")
    files.tensors.sort()
    files.indexes.sort()
    files.cards.sort()
    return files


def _leads_to_another_dump(path: Path, folder: Path) -> bool:
    """Return whether `path` is a link to a folder outside `folder` that contains dump files."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    if target.is_relative_to(folder.resolve()):
        return False
    try:
        return any(kind_of(entry.name) is not None for entry in os.scandir(target))
    except OSError:
        return False


TENSOR, INDEX, CARD = "a tensor file", "an index", "a run card"


def kind_of(name: str) -> str | None:
    """Return the kind of dump file that a file name indicates, or None."""
    if name.endswith(".pt"):
        return TENSOR
    if name.startswith("index_") and name.endswith(".jsonl"):
        return INDEX
    return CARD if name.startswith("run_") and name.endswith(".json") else None


def _read_cards(paths: list[str], problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Return the run cards, keyed by the run ID in their file names.

    If a run has several cards, the first one is used.
    """
    cards: dict[str, dict[str, Any]] = {}
    for path in map(Path, paths):
        try:
            # escape the run ID in the same way as the run IDs in records
            run_id = printable(path.stem.removeprefix("run_"), limit=1000)
            cards.setdefault(run_id, read_run_card(path))
        except ValueError as error:
            problems.append(Problem(path, str(error)))
    return cards


def _read_index(
    index: str, columns: Columns, events: list[dict[str, Any]], problems: list[Problem]
) -> None:
    """Add the records and events of one index file to `columns` and `events`.

    If the index is damaged, it is added to `problems`, and none of its lines are used.
    """
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
            columns.add(rows, file_paths(rows, parent), "index")
    except (OSError, ValueError, RecursionError) as error:
        columns.truncate(before)
        what = error.why if isinstance(error, UnusableFileError) else reason(error)
        what = f"in one of its records, {error}" if isinstance(error, WrongTypeError) else what
        why = f"not read ({what}); its files are opened instead"
        problems.append(Problem(Path(index), why))
        return
    events += own_events


def file_paths(lines: list[Row], parent: str) -> list[str]:
    """Return the paths of the files listed in the lines of an index.

    Raises:
        WrongTypeError: if a line has no file name, or one that is not a plain `.pt` file name.
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


def row_of_file(path: Path) -> tuple[Row, str]:
    """Return the record of a file that no index lists, and the source of the record.

    The source is "file" for metadata in the file, and "name" for the file name.

    Raises:
        UnreadableTensorError: if the file is unreadable, or has neither metadata nor a name in the
            form `FILENAME_FORM`.
    """
    tensor, metadata = read_tensor(path)
    named = parse_filename(path.name)
    if named is not None:
        named["rank"] = {"world": named["rank"]}
    if metadata is None and named is None:
        raise UnreadableTensorError(
            path,
            f"has no metadata, and its name does not have the form {FILENAME_FORM}",
        )
    actual = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    row = (named or {}) | actual | (metadata or {}) | {"bytes": path.stat().st_size}
    return row, "name" if metadata is None else "file"
