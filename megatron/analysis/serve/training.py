"""Read what a run writes about its training: loss, gradient norm and tensor statistics.

Sources are TensorBoard's event files, logs with Megatron-LM's lines, the Parquet files of
`--tensor-statistics`, and events in the indexes. Event files and logs are read from where the last
read ended. Files are only read, never locked.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.analysis.dump.loss_curve import loss_curve
from megatron.analysis.dump.tensor_files import reason
from megatron.analysis.statistics_history import (
    has_iterations,
    read_iterations,
    read_statistics,
)
from megatron.bounded_files import (
    UnusableFileError,
    check_regular,
    open_regular,
    walk,
)

#: Names of the scalars that are shown, and their titles.
SCALARS = {
    "lm loss": "Loss",
    "lm loss validation": "Validation loss",
    "grad-norm": "Gradient norm",
    "learning-rate": "Learning rate",
    "iteration-time": "Seconds per iteration",
    "throughput": "TFLOP/s per device",
    "loss-scale": "Loss scale",
    "max_attention_logit": "Largest attention score",
}
SEARCH_PERIOD = 10.0  #: minimum time between two searches for files, in seconds
STEP = 4 << 20  #: maximum number of bytes of a file to read at a time
MOST_FILES = 200  #: maximum number of event files and logs that are followed
MOST_STATISTICS = 256 << 20  #: maximum size of a run's statistics files together, in bytes
MOST_ROWS = 20_000_000  #: maximum number of rows in a run's statistics files together
MOST_VALUES = 1 << 21  #: maximum number of values of a scalar in one series
LONGEST_RECORD = 1 << 30  #: length of a record, in bytes, above which an event file is damaged
_LINE = re.compile(r" iteration +(\d{1,15})/ *(\d{1,15}) \|(.*)")
_IN_LOG = {
    "lm loss": re.compile(r"\| *lm loss: ([-+.\dEeinfa]+)"),
    "grad-norm": re.compile(r"\| *grad norm: ([-+.\dEeinfa]+)"),
    "learning-rate": re.compile(r"\| *learning rate: ([-+.\dEeinfa]+)"),
    "iteration-time": re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)"),
    "throughput": re.compile(r"TFLOP/s/GPU\): ([\d.]+)"),
    "loss-scale": re.compile(r"\| *loss scale: ([\d.]+)"),
}


@dataclass
class Series:
    """Scalars of a run from one source: for each name, the value by iteration."""

    label: str
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    total: int = 0  #: number of iterations of the whole run; 0 if unknown
    changed: float = 0.0  #: time of the last change of the file, in seconds since the epoch

    def add(self, name: str, iteration: int, value: float) -> None:
        """Add a value, or replace the value of an iteration that was repeated."""
        values = self.values.setdefault(name, {})
        if len(values) < MOST_VALUES or iteration in values:
            values[iteration] = value

    def last(self) -> int:
        """Return the last iteration, or 0 if there is none."""
        return max((max(values) for values in self.values.values() if values), default=0)


@dataclass
class _Tail:
    """A file that grows, and how far it has been read."""

    path: str
    series: Series
    offset: int = 0
    rest: bytes = b""
    skip: int = 0  #: number of bytes of a record that is too long to be read
    damaged: bool = False  #: True if nothing more is read

    def add(self, content: bytes) -> None:
        """Add the values in the next bytes of the file."""
        if self.path.endswith(".log"):
            self.rest = _read_log(self.rest + content, self.series)
            return
        self.rest = _read_events(self.rest + content, self.series)
        while (length := _record_length(self.rest)) > STEP:  # such a record has no scalars
            end = length + 16
            self.skip, self.rest = max(end - len(self.rest), 0), self.rest[end:]
            self.damaged = length > LONGEST_RECORD
            self.rest = _read_events(self.rest, self.series)


class Training:
    """Losses, gradient norms and statistics that runs wrote to some folders.

    Args:
        folders: folders to search, the dump first.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = [folder.resolve() for folder in folders]
        self.series: list[Series] = []
        self.statistics: dict[str, pd.DataFrame] = {}  #: statistics of the operands, by folder
        self.version = 0
        self.problems: dict[str, str] = {}  #: reasons why folders with statistics are unusable
        self._tails: dict[str, _Tail] = {}
        self._tables: dict[str, tuple[Any, ...]] = {}
        self._iterations: dict[str, Series] = {}
        self._of_events: dict[str, Series] = {}  #: series from the events, by run
        self._events = 0  #: number of events in the last call
        self._searched = -1e9
        self._statistics_folders: list[Path] = []

    def poll(self, events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Read what was added to the files and the events since the last call.

        Args:
            events: all events in the indexes.
        """
        if time.monotonic() - self._searched > SEARCH_PERIOD:
            self._search()
        changed = self._add_events(events)
        for tail in [*self._tails.values()]:
            with contextlib.suppress(OSError, UnusableFileError):
                changed |= self._read(tail)
        for folder in self._statistics_folders:
            with contextlib.suppress(OSError, UnusableFileError):
                changed |= self._read_statistics(folder)
        if changed:
            tails = [tail.series for tail in self._tails.values() if tail.series.values]
            self.series = sorted(
                [*tails, *self._iterations.values(), *self._of_events.values()],
                key=lambda series: series.changed,
            )
            self.version += 1

    def _add_events(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Add the losses and gradient norms in the events of the indexes."""
        if len(events) == self._events:
            return False
        self._events = len(events)
        found: dict[str, Series] = {}
        for row in loss_curve(events).itertuples():
            series = found.setdefault(row.run_id, Series(f"run {row.run_id}", changed=time.time()))
            for name, value in (("lm loss", row.loss), ("grad-norm", row.grad_norm)):
                if not (math.isnan(value) and row.finite):  # otherwise, the value is unknown
                    series.add(name, int(row.iteration), float(value))
        self._of_events = found
        return bool(found)

    def _search(self) -> None:
        self._searched = time.monotonic()
        statistics = []
        for root in self.folders:
            for parent, folders, names in walk(root, lambda error: None):
                folders[:] = [name for name in folders if not name.startswith(".")]
                if Path(parent).name == "statistics" and any(n.endswith(".parquet") for n in names):
                    statistics.append(Path(parent))
                for name in names:
                    if name.endswith(".log") or "tfevents" in name:
                        self._follow(root, f"{parent}{os.sep}{name}")
        self._statistics_folders = statistics

    def _follow(self, root: Path, path: str) -> None:
        if path in self._tails or len(self._tails) >= MOST_FILES:
            return
        if os.path.islink(path) and not Path(path).resolve().is_relative_to(root):  # noqa: PTH114
            return
        own = Path(path).relative_to(root)
        label = str(own)
        if own.suffix != ".log":  # the name of an event file is long and does not identify a run
            label = f"{own.parent}: event file" if own.parent.name else "event file"
        known = {tail.series.label for tail in self._tails.values()}
        names = [label, *(f"{label} {number}" for number in range(2, MOST_FILES + 1))]
        self._tails[path] = _Tail(path, Series(next(name for name in names if name not in known)))

    def _read(self, tail: _Tail) -> bool:
        with open_regular(tail.path) as file:
            status = os.fstat(file.fileno())
            if status.st_size < tail.offset:
                tail.offset, tail.rest, tail.skip, tail.damaged = 0, b"", 0, False
                tail.series.values.clear()
            if status.st_size <= tail.offset + tail.skip or tail.damaged:
                return False
            tail.offset, tail.skip = tail.offset + tail.skip, 0
            file.seek(tail.offset)
            content = file.read(STEP)
        tail.offset += len(content)
        tail.series.changed = status.st_mtime
        before = tail.series.last(), sum(map(len, tail.series.values.values()))
        tail.add(content)
        return before != (tail.series.last(), sum(map(len, tail.series.values.values())))

    def _read_statistics(self, folder: Path) -> bool:
        """Read the Parquet files of a run again if any were added or changed."""
        files = sorted(folder.glob("*.parquet"))
        if any(path.is_symlink() for path in files):
            return False
        stamp = tuple((path.name, check_regular(path).st_size) for path in files)
        if self._tables.get(str(folder)) == stamp or not files:
            return False
        self._tables[str(folder)] = stamp
        if sum(size for _, size in stamp) > MOST_STATISTICS:
            return False
        series = Series(f"{folder.parent.name} statistics")
        series.changed = max(path.stat().st_mtime for path in files)
        try:
            if sum(map(_rows_of, files)) > MOST_ROWS:
                return False
            if has_iterations(folder):
                for row in read_iterations(folder).itertuples():
                    series.add("lm loss", int(row.iteration), float(row.loss))
                    if row.grad_norm is not None:
                        series.add("grad-norm", int(row.iteration), float(row.grad_norm))
                self._iterations[str(folder)] = series
            self.statistics = {**self.statistics, str(folder): read_statistics(folder)}
        except OSError:
            raise
        except Exception as error:  # a damaged or foreign file may raise any exception
            why = f"its statistics cannot be read ({type(error).__name__}: {reason(error)})"
            self.problems = {**self.problems, str(folder): why}
            return True
        self.problems.pop(str(folder), None)
        return True


def _rows_of(path: Path) -> int:
    """Return the number of rows of a Parquet file."""
    import pyarrow.parquet

    rows: int = pyarrow.parquet.read_metadata(path).num_rows
    return rows


def _read_log(content: bytes, series: Series) -> bytes:
    """Add the values in complete lines of a log; return the rest."""
    *lines, rest = content.split(b"\n")
    for line in lines:
        if b" iteration " not in line or len(line) > 4000:
            continue
        match = _LINE.search(line.decode("utf-8", "replace"))
        if match is None:
            continue
        iteration, series.total = int(match[1]), int(match[2])
        for name, pattern in _IN_LOG.items():
            if found := pattern.search(match[0]):
                with contextlib.suppress(ValueError):
                    value = float(found[1])
                    series.add(name, iteration, value / 1000 if name == "iteration-time" else value)
    return rest[-4096:]


def _read_events(content: bytes, series: Series) -> bytes:
    """Add the values in complete records of an event file; return the rest."""
    from tensorboard.compat.proto.event_pb2 import Event

    position = 0
    for position, record in _event_records(content):  # noqa: B007 # used after the loop
        with contextlib.suppress(Exception):  # a damaged record may raise any exception
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.tag in SCALARS:
                    number = _number(value)
                    if number is not None:
                        series.add(value.tag, int(event.step), number)
    return content[position:]


def _event_records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the end position and the content of each complete record.

    A record is its length (8 bytes), a checksum (4), the content and a checksum (4).
    """
    position = 0
    while position + 12 <= len(content):
        length = _record_length(content, position)
        if length > STEP or position + 16 + length > len(content):
            return
        yield position + 16 + length, content[position + 12 : position + 12 + length]
        position += 16 + length


def _record_length(content: bytes, position: int = 0) -> int:
    """Return the length of the record at a position; 0 if the length field is incomplete."""
    if position + 8 > len(content):
        return 0
    length: int = struct.unpack_from("<Q", content, position)[0]
    return length


def _number(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    if len(tensor.float_val):
        return float(tensor.float_val[0])
    if len(tensor.tensor_content) == 4:
        return float(struct.unpack("<f", tensor.tensor_content)[0])
    return None
