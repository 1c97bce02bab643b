"""Read small files from untrusted folders in bounded time and memory.

Settings, recipes, manifests, run cards and the JSON files of a Hugging Face folder may come from an
untrusted source. The functions here open regular files only, because a FIFO blocks forever and
`/dev/zero` never ends. They read at most `limit` bytes and raise an `UnusableFileError` that names
the file. Links to regular files are followed, because the cache of the Hugging Face Hub consists of
such links. A missing file raises a `FileNotFoundError`, so that callers can use a default.

This module imports only the standard library.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MEBIBYTE = 1 << 20
#: Default maximum size of a file, in bytes. Parsing a file of this size takes up to 400 MB of
#: memory.
TEXT_LIMIT = 16 * MEBIBYTE
DEPTH_LIMIT = 64  #: maximum nesting depth of JSON lists and objects

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe (FIFO)",
    stat.S_ISCHR: "a character device",
    stat.S_ISBLK: "a block device",
    stat.S_ISSOCK: "a socket",
}


class NeverWaiting(io.BufferedReader):
    """Reader for files opened with O_NONBLOCK; it raises an error instead of waiting.

    Some files in /proc look like regular files, but reading them can wait without end. Python
    returns None for such a read.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Read and return up to `size` bytes of the file.

        Raises:
            BlockingIOError: if the read would have to wait for another process.
        """
        content: bytes | None = super().read(size)
        if content is None:
            raise BlockingIOError(errno.EAGAIN, "reading it would wait for another process")
        return content


class UnusableFileError(ValueError):
    """Error about a file that cannot be used; its message has the form `PATH: why`.

    The attributes `path` and `why` hold the two parts.
    """

    def __init__(self, path: str | os.PathLike[str], why: str):
        super().__init__(f"{printable(os.fspath(path), limit=1000)}: {why}")
        self.path = Path(path)
        self.why = why


def printable(text: object, *, limit: int = 200) -> str:
    """Return at most `limit` characters of `text`, with unprintable characters escaped.

    Otherwise text from a file could forge lines of output or control the terminal.
    """
    string = str(text)
    pieces = [c if c.isprintable() else _escaped(c) for c in string[:limit]]
    return "".join(pieces) + ("..." if len(string) > limit else "")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the `os.stat` result of a regular file; raise an error for other kinds of files.

    Links are followed.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnusableFileError: if the path is a folder, FIFO, device or socket, or is inaccessible.
    """
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a null byte in the path causes a ValueError
        raise UnusableFileError(path, _reason(error)) from None
    _refuse_special(path, status)
    return status


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, without ever waiting for another process.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnusableFileError: if it is not a regular file or cannot be opened.
    """
    check_regular(path)  # even opening a device can have side effects
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFileError(path, _reason(error)) from None
    try:
        # Another process may have replaced the file since the first check.
        _refuse_special(path, os.fstat(number))
        return NeverWaiting(io.FileIO(number, "rb"))
    except BaseException:
        os.close(number)
        raise


def refuse_special_files(folder: Path, *, concerns: Callable[[str], bool] = bool) -> None:
    """Raise an error if `folder` contains a FIFO, device or socket that a library would open.

    Call it before a library that opens every file in the folder.

    Args:
        folder: folder to check; a missing folder is not an error here.
        concerns: returns whether the library would read an entry with this name; other entries are
            not checked.

    Raises:
        UnusableFileError: if an entry is refused or cannot be checked; the message names it.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if concerns(path.name))
        for path in paths:
            if path.exists() and not path.is_dir():
                check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UnusableFileError(error.filename or folder, _reason(error)) from error


def walk(
    folder: str | os.PathLike[str], unreadable: Callable[[OSError], object]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the path, the subfolder names and the other entry names of every folder in a tree.

    This is `os.walk` without recursion: before Python 3.12, a thousand nested folders cause a
    RecursionError in `os.walk`. Links to folders are listed but not followed. The caller may remove
    or sort the subfolder names in place.

    Args:
        folder: root of the tree.
        unreadable: called with the error of each folder that cannot be listed.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        parent = waiting.pop()
        folders: list[str] = []
        others: list[str] = []
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    (folders if _is_folder(entry) else others).append(entry.name)
        except OSError as error:
            unreadable(error)
            continue
        yield parent, folders, others
        for name in reversed(folders):
            path = os.path.join(parent, name)  # noqa: PTH118 # faster than a Path
            if not os.path.islink(path):  # noqa: PTH114
                waiting.append(path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # the entry cannot be resolved; for example, it is a link to itself
        return False


def read_bytes(path: str | os.PathLike[str], *, limit: int = TEXT_LIMIT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnusableFileError: if it is not a regular file, is too large or cannot be read.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > limit else file.read(limit + 1)
        except OSError as error:
            raise UnusableFileError(path, _reason(error)) from None
    if max(size, len(content)) > limit:
        raise UnusableFileError(path, f"larger than {_size(limit)}; files of this kind are small")
    return content


def read_text(path: str | os.PathLike[str], *, limit: int = TEXT_LIMIT) -> str:
    """Return the text of a regular UTF-8 file, without a byte order mark.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnusableFileError: as in `read_bytes`, or if the content is not UTF-8.
    """
    content = read_bytes(path, limit=limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x})"
        raise UnusableFileError(path, why) from None


def read_json(
    path: str | os.PathLike[str], *, limit: int = TEXT_LIMIT, depth: int = DEPTH_LIMIT
) -> Any:
    """Return the parsed content of a JSON file.

    Duplicate keys, lone surrogates and more than `depth` nested levels are refused.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnusableFileError: as in `read_text`, or if the content is not JSON or is refused.
    """
    try:
        return parse_json(read_text(path, limit=limit), depth=depth)
    except UnusableFileError:
        raise
    except ValueError as error:
        raise UnusableFileError(path, f"not usable JSON: {error}") from None


def parse_json(text: str, *, depth: int = DEPTH_LIMIT) -> Any:
    """Return the value that JSON text represents; it may be nested at most `depth` levels deep.

    Duplicate keys and lone surrogates are refused.

    Raises:
        ValueError: if the text is not JSON or is refused; the message gives the reason and, if
            known, the position.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError(f"nested deeper than {depth} levels") from None
    _check_values(value, depth)
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {printable(repr(twin))} occurs twice")
    return fields


def _check_values(value: Any, depth: int) -> None:
    """Raise ValueError if a value has lone surrogates or more than `depth` nested levels.

    The check does not use recursion.
    """
    level = [value]
    for _ in range(depth + 1):
        _refuse_surrogates(item for item in level if isinstance(item, str))
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise ValueError(f"nested deeper than {depth} levels")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _refuse_surrogates(texts: Iterable[str]) -> None:
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(
                f"a lone surrogate in the string '{printable(text, limit=60)}'"
            ) from None


def _refuse_special(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((name for check, name in _KINDS.items() if check(status.st_mode)), "special")
    raise UnusableFileError(path, f"{kind}, not a regular file")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _size(limit: int) -> str:
    return f"{limit // MEBIBYTE} MiB" if limit >= MEBIBYTE else f"{limit} bytes"
