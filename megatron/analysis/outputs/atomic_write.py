"""Write output files atomically, so that a file is never left incomplete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from megatron.bounded_files import check_regular, read_bytes


def write(path: Path, content: bytes) -> Path:
    """Write a file under a temporary name, then rename it, replacing an earlier file.

    Return `path`.

    Raises:
        OSError: if the file cannot be written; the message contains its path.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path of the output file to an OSError that is raised in the `with` block.

    The error message of a full disk contains no path.
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {path}: {error.strerror or error}; free some space, change the "
            "permissions of the folder, or choose another output folder"
        ) from error


def write_keeping(path: Path, content: bytes) -> list[Path]:
    """Write a file; first rename an earlier file with this name if its content differs.

    The new name contains the modification time of the earlier file. If a file with the new name
    already exists, the earlier file is replaced instead.

    Returns:
        The new path of the earlier file, in a list; the list is empty if no file was renamed.
    """
    kept = []
    if path.exists() and not _holds(path, content):
        written = datetime.fromtimestamp(path.stat().st_mtime)
        aside = path.with_name(f"{path.stem}_{written:%Y%m%d_%H%M%S}{path.suffix}")
        if not aside.exists():
            path.replace(aside)
            kept.append(aside)
    write(path, content)
    return kept


def _holds(path: Path, content: bytes) -> bool:
    """Return whether a file has the given content.

    Raises:
        UnusableFileError: if the file is not a regular file or cannot be read.
    """
    same_size = check_regular(path).st_size == len(content)
    return same_size and read_bytes(path, limit=len(content)) == content
