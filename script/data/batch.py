"""Define batches of documents and their positions in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a file: the numbers of lines (rows in Parquet) and bytes of text before it."""

    line: int = 0
    offset: int = 0


START = Position()


@dataclass
class Batch:
    """Consecutive documents of one input file, with the positions where they start and end.

    For JSONL, `block` holds whole lines. The worker splits the block into lines, to save time in
    the reader, for which all workers wait. For other formats, `documents` holds pairs: the number
    of the document's first line (or row), counted from 1, and its content. For Parquet, the content
    is one cell per key, or None for a cell without text.
    """

    file: int
    path: Path
    format: str
    start: Position
    end: Position = Position()
    block: bytes = b""
    documents: list[tuple[int, Any]] = field(default_factory=list)
    bytes_read: int = 0  #: number of bytes that were read from the (possibly compressed) file
    last: bool = False  #: True if this is the last batch of its file

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.format != "jsonl":
            yield from self.documents
            return
        for number, line in enumerate(self.block.split(b"\n"), start=self.start.line + 1):
            if line := line.strip():
                yield number, line
