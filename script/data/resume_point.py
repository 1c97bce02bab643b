"""Define the resume point of a preprocessing run, which progress.json stores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batch import Position


@dataclass
class Count:
    """Numbers of documents, tokens and bytes of text that one pair of output files holds."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0  #: number of documents that were left out because they have no tokens


@dataclass
class ResumePoint:
    """Position in the input up to which a run has written its output, with counts so far."""

    file: int = 0  #: index of the input file that is read next
    position: Position = field(default_factory=Position)
    counts: dict[str, Count] = field(default_factory=dict)
    bad_lines: int = 0
    bad_bytes: int = 0  #: size of bad_lines.txt, in bytes
    file_read: int = 0  #: number of valid documents read from the current file
    file_bad: int = 0  #: number of documents of the current file that were skipped

    def copy(self) -> ResumePoint:
        """Return a copy of this resume point that can be modified independently."""
        return replace(self, counts={key: replace(count) for key, count in self.counts.items()})

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ResumePoint:
        """Return the resume point that the JSON object `fields` describes; `fields` is modified."""
        counts = {key: Count(**count) for key, count in fields.pop("counts").items()}
        return cls(position=Position(**fields.pop("position")), counts=counts, **fields)


def identity(path: Path) -> list[Any]:
    """Return a file's name, size and modification time, to detect later changes of the file."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]
