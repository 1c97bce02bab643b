"""Writes result files: whole or not at all."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path


def write(path: Path, content: bytes) -> Path:
    """Write at once, under a temporary name first; what was there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_keeping(path: Path, content: bytes) -> list[Path]:
    """The same, but an earlier file with another content keeps its content under a name with its
    time; that name is returned.
    """
    kept = []
    if path.exists() and path.read_bytes() != content:
        written = datetime.fromtimestamp(path.stat().st_mtime)
        aside = path.with_name(f"{path.stem}_{written:%Y%m%d_%H%M%S}{path.suffix}")
        if not aside.exists():
            path.replace(aside)
            kept.append(aside)
    write(path, content)
    return kept
