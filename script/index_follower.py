"""Follows the index files that a run appends to while it collects, and counts what they say.

Only the run that was started with our token is followed: other runs' files in the same folder,
older ones or ones that are written at this moment, are left alone. Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Set for the command; the collector copies variables whose names start like this into the run's
#: card.
TOKEN_VARIABLE = "TENSOR_SAVE_LAUNCH"
COUNTED = ("phase", "component", "operation", "layer_idx")


@dataclass
class Tally:
    """What has arrived so far."""

    tensors: int = 0
    bytes: int = 0
    runs: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    iterations: set[int] = field(default_factory=set)
    limits: list[str] = field(default_factory=list)  #: where a rank stopped, one for each
    dropped: int = 0  #: tensors that limits left out
    dropped_bytes: int = 0
    kept: set[str] = field(default_factory=set)  #: why a ring of iterations was written
    let_go: set[str] = field(default_factory=set)  #: why one was not, at the end
    counts: dict[str, Counter[Any]] = field(
        default_factory=lambda: {name: Counter() for name in COUNTED}
    )

    def add(self, record: dict[str, Any]) -> None:
        """Count one line of an index."""
        if "event" in record:
            if record["event"] == "limited":
                self.limits.append(str(record.get("why")))
            if record["event"] == "dropped":
                self.dropped += int(record.get("tensors", 0))
                self.dropped_bytes += int(record.get("bytes", 0))
            if record["event"] == "kept":
                self.kept.add(str(record.get("why")))
            if record["event"] == "let_go":
                self.let_go.add(str(record.get("why")))
            return
        self.tensors += 1
        self.bytes += int(record.get("bytes", 0))
        self.runs.add(str(record.get("run_id")))
        self.ranks.add(int((record.get("rank") or {}).get("world", 0)))
        self.iterations.add(int(record.get("iteration", 0)))
        for name in COUNTED:
            self.counts[name][record.get(name)] += 1


class IndexFollower:
    """Reads the new lines of our run's indexes, each complete line once."""

    def __init__(self, folder: Path, token: str):
        self.folder = folder
        self.tally = Tally()
        self._token = token
        self._offsets: dict[Path, int] = {}
        self._foreign = set(folder.glob("index_*.jsonl"))  # of runs that began before ours

    def poll(self, *, last: bool = False) -> int:
        """Read what is new; returns how many tensors that was.

        Args:
            last: the run has ended: an index without a card counts as ours too, and is not waited
                for.
        """
        before = self.tally.tensors
        for index in sorted(set(self.folder.glob("index_*.jsonl")) - self._foreign):
            if index not in self._offsets:
                ours = self._is_ours(index)
                if ours is None and not last:
                    continue
                if ours is False:
                    self._foreign.add(index)
                    continue
                self._offsets[index] = 0
            self._read(index)
        return self.tally.tensors - before

    def _is_ours(self, index: Path) -> bool | None:
        """Whether the run's card holds our token; None while there is no card."""
        run_id = index.stem.removeprefix("index_").rpartition("_rank")[0]
        try:
            card = json.loads((self.folder / f"run_{run_id}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return bool((card.get("environment") or {}).get(TOKEN_VARIABLE) == self._token)

    def _read(self, index: Path) -> None:
        """Count the complete lines beyond those already read; others are skipped."""
        with index.open("rb") as lines:
            lines.seek(self._offsets[index])
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._offsets[index] += len(line)
                try:
                    self.tally.add(json.loads(line))
                except (ValueError, TypeError, AttributeError):
                    continue
