"""Write result files whole or not at all."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from megatron.bounded_files import check_regular, read_bytes


def write(path: Path, content: bytes) -> Path:
    """Write a file under a temporary name, then rename it; an earlier file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_keeping(path: Path, content: bytes) -> list[Path]:
    """Write a file, and keep an earlier one with other content under a name with its time.

    Return the new names of the files that were kept.
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
    """Return whether a file has this content.

    Raises:
        UnusableFileError: the file is not regular, or cannot be read.
    """
    same_size = check_regular(path).st_size == len(content)
    return same_size and read_bytes(path, limit=len(content)) == content
