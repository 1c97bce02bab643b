"""Show the live progress of a collection, the end of its log, and the final report.

On a terminal, progress is shown as a bar; in a file or a pipe, as one line every few seconds. The
bar needs tqdm; everything else uses only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from index_follower import Tally
from megatron.bounded_files import printable

EVERY = 5.0  #: time in seconds between two progress lines if there is no terminal
QUIET = 30.0  #: time in seconds between two progress lines while no tensors are written
TAIL = 1 << 16  #: number of bytes at the end of the log that are searched for errors
PIECE = 1 << 20  #: maximum number of bytes of the log that are read at a time
WIDEST = 4096  #: maximum number of characters of a log line that are shown
REMOVED = " (it was removed during the run)"  #: suffix for a removed log's path
SHOWN = 15  #: maximum number of lines of the log that are shown after a failure


class LogFile:
    """Log file to which the command appends; it stays readable after it is removed."""

    def __init__(self, path: Path):
        self.path = path
        self._log = path.open("rb")
        self._offset = 0

    def size(self) -> int:
        """Return the size of the log in bytes."""
        return os.fstat(self._log.fileno()).st_size

    def is_there(self) -> bool:
        """Return whether the log still exists at its path."""
        try:
            return self.path.stat().st_ino == os.fstat(self._log.fileno()).st_ino
        except OSError:
            return False

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines that were appended to the log since the last call."""
        end = self.size()
        if end < self._offset:  # The log was truncated, for instance by log rotation.
            self._offset = 0
        while self._offset < end:
            self._log.seek(self._offset)
            text = self._log.read(min(PIECE, end - self._offset))
            complete = text[: text.rfind(b"\n") + 1]
            if not complete and len(text) < PIECE:
                return
            complete = complete or text  # a part of a line that is longer than PIECE
            self._offset += len(complete)
            yield from _shown_lines(complete)

    def end(self) -> list[str]:
        """Return the nonempty lines in the last `TAIL` bytes of the log."""
        self._log.seek(max(self._log.seek(0, 2) - TAIL, 0))
        return [line.rstrip() for line in _shown_lines(self._log.read(TAIL)) if line.strip()]

    def show_end(self, out: TextIO) -> None:
        """Print each distinct error near the end of the log or, without errors, the last lines."""
        lines = self.end()
        errors = [line[line.index("[ERROR]") :] for line in lines if "[ERROR]" in line]
        for line in dict.fromkeys(errors):
            print(line, file=out)
        if not errors:
            print(f"  last lines of {self.path}:", file=out)
            for line in lines[-SHOWN:]:
                print(f"  | {line}", file=out)


def _shown_lines(text: bytes) -> list[str]:
    """Return the lines in a part of the log, with control characters escaped."""
    lines = text.decode(errors="replace").expandtabs().splitlines()
    return [printable(line, limit=WIDEST) for line in lines]


class ProgressLine:
    """Context manager that shows a collection's progress, and closes the progress bar on exit."""

    def __init__(self, name: str, expected: int, log: LogFile, *, verbose: bool):
        self.name = name
        self._expected = expected
        self._log = log
        self._verbose = verbose
        self._started = self._shown = time.monotonic()
        self._tensors = 0
        self._bar: Any = None

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty() and not self._verbose:
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            # Some terminals report a width of 0 columns.
            known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            self._bar = tqdm(
                total=self._expected or None,
                leave=False,
                dynamic_ncols=known,
                ncols=None if known else 80,
                bar_format="{desc} {bar} {elapsed}" if self._expected else "{desc} {elapsed}",
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, tally: Tally) -> None:
        """Show the current counts and, with `--verbose`, the new lines of the log."""
        if self._verbose:
            for line in self._log.new_lines():
                print(line)
            sys.stdout.flush()
        if self._bar is not None:
            # The latest iteration is not counted, because it is complete only when the next begins.
            self._bar.n = max(len(tally.iterations) - 1, 0)
            self._bar.set_description_str(self._line(tally))
            return
        now = time.monotonic()
        if now - self._shown >= (EVERY if tally.tensors > self._tensors else QUIET):
            print(f"[{now - self._started:4.0f} s] {self._line(tally)}", flush=True)
            self._shown, self._tensors = now, tally.tensors

    def _line(self, tally: Tally) -> str:
        if not tally.tensors:
            line = next(reversed(self._log.end()), "(nothing yet)")
            return f"{self.name}: no tensor yet; last line of the log: {line.strip()[:60]}"
        of = f" of {self._expected}" if self._expected else ""
        return (
            f"{self.name}: iteration {len(tally.iterations)}{of}, {tally.tensors} tensors, "
            f"{size(tally.bytes)}"
        )


