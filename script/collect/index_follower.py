"""Count the tensors that a run collects, by reading the index files to which the run adds them.

Only the run that was started with this program's token is followed. Other runs may have written to
the same folder, or may be writing to it now; their files are ignored. This module uses only the
standard library.

The folder is not trusted: FIFOs and devices are never opened, and the sizes of lines, strings and
numbers are limited. `IndexFollower.problems` names each file that cannot be followed.
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

#: Environment variable with a token that identifies this launch. The collector copies every
#: variable whose name begins with TENSOR_SAVE to the run card, so the card contains the token.
TOKEN_VARIABLE = "TENSOR_SAVE_LAUNCH"
TEXT_LIMIT = 1000  #: maximum length in characters of a string that is shown
#: Fields of a record by which tensors are counted.
COUNTED = ("phase", "component", "operation", "layer_idx")


@dataclass
class Tally:
    """Counts of the tensors that a run has written so far, and the run's events."""

    tensors: int = 0
    bytes: int = 0
    runs: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    iterations: set[int] = field(default_factory=set)
    #: messages about reached limits, one entry per rank that has reached a limit
    limits: list[str] = field(default_factory=list)
    dropped: int = 0  #: number of tensors left out because of a limit
    dropped_bytes: int = 0
    kept: set[str] = field(default_factory=set)  #: events at which a ring buffer was saved
    let_go: set[str] = field(default_factory=set)  #: events at which a ring buffer was discarded
    counts: dict[str, Counter[Any]] = field(
        default_factory=lambda: {name: Counter() for name in COUNTED}
    )

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the tensor or note the event that one line of an index describes.

        Raises:
            ValueError: if the collector cannot have written this record; nothing is counted.
        """
        if not isinstance(record, Mapping):
            raise ValueError("not a record")
        if "event" in record:
            self._add_event(record)
            return
        rank = record.get("rank") or {}
        if not isinstance(rank, Mapping):
            raise ValueError("rank is not an object")
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
    """Return the integer in the field `name`, or 0 if the field is missing.

    Raises:
        ValueError: if the field is not an integer of at most 64 bits.
    """
    value = fields.get(name, 0)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} is not an integer")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    """Return the field `name` as text that is safe to print, or "None" if the field is missing."""
    return printable(fields.get(name), limit=TEXT_LIMIT)


class IndexFollower:
    """Reader of the index files of one run. It processes each complete line exactly once."""

    def __init__(self, folder: Path, token: str):
        self.folder = folder
        self.tally = Tally()
        self.problems: list[str] = []  #: messages about unreadable indexes and run cards
        self._token = token
        self._offsets: dict[Path, int] = {}
        self._foreign = set(folder.glob("index_*.jsonl"))  # indexes of earlier runs

    def poll(self, *, last: bool = False) -> int:
        """Read the new lines of the indexes, and return the number of tensors in these lines.

        Args:
            last: whether the run has ended. If it has, an index without a run card is counted as
                part of the run. Otherwise, such an index is not read until its card exists.
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
        """Return whether the token in the run card of an index is that of the followed run.

        The result is None if the run card does not exist yet.
        """
        run_id = index.stem.removeprefix("index_").rpartition("_rank")[0]
        try:
            card = read_json(self.folder / f"run_{run_id}.json")
            if not isinstance(card, dict):
                raise UnusableFileError(self.folder / f"run_{run_id}.json", "not a run card")
        except FileNotFoundError:
            return None
        except UnusableFileError as error:
            self.problems.append(f"{error}; tensors of this run are not counted")
            return False
        environment = card.get("environment")
        return isinstance(environment, dict) and environment.get(TOKEN_VARIABLE) == self._token

    def _read(self, index: Path) -> None:
        """Count the tensors in the complete lines appended to an index since it was last read.

        Lines that are not records are skipped.
        """
        try:
            with open_regular(index) as file:
                file.seek(self._offsets[index])
                for length, line in _complete_lines(file):
                    self._offsets[index] += length
                    try:
                        self.tally.add(parse_json(line.decode()))
                    except (ValueError, TypeError):  # The collector did not write this line.
                        continue
        except (OSError, UnusableFileError) as error:
            self._foreign.add(index)
            self.problems.append(f"{error}; its tensors are not counted")


def _complete_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the size in bytes and the content of each remaining complete line of a file.

    The content is empty if the line is longer than `LINE_LIMIT` bytes.
    """
    length, whole = 0, True
    while piece := file.readline(LINE_LIMIT):
        length += len(piece)
        if piece.endswith(b"\n"):
            yield length, piece if whole else b""
            length, whole = 0, True
        else:
            whole = False  # the line is too long, or is still being written
