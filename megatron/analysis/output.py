"""Writes result files: whole or not at all, and never over an earlier result."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path


def write_keeping(path: Path, content: bytes) -> list[Path]:
    """Write at once, under a temporary name first. An earlier file with another content keeps its
    content under a name with its time; that name is returned.
    """
    kept = []
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    if path.exists() and path.read_bytes() != content:
        written = datetime.fromtimestamp(path.stat().st_mtime)
        aside = path.with_name(f"{path.stem}_{written:%Y%m%d_%H%M%S}{path.suffix}")
        if not aside.exists():
            path.replace(aside)
            kept.append(aside)
    partial.replace(path)
    return kept
