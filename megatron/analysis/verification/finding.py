"""What a verification says."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.analysis.text_table import shown


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; a note is none that makes a dump wrong."""

    what: str  #: the kind, one word or two
    where: str  #: a file, or a place in the run
    text: str
    note: bool = False

    def __str__(self) -> str:
        """Return one line that is safe to print, even if it quotes hostile names of a dump."""
        kind = "note" if self.note else "ERROR"
        return f"{kind}  {self.what}: {shown(self.where)}: {shown(self.text)}"
