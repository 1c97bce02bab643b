"""Cache computed statistics in a SQLite file, so that later calls need not read tensors again.

Each row holds one result of a tensor part: the statistics of its values, or its errors in one
format. A part is one file, or several files whose tensors are added. The key covers everything that
a result depends on: the files (path, size, modification time), how the tensor is read, the format,
and the source code of this package and of `fake_quant`. Paths are relative to the dump, so that a
cache inside a dump can be moved with it. The results of a part are written as soon as they are
known, in a separate transaction. An interrupted computation therefore continues where it stopped,
and other processes do not wait.

All results can be computed again. Damaged entries are therefore ignored, and a damaged database is
replaced, with a remark. A dump and its cache may come from an untrusted source. A link, a FIFO or a
database of another program at the path of the cache is therefore refused and left unchanged. Only a
database with exactly the two expected tables is used, because triggers and views would run SQL
statements of their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron import fake_quant
from megatron.analysis.stats.logical_tensors import Part
from megatron.bounded_files import printable

NAME = "statistics.sqlite"
PATIENCE = 30.0  #: maximum time to wait while another process writes, in seconds
APPLICATION_ID = 0x4D654761  #: SQLite application ID in the header of a cache file
_IDS = (APPLICATION_ID.to_bytes(4, "big"), bytes(4))  #: valid application IDs; a new file has 0
_SCHEMA = 1  #: version of the table definitions
_TABLES = {
    "results": "CREATE TABLE results (key TEXT, name TEXT, content BLOB, PRIMARY KEY (key, name))"
    " WITHOUT ROWID",
    "parts": "CREATE TABLE parts (key TEXT PRIMARY KEY, version TEXT, dump TEXT, files TEXT)"
    " WITHOUT ROWID",
}
_BESIDE = ("-wal", "-shm")  #: suffixes of the files that SQLite keeps next to the database
_JOURNAL_PATIENCE = 2.0  #: maximum time to wait until a SQLite journal is deleted, in seconds


@functools.cache
def code_version(*more: Path) -> str:
    """Return a hash of the source code that computes the statistics, and of the folders `more`."""
    folders = (Path(__file__).parent, Path(str(fake_quant.__file__)).parent, *more)
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Entry:
    """Key of a tensor part in the cache, and the state of the files that hold the part."""

    key: str
    files: str  #: path, size and modification time of each file, as JSON


class Cache:
    """Cache in a folder for the statistics computed from a dump.

    Entries are identified by a part of a tensor and the name of a result.

    Raises:
        OSError, ValueError: if the folder cannot be written, or the file in it belongs to another
            program.
    """

    def __init__(self, folder: Path, dump: Path):
        check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._folder = folder / NAME, dump
        #: path of the dump; empty if the cache lies in the dump, so that both can be moved together
        self._dump = "" if folder.resolve().is_relative_to(dump.resolve()) else str(dump.resolve())
        self.remark = ""  #: message about results that could not be read or stored
        self._used: set[str] = set()  #: keys of the entries that this process has requested
        try:
            self._base: sqlite3.Connection | None = self._open()
        except sqlite3.Error as error:
            raise ValueError(
                f"{printable(self.path, limit=4096)} cannot be used as a cache "
                f"({printable(error)}); choose another folder, or remove the file"
            ) from None

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            base.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
            base.execute("PRAGMA trusted_schema=OFF")
            self._prepare(base)
        except BaseException:
            base.close()
            raise
        return base

    def _prepare(self, base: sqlite3.Connection) -> None:
        """Create the tables of the cache in a new database, or check the tables of an existing one.

        Raises:
            ForeignCacheError: if another program wrote the file.
        """
        ids = self._ids(base)
        if ids[0] == APPLICATION_ID and ids[1] != _SCHEMA and _tables(base).keys() <= {*_TABLES}:
            # another version of this program created the tables, so replace them
            drop = "".join(f"DROP TABLE IF EXISTS {name}; " for name in _TABLES)
            reset = "PRAGMA application_id=0; PRAGMA user_version=0; COMMIT"
            base.executescript(f"BEGIN IMMEDIATE; {drop}{reset}")
        if not _tables(base):
            self._refuse_foreign(base, created=False)
            # the setting `auto_vacuum` takes effect only in a new file
            base.execute("PRAGMA auto_vacuum=INCREMENTAL")
            base.execute("PRAGMA journal_mode=WAL")
            base.execute("BEGIN IMMEDIATE")
            if not _tables(base):  # another process may have just created the tables
                for statement in _TABLES.values():
                    base.execute(statement)
                base.execute(f"PRAGMA application_id={APPLICATION_ID}")
                base.execute(f"PRAGMA user_version={_SCHEMA}")
            base.execute("COMMIT")
        self._refuse_foreign(base, created=True)
        # NORMAL is faster than FULL, but a power failure may lose the last results
        base.execute("PRAGMA synchronous=NORMAL")

    def _ids(self, base: sqlite3.Connection) -> list[int]:
        """Return the application ID and the table version that the header of the file contains."""
        names = ("application_id", "user_version")
        return [base.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    def _refuse_foreign(self, base: sqlite3.Connection, *, created: bool) -> None:
        """Raise ForeignCacheError if another program wrote the database.

        Args:
            created: whether the tables of the cache must already exist.
        """
        ids = self._ids(base)
        expected = [APPLICATION_ID, _SCHEMA] if created else [0, 0]
        if ids != expected or (created and _tables(base) != _normalized(_TABLES)):
            raise ForeignCacheError(
                f"{printable(self.path, limit=4096)} cannot be used as a cache: it is a database "
                "of another program; choose another folder, or remove the file"
            )

    def entry(self, part: Part) -> Entry:
        """Return the cache entry of a tensor part.

        The replicas are part of the key, because results are stored only if all replicas could be
        read.

        Raises:
            OSError: if a file is missing.
        """
        files = []
        for path in chain(part.paths, *part.replicas):
            stat = Path(path).stat()
            within = os.path.relpath(path, self._folder)
            files.append((within, stat.st_size, stat.st_mtime_ns))
        text = json.dumps(files)
        causes = json.dumps([code_version(), self._dump, text, astuple(part.matrix), part.blocks])
        entry = Entry(hashlib.sha256(causes.encode()).hexdigest()[:32], text)
        self._used.add(entry.key)
        return entry

    def names(self, entry: Entry) -> set[str]:
        """Return the names of a tensor part's cached results: format names and the key `VALUES`."""
        return {name for (name,) in self._run("SELECT name FROM results WHERE key = ?", entry.key)}

    def get(self, entry: Entry) -> dict[str, bytes]:
        """Return all undamaged cached results of a tensor part, keyed by name."""
        rows = self._run("SELECT name, content FROM results WHERE key = ?", entry.key)
        return {name: content[4:] for name, content in rows if _is_whole(content)}

    def put(self, entry: Entry, contents: Mapping[str, bytes]) -> None:
        """Store results of a tensor part; existing results with the same names are replaced."""
        part = (entry.key, code_version(), self._dump, entry.files)
        rows = [(entry.key, name, _with_checksum(content)) for name, content in contents.items()]
        self._write(
            ("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?)", [part]),
            ("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", rows),
        )

    def prune(self) -> None:
        """Delete cached results that no later call can use.

        These are the results of other versions of the program, and the results of files in this
        dump that were changed or deleted.
        """
        query = "SELECT key, version != ?, dump = ? FROM parts"
        stale = [
            (key,)
            for key, is_old, is_ours in self._run(query, code_version(), self._dump)
            if is_old or (is_ours and key not in self._used and not self._is_unchanged(key))
        ]
        if stale:
            self._write(
                ("DELETE FROM results WHERE key = ?", stale),
                ("DELETE FROM parts WHERE key = ?", stale),
            )
            self._run("PRAGMA incremental_vacuum")

    def _is_unchanged(self, key: str) -> bool:
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
            self._recover(error)
            return []

    def _write(self, *statements: tuple[str, Iterable[tuple[Any, ...]]]) -> None:
        """Execute SQL statements in one transaction."""
        if self._base is None:
            return
        try:
            self._base.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                self._base.executemany(statement, rows)
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            self._recover(error)

    def _recover(self, error: sqlite3.Error) -> None:
        """Replace a damaged cache file with a new one; stop caching if the file cannot be used."""
        assert self._base is not None
        self._base.close()
        self._base = None
        if isinstance(error, sqlite3.OperationalError):  # the cause is, for example, a full disk
            self.remark = f"{self.path} cannot be used ({error}): no more results are stored"
            return
        self.remark = f"{self.path} was damaged ({error}): its results are computed again"
        try:
            for suffix in ("", *_BESIDE):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self._base = self._open()
        except (OSError, ValueError, sqlite3.Error) as again:
            self.remark += f", and not stored ({again})"

    def close(self) -> None:
        """Close the database."""
        if self._base is not None:
            self._base.close()


