"""Report the progress of long work on standard error: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Protocol, TypeVar

from tqdm import tqdm

PERIOD = 10.0  #: seconds between two lines of progress if the output is not a terminal

T = TypeVar("T")


class SizedIterable(Sized, Iterable[T], Protocol[T]):  # type: ignore[misc]
    """A collection of known length."""


class Progress:
    """Count completed units of work, and report how many are done and the time left.

    Use it in a `with` statement. The first line is printed after `PERIOD` seconds, so short work
    prints nothing.
    """

    def __init__(self, total: int, what: str, unit: str, *, shown: bool = True) -> None:
        """Prepare a report on `total` units.

        Args:
            total: number of units of work.
            what: name of the work, such as `Measuring`.
            unit: singular of the unit, such as `tensor`.
            shown: whether to report anything.
        """
        self.done = 0  #: number of completed units
        self._total, self._what, self._unit = total, what, unit
        self._bar: tqdm[None] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False)
        self._lines = shown and self._bar is None
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, count: int = 1) -> None:
        """Add `count` completed units, and report them if it is time to."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        now = time.monotonic()
        if self._lines and count and now - self._last >= PERIOD and self.done < self._total:
            print(self._line(now - self._start), file=sys.stderr, flush=True)
            self._last = now

    def _line(self, seconds: float) -> str:
        """Return a line such as "[PROGRESS] Measuring: 40 of 99 tensors, 3.1 per second, ..."."""
        rate = self.done / seconds
        speed = f"{rate:.3g} per second" if rate >= 1 else f"{1 / rate:.3g} s per {self._unit}"
        units = f"{self._unit}es" if self._unit.endswith("s") else f"{self._unit}s"
        return (
            f"[PROGRESS] {self._what}: {self.done} of {self._total} {units}, {speed}, "
            f"about {(self._total - self.done) / rate:.0f} s left"
        )


def with_progress(
    rows: SizedIterable[T], what: str, unit: str, *, shown: bool = True
) -> Iterator[T]:
    """Yield the rows, and report the progress; the arguments are those of `Progress`."""
    with Progress(len(rows), what, unit, shown=shown) as progress:
        for row in rows:
            yield row
            progress.update()
