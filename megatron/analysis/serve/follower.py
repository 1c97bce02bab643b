"""Find the files of a dump, and follow its index files while a run writes.

An index is read from where the last read ended, up to its last complete line. A file that no index
lists is opened for its metadata, a few files at a time. Nothing is locked, and nothing is written.

Only regular files inside the folder are read. A symbolic link that leads out of it is refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.analysis.dump.record_columns import Columns, WrongTypeError
from megatron.analysis.dump.scan import (
    CARD,
    INDEX,
    MOST_EVENTS,
    TENSOR,
    file_paths,
    kind_of,
    row_of_file,
)
from megatron.analysis.dump.tensor_files import (
    Problem,
    UnreadableTensorError,
    in_printable_form,
    read_run_card,
    reason,
)
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.newest import newest_records
from megatron.analysis.serve.priority import Priority
from megatron.analysis.serve.records import Records, check_tables
from megatron.bounded_files import UnusableFileError, open_regular, printable, walk
from megatron.tensor_record import INDEX_LIMIT, LINE_LIMIT, LINES_LIMIT, parsed_lines

FIRST_STEP = 1 << 20  #: bytes of an index to read first; longer indexes take several steps
STEP = 2 << 20  #: maximum number of bytes of an index to read at a time; pages wait for a step
#: While an index is read, the catalog is rebuilt when the number of records grows by this factor.
GROWTH = 1.5
FILES_AT_ONCE = 64  #: number of files without an index that are opened before the next step
PERIOD = 1.0  #: time between two polls of the files, in seconds
WALK_PERIOD = 15.0  #: minimum time between two searches for new files, in seconds
SETTLING = 10.0  #: time within which an index should list a new file, in seconds
LINKED = "a symbolic link that leads out of the folder; it is not followed"
MOST_PROBLEMS = 1000  #: maximum number of unusable files that are remembered


@dataclass
class _Index:
    """An index file, and how far it has been read."""

    path: str
    number: int  #: number that identifies this reading of the file in `Records.origin`
    offset: int = 0
    lines: int = 0
    inode: int = -1
    finished: bool = False  #: True if nothing more is read, because a line is damaged
    events: list[dict[str, Any]] = field(default_factory=list)


class Follower:
    """The records, events and run cards of a folder, kept up to date.

    Args:
        root: folder of the dump.
        priority: makes the thread wait while a view is drawn.
    """

    def __init__(self, root: Path, priority: Priority | None = None):
        self._priority = priority or Priority()
        self.root = root.resolve()
        self.records = Records()
        self.cards: dict[str, dict[str, Any]] = {}
        self.catalog = Catalog(self.records, frozenset(), {}, version=0)
        #: numbers of records, ignored indexes and run cards in the catalog
        self._shown = (0, 0, 0)
        self.reading = True  #: True until everything that was found has been read
        self.reading_index = True  #: True if an index has lines that have not been read yet
        #: True if the catalog has only the newest iteration, because an index is being read
        self.newest_only = False
        self._problems: dict[str, str] = {}
        self._indexes: dict[str, _Index] = {}
        self._cards_read: dict[str, tuple[int, int]] = {}
        self._tensors: list[str] = []  #: all tensor files, as of the last search
        self._check_unlisted = False
        self._unlisted: list[str] = []  #: tensor files to open, because no index lists them
        self._unlisted_left = False  #: True if an index may still list one of the new files
        self._first = True
        self._opened: set[str] = set()  #: files without an index that were opened
        self._bad: set[int] = set()  #: numbers of index files whose records are ignored
        self._numbers = 1  #: number of the next index; 0 stands for files without an index
        self._walked = -1e9
        self._stamps: dict[str, int] = {}  #: time of the last change of each folder
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread that follows the files."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    @property
    def problems(self) -> list[Problem]:
        """Files that cannot be used."""
        return [Problem(Path(path), why) for path, why in [*self._problems.items()]]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of the index files that report an event."""
        indexes = [*self._indexes.values()]
        return [
            event for index in indexes for event in index.events if index.number not in self._bad
        ]

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                more = self.poll()
            except Exception as error:  # a damaged file must not stop the thread
                self._add_problem(str(self.root), f"{type(error).__name__}: {reason(error)}")
                more = False
            self._stop.wait(0 if more else PERIOD)
            if more and len(self.catalog):
                self._priority.wait(self._stop)

    def poll(self) -> bool:
        """Read new files and lines of the folder, up to a limit; return whether more are left."""
        with self._lock:
            if time.monotonic() - self._walked > WALK_PERIOD:
                self._walk()
            if self.catalog.version == 0 and self._show_newest():
                return True
            more = False
            for index in [*self._indexes.values()]:
                more |= self._read_index(index)
            self.reading_index = more
            self.newest_only &= more
            if not more and self._check_unlisted:
                self._find_unlisted()
            if not more and self._unlisted:
                self._open_files()
                more = bool(self._unlisted)
            now = (len(self.records), len(self._bad), len(self.cards))
            grown = now[0] >= GROWTH * self._shown[0] or now[1:] != self._shown[1:]
            grown &= not self.newest_only
            if self.catalog.version == 0 or (now != self._shown and (grown or not more)):
                self._shown = now
                self.catalog = Catalog(
                    self.records, frozenset(self._bad), self.cards, self.catalog.version + 1
                )
            self.reading = more
            return more

    def _show_newest(self) -> bool:
        """Try to show only the newest iteration if indexes are long; return whether it is shown."""
        sizes = {}
        for index in self._indexes.values():
            with contextlib.suppress(OSError):
                sizes[index.path] = Path(index.path).stat().st_size
        if sum(sizes.values()) <= FIRST_STEP:
            return False
        newest = Records()
        # If an index were left out, the wrong run or only a part of a tensor might be shown.
        if all(
            newest_records(index.path, index.number, newest) for index in self._indexes.values()
        ):
            catalog = Catalog(newest, frozenset(), self.cards, 1)
            # The ranks of a run that is still writing may have reached different iterations.
            if len(catalog) and all(len(run["iterations"]) == 1 for run in catalog.runs):
                self.catalog, self.newest_only = catalog, True
        return self.newest_only

    def poll_all(self) -> None:
        """Read everything that has been written so far."""
        while self.poll():
            pass

    def _add_problem(self, path: str, why: str) -> None:
        if len(self._problems) < MOST_PROBLEMS:
            self._problems[path] = why

    def _walk(self) -> None:
        """Search the folder for new index files, changed run cards and tensor files."""
        self._walked = time.monotonic()
        if self._stamps and not self._unlisted_left and self._folders_unchanged():
            return
        names: dict[str, list[str]] = {TENSOR: [], INDEX: [], CARD: []}
        stamps: dict[str, int] = {}

        def unreadable(error: OSError) -> None:
            self._add_problem(str(error.filename), reason(error))

        for parent, folders, others in walk(self.root, unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            with contextlib.suppress(OSError):
                stamps[parent] = os.stat(parent).st_mtime_ns  # noqa: PTH116
            for name in others:
                kind = kind_of(name)
                if kind is not None:
                    names[kind].append(f"{parent}{os.sep}{name}")
        for path in sorted(names[INDEX]):
            if path not in self._indexes and self._is_inside(path):
                self._indexes[path] = _Index(path, self._numbers)
                self._numbers += 1
        for path in sorted(names[CARD]):
            if self._is_inside(path):
                self._read_card(path)
        self._stamps, self._tensors, self._check_unlisted = stamps, names[TENSOR], True

    def _folders_unchanged(self) -> bool:
        try:
            now = {path: os.stat(path).st_mtime_ns for path in self._stamps}  # noqa: PTH116
        except OSError:
            return False
        return now == self._stamps

    def _find_unlisted(self) -> None:
        """Find the tensor files that no usable index lists.

        A file that was written in the last few seconds may soon be listed, so it is left to the
        next search.
        """
        self._check_unlisted = False
        listed = self.records.path_hash.values[
            ~np.isin(self.records.origin.values, [0, *self._bad])
        ]
        unlisted = ~np.isin(self.records.hashes_of(self._tensors), listed)
        recent = time.time() - SETTLING
        self._unlisted, self._unlisted_left = [], False
        for position in np.flatnonzero(unlisted):
            path = self._tensors[position]
            if path in self._opened:
                continue
            try:
                if os.lstat(path).st_mtime > recent and not self._first:
                    self._unlisted_left = True
                    continue
            except OSError:
                continue
            self._unlisted.append(path)
        self._first = False

    def allows(self, path: str) -> bool:
        """Return whether a file lies in the folder after all symbolic links are resolved.

        The search follows no links to folders, but a link may replace a folder after the search.
        """
        try:
            return Path(path).resolve().is_relative_to(self.root)
        except (OSError, RuntimeError, ValueError):  # for example, a link to itself
            return False

    def _is_inside(self, path: str) -> bool:
        if self.allows(path):
            return True
        self._add_problem(path, LINKED)
        return False

    def _read_card(self, path: str) -> None:
        """Read a run card if it has changed since it was last read."""
        try:
            status = Path(path).stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._cards_read.get(path) == stamp:
                return
            self._cards_read[path] = stamp
            run_id = printable(Path(path).stem.removeprefix("run_"), limit=1000)
            self.cards = {**self.cards, run_id: read_run_card(Path(path))}
            self._problems.pop(path, None)
        except (OSError, ValueError) as error:
            self._add_problem(path, reason(error) if isinstance(error, OSError) else str(error))

    def _read_index(self, index: _Index) -> bool:
        """Read the next lines of an index; return whether there are more."""
        try:
            with open_regular(index.path) as file:
                status = os.fstat(file.fileno())
                if index.inode not in (-1, status.st_ino) or status.st_size < index.offset:
                    self._restart(index)
                index.inode = status.st_ino
                if index.finished or status.st_size == index.offset:
                    return False
                if status.st_size > INDEX_LIMIT:
                    raise UnusableFileError(index.path, f"more than {INDEX_LIMIT >> 30} GiB")
                file.seek(index.offset)
                content = file.read(STEP if index.offset else FIRST_STEP)
        except FileNotFoundError:
            return False
        except (OSError, UnusableFileError) as error:
            self._refuse(index, getattr(error, "why", "") or reason(error))
            return False
        end = content.rfind(b"\n") + 1
        if not end:
            if len(content) > LINE_LIMIT:
                self._refuse(index, f"a line of more than {LINE_LIMIT} bytes")
            return False
        try:
            self._add_lines(index, content[:end].split(b"\n")[:-1])
        except (ValueError, RecursionError) as error:
            self._refuse(index, reason(error))
            return False
        index.offset += end
        return index.offset < status.st_size and len(content) >= FIRST_STEP

    def _add_lines(self, index: _Index, lines: list[bytes]) -> None:
        if any(len(line) > LINE_LIMIT for line in lines):
            raise ValueError(f"a line of more than {LINE_LIMIT} bytes")
        if index.lines + len(lines) > LINES_LIMIT:
            raise ValueError(f"an index of more than {LINES_LIMIT} lines")
        parsed = parsed_lines(Path(index.path), lines, index.lines + 1, last=False)
        rows = [line for line in parsed if "event" not in line]
        events = [in_printable_form(line) for line in parsed if "event" in line]
        if len(index.events) + len(events) > MOST_EVENTS:
            raise ValueError(f"more than {MOST_EVENTS} events")
        if rows:
            columns = Columns()
            parent = index.path[: index.path.rindex(os.sep) + 1]
            columns.add(rows, file_paths(rows, parent), "index")
            self.records.add(columns, index.number)
        index.lines += len(lines)
        index.events += events

    def _restart(self, index: _Index) -> None:
        """Read an index again from its beginning, because it was replaced or truncated."""
        self._bad.add(index.number)
        index.number, self._numbers = self._numbers, self._numbers + 1
        index.offset = index.lines = 0
        index.finished, index.events = False, []

    def _refuse(self, index: _Index, why: str) -> None:
        """Leave out an unusable index; the files that it lists are opened instead."""
        self._bad.add(index.number)
        index.finished = True
        self._add_problem(index.path, f"not read ({why}); its files are opened instead")
        self._check_unlisted = True

    def _open_files(self) -> None:
        """Read the metadata of some files that no index lists."""
        columns = Columns()
        paths, self._unlisted = self._unlisted[:FILES_AT_ONCE], self._unlisted[FILES_AT_ONCE:]
        for path in paths:
            self._opened.add(path)
            if not self._is_inside(path):
                continue
            try:
                row, source = row_of_file(Path(path))
                check_tables(row)
                columns.add([row], [path], source)
            except UnreadableTensorError as error:
                self._add_problem(path, error.why)
            except WrongTypeError as error:
                self._add_problem(path, f"in its metadata, {error}")
            except OSError as error:
                self._add_problem(path, reason(error))
        if len(columns):
            self.records.add(columns, 0)