def print_report(
    tally: Tally, args: argparse.Namespace, log: LogFile, seconds: float, out: TextIO | None = None
) -> None:
    """Print the counts of a finished collection and the paths of its tensors and its log.

    Args:
        seconds: duration of the run in seconds.
        out: file to print to; None prints to standard output.
    """
    lines = [f"{args.name}: {tally.tensors} tensors, {size(tally.bytes)}, in {seconds:.1f} s"]
    if tally.tensors:
        lines += [
            f"  {name:<10} "
            + ", ".join(f"{key} {n}" for key, n in sorted(tally.counts[name].items()))
            for name in ("phase", "component", "operation")
        ]
        lines.append(f"  {'layer':<10} {layers(tally)}")
        lines.append(f"  {'iteration':<10} {ranges(tally.iterations)}")
        if len(tally.ranks) > 1:
            lines.append(f"  {'rank':<10} {ranges(tally.ranks)}")
        lines.append(f"  {'run':<10} {', '.join(sorted(tally.runs))}")
        lines.append(f"  {'folder':<10} {args.tensor_dir}")
        if args.next:
            lines.append(f"  {'next':<10} {args.next}")
    if tally.dropped:
        lines.append(f"  {'left out':<10} {tally.dropped} tensors, {size(tally.dropped_bytes)}")
    lines += [f"  {'kept':<10} {why}" for why in sorted(tally.kept)]
    lines += [f"  {'not kept':<10} the ring at {why}" for why in sorted(tally.let_go)]
    if args.may_be_empty and not tally.tensors:
        lines.append(f"  {'empty':<10} no event triggered the collection")
    if statistics := written_statistics(args.tensor_dir, since=time.time() - seconds):
        look = shlex.join(["python", "-m", "megatron.analysis", "history", str(statistics)])
        lines.append(f"  {'statistics':<10} {look}")
    lines.append(f"  {'log':<10} {log.path}{'' if log.is_there() else REMOVED}")
    print("\n".join(lines), file=out, flush=True)


def written_statistics(tensor_dir: Path, *, since: float) -> Path | None:
    """Return the folder of `--tensor-statistics` if a file in it was written after `since`."""
    folder = tensor_dir / "statistics"
    for path in folder.glob("*.parquet"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.stat().st_mtime >= since:
                return folder
    return None


def layers(tally: Tally) -> str:
    """Return the number of tensors per layer as text; group adjacent layers with equal counts."""
    counts = sorted(tally.counts["layer_idx"].items())
    parts = []
    for (number, _), group in groupby(
        enumerate(counts), key=lambda item: (item[1][1], item[1][0] - item[0])
    ):
        members = [layer for _, (layer, _) in group]
        each = " each" if len(members) > 1 else ""
        parts.append(f"{ranges(members)}: {number}{each}")
    return ", ".join(parts)


def ranges(numbers: Any) -> str:
    """Return text that lists the sorted numbers, with consecutive numbers as `first-last`."""
    parts = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        members = [number for _, number in group]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


def size(count: float) -> str:
    """Return a number of bytes as text, with three significant digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
