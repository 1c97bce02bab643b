"""Some documents of a file, and where in the file they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """Where a file is read from: behind how many lines (rows, of Parquet) and bytes of text."""

    line: int = 0
    offset: int = 0


START = Position()


@dataclass
class Batch:
    """Some documents, one after another, and where the file goes on.

    Of JSONL `block` holds whole lines, so that a worker cuts them and not the reader that all
    workers wait for. Of other formats `documents` holds (first line or row from 1, content); of
    Parquet the content is a cell for each key, None where there is no text.
    """

    file: int
    path: Path
    format: str
    start: Position
    end: Position = Position()
    block: bytes = b""
    documents: list[tuple[int, Any]] = field(default_factory=list)
    bytes_read: int = 0  # of the file as it is on disk
    last: bool = False  # of its file

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.format != "jsonl":
            yield from self.documents
            return
        for number, line in enumerate(self.block.split(b"\n"), start=self.start.line + 1):
            if line := line.strip():
                yield number, line
