"""What a verification says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; a note is none that makes a dump wrong."""

    what: str  #: the kind, one word or two
    where: str  #: a file, or a place in the run
    text: str
    note: bool = False

    def __str__(self) -> str:
        return f"{'note' if self.note else 'ERROR'}  {self.what}: {self.where}: {self.text}"