class ForeignCacheError(ValueError):
    """Exception raised if a path cannot be used as a cache; the message contains the path."""


def check_place(folder: Path) -> None:
    """Raise ForeignCacheError if a cache folder cannot be used safely.

    The folder must not be a link, and must not contain special files or a file of another program.
    """
    _check_names(folder)
    head = b""
    with contextlib.suppress(FileNotFoundError), (folder / NAME).open("rb") as file:
        head = file.read(100)
    ours = head[:16] == b"SQLite format 3\0" and head[68:72] in _IDS
    if head and not ours:
        raise ForeignCacheError(
            f"{printable(folder / NAME, limit=4096)} cannot be used as a cache: it is a file of "
            "another program; choose another folder, or remove the file"
        )


def _check_names(folder: Path) -> None:
    """Check the file types of the cache's paths, and refuse a leftover journal; open no file.

    Raises:
        ForeignCacheError: if a path is refused; the message contains the path.
    """
    deadline = time.monotonic() + _JOURNAL_PATIENCE
    _refuse_but(folder, stat.S_ISDIR, "a folder")
    for suffix in ("", *_BESIDE):
        _refuse_but(folder / f"{NAME}{suffix}", stat.S_ISREG, "a regular file")
    journal = folder / f"{NAME}-journal"
    # SQLite replays a journal when it opens the database; a forged journal may delete other files
    while os.path.lexists(journal):
        if time.monotonic() > deadline:
            raise ForeignCacheError(
                f"{printable(journal, limit=4096)} prevents the use of the cache: replaying a "
                "leftover journal could change other files; choose another folder, or remove it"
            )
        time.sleep(0.05)


