"""How far a preprocessing run is, as progress.json keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batch import Position


@dataclass
class Count:
    """What went into one pair of files."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class ResumePoint:
    """How far a run is."""

    file: int = 0  # index of the input that is read from next
    position: Position = field(default_factory=Position)
    counts: dict[str, Count] = field(default_factory=dict)
    bad_lines: int = 0
    bad_bytes: int = 0
    file_read: int = 0  # documents of this file, and those of them that were left out
    file_bad: int = 0

    def copy(self) -> ResumePoint:
        return replace(self, counts={key: replace(count) for key, count in self.counts.items()})

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ResumePoint:
        counts = {key: Count(**count) for key, count in fields.pop("counts").items()}
        return cls(position=Position(**fields.pop("position")), counts=counts, **fields)


def identity(path: Path) -> list[Any]:
    """What tells whether a file is the one that was read."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]
