"""Report the progress of long work on standard error: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Protocol, TypeVar

from tqdm import tqdm

PERIOD = 10.0  #: seconds between two lines of progress if the output is not a terminal
QUIET = 25.0  #: seconds after which a line is printed although no unit was completed
#: time after the first completed unit, in seconds, within which units count as one batch
BURST = 0.5

T = TypeVar("T")


class SizedIterable(Sized, Iterable[T], Protocol[T]):  # type: ignore[misc]
    """A collection of known length."""


class Progress:
    """Count completed units of work, and report how many are done and the time left.

    Use it in a `with` statement. The first line is printed after `PERIOD` seconds, so short work
    prints nothing. The estimate begins after the first unit, which may include the compilation of
    kernels. A unit that takes long does not leave a log silent, because a thread reports it.
    """

    def __init__(
        self, total: int, what: str, unit: str, *, shown: bool = True, thread: bool = True
    ) -> None:
        """Prepare a report on `total` units.

        Args:
            total: number of units of work.
            what: name of the work, such as `Measuring`.
            unit: singular of the unit, such as `tensor`.
            shown: whether to report anything.
            thread: whether a thread may report long units; if not, the caller calls `tick`. A
                process that forks during the work must have no such thread.
        """
        self.done = 0  #: number of completed units
        self._total, self._what, self._unit = total, what, unit
        self._bar: tqdm[None] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False)
        self._lines = shown and self._bar is None
        self._start = self._last = time.monotonic()
        #: number of completed units, and the time, from which the rate is estimated; None before
        #: a unit is completed
        self._base: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True) if thread else None

    def __enter__(self) -> Progress:
        if self._lines and self._thread is not None:
            # If no thread can start, lines are printed only when units are completed.
            with contextlib.suppress(RuntimeError):
                self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def _tick(self) -> None:
        while not self._ended.wait(QUIET / 5):
            self.tick()

    def tick(self) -> None:
        """Report that the work continues, unless there was a report in the last `QUIET` seconds."""
        now = time.monotonic()
        if self._lines and now - self._last >= QUIET and self.done < self._total:
            self._print(now)

    def update(self, count: int = 1) -> None:
        """Add `count` completed units, and report the progress if a report is due."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        now = time.monotonic()
        if count and (self._base is None or now - self._base[1] < BURST):
            self._base = (self.done, now if self._base is None else self._base[1])
        if self._lines and count and now - self._last >= PERIOD and self.done < self._total:
            self._print(now)

    def _print(self, now: float) -> None:
        self._last = now
        print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        """Return a line such as "[PROGRESS] Measuring: 40 of 99 tensors, 3.1 per second, ..."."""
        units = f"{self._unit}es" if self._unit.endswith("s") else f"{self._unit}s"
        counted = f"[PROGRESS] {self._what}: {self.done} of {self._total} {units}"
        rate = self._rate(now)
        if not rate:
            return f"{counted} after {now - self._start:.0f} s"
        speed = f"{rate:.3g} per second" if rate >= 1 else f"{1 / rate:.3g} s per {self._unit}"
        return f"{counted}, {speed}, about {(self._total - self.done) / rate:.0f} s left"

    def _rate(self, now: float) -> float:
        """Return the number of units per second; 0 if it is unknown."""
        before, start = self._base or (0, self._start)
        if self.done > before and now > start:
            return (self.done - before) / (now - start)
        return self.done / (now - self._start) if self.done > 1 and now > self._start else 0.0


def with_progress(
    rows: SizedIterable[T], what: str, unit: str, *, shown: bool = True
) -> Iterator[T]:
    """Yield the rows, and report the progress; `Progress` describes the other arguments."""
    with Progress(len(rows), what, unit, shown=shown) as progress:
        for row in rows:
            yield row
            progress.update()