def _refuse_but(path: Path, wanted: Callable[[int], bool], what: str) -> None:
    """Raise ForeignCacheError if a path exists and `wanted` does not accept its file type.

    Links are not followed and therefore never accepted.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not wanted(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
        kind = "a folder" if stat.S_ISDIR(mode) else kind
        kind = "a file" if stat.S_ISREG(mode) else kind
        raise ForeignCacheError(
            f"{printable(path, limit=4096)} cannot be used as a cache: it is {kind}, not {what}; "
            "choose another folder, or remove it"
        )


def _tables(base: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL statements that created the tables, triggers and views, keyed by name."""
    rows = base.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100")
    return _normalized({str(name): str(sql) for name, sql in rows})


def _normalized(tables: Mapping[str, str]) -> dict[str, str]:
    return {name: " ".join(sql.split()) for name, sql in tables.items()}


def open_cache(folder: Path | None, dump: Path) -> AbstractContextManager[Cache | None]:
    """Return a context manager that yields the cache of a dump and closes it at the end.

    If `folder` is None, the context manager yields None.
    """
    return nullcontext() if folder is None else closing(Cache(folder, dump))


def _with_checksum(content: bytes) -> bytes:
    """Return the content with a checksum in front; SQLite itself stores no checksums."""
    return zlib.crc32(content).to_bytes(4, "little") + content


def _is_whole(content: Any) -> bool:
    return isinstance(content, bytes) and content[:4] == _with_checksum(content[4:])[:4]
