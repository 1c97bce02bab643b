"""Follows the index files that a run appends to while it collects, and counts what they say.

Only the run that was started with our token is followed: other runs' files in the same folder,
older ones or ones that are written at this moment, are left alone. Standard library only.

The folder may hold files of anyone: FIFOs and devices are never opened, and lines, texts and
numbers are bounded. A file that cannot be followed is named in `IndexFollower.problems`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron.bounded_files import (
    UnusableFileError,
    open_regular,
    parse_json,
    printable,
    read_json,
)
from megatron.tensor_record import LINE_LIMIT

#: Set for the command; the collector copies variables whose names start like this into the run's
#: card.
TOKEN_VARIABLE = "TENSOR_SAVE_LAUNCH"
TEXT_LIMIT = 1000  #: characters of a text that is shown
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

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one line of an index.

        Raises:
            ValueError: a field is not what the collector writes; then nothing is counted.
        """
        if not isinstance(record, Mapping):
            raise ValueError("no record")
        if "event" in record:
            self._add_event(record)
            return
        rank = record.get("rank") or {}
        if not isinstance(rank, Mapping):
            raise ValueError("no rank")
        numbers = [_whole(record, "bytes"), _whole(rank, "world"), _whole(record, "iteration")]
        layer, run_id = _whole(record, "layer_idx"), _text(record, "run_id")
        texts = {name: _text(record, name) for name in COUNTED[:-1]}
        self.tensors += 1
        self.bytes += numbers[0]
        self.ranks.add(numbers[1])
        self.iterations.add(numbers[2])
        self.runs.add(run_id)
        for name, value in {**texts, "layer_idx": layer}.items():
            self.counts[name][value] += 1

    def _add_event(self, record: Mapping[str, Any]) -> None:
        event, why = record["event"], _text(record, "why")
        if event == "limited":
            self.limits.append(why)
        elif event == "dropped":
            tensors, count = _whole(record, "tensors"), _whole(record, "bytes")
            self.dropped += tensors
            self.dropped_bytes += count
        elif event == "kept":
            self.kept.add(why)
        elif event == "let_go":
            self.let_go.add(why)


def _whole(fields: Mapping[str, Any], name: str) -> int:
    """Return a whole number of at most 64 bits; 0 where there is none."""
    value = fields.get(name, 0)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} is no whole number")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    """Return a text that is safe to print; `None` where there is none."""
    return printable(fields.get(name), limit=TEXT_LIMIT)


class IndexFollower:
    """Reads the new lines of our run's indexes, each complete line once."""

    def __init__(self, folder: Path, token: str):
        self.folder = folder
        self.tally = Tally()
        self.problems: list[str] = []  #: files that cannot be followed, and why
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
            card = read_json(self.folder / f"run_{run_id}.json")
            if not isinstance(card, dict):
                raise UnusableFileError(self.folder / f"run_{run_id}.json", "no run card")
        except FileNotFoundError:
            return None
        except UnusableFileError as error:
            self.problems.append(f"{error}; tensors of this run are not counted")
            return False
        environment = card.get("environment")
        return isinstance(environment, dict) and environment.get(TOKEN_VARIABLE) == self._token

    def _read(self, index: Path) -> None:
        """Count the complete lines beyond those already read; others are skipped."""
        try:
            with open_regular(index) as file:
                file.seek(self._offsets[index])
                for length, line in _complete_lines(file):
                    self._offsets[index] += length
                    try:
                        self.tally.add(parse_json(line.decode()))
                    except (ValueError, TypeError):  # another program's line
                        continue
        except (OSError, UnusableFileError) as error:
            self._foreign.add(index)
            self.problems.append(f"{error}; its tensors are not counted")


def _complete_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the size of each line that has an end, and the line, empty if it is too long."""
    length, whole = 0, True
    while piece := file.readline(LINE_LIMIT):
        length += len(piece)
        if piece.endswith(b"\n"):
            yield length, piece if whole else b""
            length, whole = 0, True
        else:
            whole = False  # too long, or not written to its end
