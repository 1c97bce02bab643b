"""Results that were computed before: a table in one SQLite file, a row a tensor and format.

The key is what the result follows from: the files (path, size, time of the last change), how the
tensor is read, the format, and the sources of this package and of `fake_quant`. Paths are those
within the dump, so that results which lie in it move with it. Rows are written as results come, so
that what was interrupted goes on from there, and at once, so that no other process waits.

All of it can be computed again: what is damaged is thrown away, and said.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron import fake_quant
from megatron.analysis.stats.logical import Part

NAME = "statistics.sqlite"
PATIENCE = 30.0  #: seconds to wait for another process that writes
_LAYOUT = 1  #: of the tables; a file with another one is begun anew
_TABLES = """
    CREATE TABLE results (key TEXT, name TEXT, content BLOB, PRIMARY KEY (key, name)) WITHOUT ROWID;
    CREATE TABLE parts (key TEXT PRIMARY KEY, version TEXT, dump TEXT, files TEXT) WITHOUT ROWID;
"""


@functools.cache
def code_version() -> str:
    """Of all that a result follows from besides the data."""
    folders = (Path(__file__).parent, Path(str(fake_quant.__file__)).parent)
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a part's results are kept under."""

    key: str
    files: str  #: as JSON: path, size and time of change of each


class Cache:
    """Results of a dump by part and name, in a folder.

    Raises:
        OSError, ValueError: the folder cannot be written, or the file in it is none of ours.
    """

    def __init__(self, folder: Path, dump: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._folder = folder / NAME, dump
        #: the dump's place, unless the results lie in it and move with it
        self._dump = "" if folder.resolve().is_relative_to(dump.resolve()) else str(dump.resolve())
        self.remark = ""  #: what became of results that could not be kept or read
        self._used: set[str] = set()
        try:
            self._base: sqlite3.Connection | None = self._open()
        except sqlite3.Error as error:
            raise ValueError(
                f"{self.path} cannot be used as a cache ({error}); name another folder, or remove "
                "the file"
            ) from None

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        base.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        base.execute("PRAGMA synchronous=NORMAL")  # a power cut may take the last results
        if base.execute("PRAGMA user_version").fetchone() != (_LAYOUT,):
            base.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file
            base.execute("PRAGMA journal_mode=WAL")
            begin = "BEGIN IMMEDIATE; DROP TABLE IF EXISTS results; DROP TABLE IF EXISTS parts;"
            base.executescript(f"{begin}{_TABLES}PRAGMA user_version={_LAYOUT}; COMMIT")
        return base

    def entry(self, part: Part) -> Entry:
        """What a part's results are kept under. Its replicas belong to it: what is kept was
        measured when all of them could be read.

        Raises:
            OSError: a file is not there.
        """
        files = []
        for path in chain(part.paths, *part.replicas):
            stat = Path(path).stat()
            within = os.path.relpath(path, self._folder)
            files.append((within, stat.st_size, stat.st_mtime_ns))
        text = json.dumps(files)
        follows = json.dumps([code_version(), self._dump, text, astuple(part.layout), part.blocks])
        entry = Entry(hashlib.sha256(follows.encode()).hexdigest()[:32], text)
        self._used.add(entry.key)
        return entry

    def names(self, entry: Entry) -> set[str]:
        """Which results of a part there are."""
        return {name for (name,) in self._run("SELECT name FROM results WHERE key = ?", entry.key)}

    def get(self, entry: Entry) -> dict[str, bytes]:
        """All results of a part, by name; without those that are damaged."""
        rows = self._run("SELECT name, content FROM results WHERE key = ?", entry.key)
        return {name: content[4:] for name, content in rows if _is_whole(content)}

    def put(self, entry: Entry, contents: Mapping[str, bytes]) -> None:
        """Add results; those that are there are replaced."""
        part = (entry.key, code_version(), self._dump, entry.files)
        rows = [(entry.key, name, _summed(content)) for name, content in contents.items()]
        self._write(
            ("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?)", [part]),
            ("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", rows),
        )

    def prune(self) -> None:
        """Let go of what no call can take again: results of other versions of the program, and of
        files of this dump that changed or are gone.
        """
        query = "SELECT key, version != ?, dump = ? FROM parts"
        gone = [
            (key,) for key, old, mine in self._run(query, code_version(), self._dump)
            if old or (mine and key not in self._used and not self._is_there(key))
        ]  # fmt: skip
        if gone:
            self._write(
                ("DELETE FROM results WHERE key = ?", gone),
                ("DELETE FROM parts WHERE key = ?", gone),
            )
            self._run("PRAGMA incremental_vacuum")

    def _is_there(self, key: str) -> bool:
        try:
            for (files,) in self._run("SELECT files FROM parts WHERE key = ?", key):
                for within, size, changed in json.loads(files):
                    stat = (self._folder / within).stat()
                    if (stat.st_size, stat.st_mtime_ns) != (size, changed):
                        return False
        except (OSError, ValueError, TypeError):
            return False
        return True

    def _run(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        if self._base is None:
            return []
        try:
            return self._base.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            self._answer(error)
            return []

    def _write(self, *statements: tuple[str, Iterable[tuple[Any, ...]]]) -> None:
        """All of it or nothing."""
        if self._base is None:
            return
        try:
            self._base.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                self._base.executemany(statement, rows)
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            self._answer(error)

    def _answer(self, error: sqlite3.Error) -> None:
        """A damaged file is begun anew; with one that cannot be written nothing more is kept."""
        assert self._base is not None
        self._base.close()
        self._base = None
        if isinstance(error, sqlite3.OperationalError):  # locked, full, read-only
            self.remark = f"{self.path} cannot be used ({error}): results are not kept any more"
            return
        self.remark = f"{self.path} was damaged ({error}): what it had is computed again"
        try:
            for ending in ("", "-wal", "-shm"):
                Path(f"{self.path}{ending}").unlink(missing_ok=True)
            self._base = self._open()
        except (OSError, sqlite3.Error) as again:
            self.remark += f", and not kept ({again})"

    def close(self) -> None:
        """Let go of the file."""
        if self._base is not None:
            self._base.close()


def opened(folder: Path | None, dump: Path) -> AbstractContextManager[Cache | None]:
    """The cache of a dump in this folder, closed when the block ends; none without a folder."""
    return nullcontext() if folder is None else closing(Cache(folder, dump))


def _summed(content: bytes) -> bytes:
    """With a checksum before it: SQLite has none."""
    return zlib.crc32(content).to_bytes(4, "little") + content


def _is_whole(content: Any) -> bool:
    return isinstance(content, bytes) and content[:4] == _summed(content[4:])[:4]
