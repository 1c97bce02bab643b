"""Select the iterations to collect, as windows such as 100-200:10 (first, last, step).

Iterations are numbered as in the log: the first iteration of the run is 1, and a resumed run
continues the numbering. A window includes both of its ends, and its steps are counted from its
first iteration, not from 0. For example, `--collect-start 100 --collect-every 50` is equivalent to
`--collect-iterations 100-:50` and selects 100, 150, 200 and so on.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ENDLESS = sys.maxsize


@dataclass(frozen=True, slots=True)
class Iterations:
    """Set of iterations, stored as non-overlapping windows in ascending order."""

    windows: tuple[range, ...] = (range(1, ENDLESS),)
    source: str = ""  #: flags that define the windows, for messages; empty by default

    def __contains__(self, iteration: int) -> bool:
        return any(iteration in window for window in self.windows)

    def after(self, done: int) -> "Iterations":
        """Return the selected iterations that follow iteration `done`."""
        remaining = []
        for window in self.windows:
            passed = max(0, -(-(done + 1 - window.start) // window.step))
            if rest := window[passed:]:
                remaining.append(rest)
        return Iterations(tuple(remaining), self.source)

    def until(self, last: int) -> "Iterations":
        """Return the selected iterations up to and including `last`."""
        cut = (range(w.start, min(w.stop, last + 1), w.step) for w in self.windows)
        return Iterations(tuple(filter(None, cut)), self.source)

    def count(self) -> int | None:
        """Return the number of selected iterations; None if it is unlimited."""
        if any(window.stop >= ENDLESS for window in self.windows):
            return None
        return sum(map(len, self.windows))

    def __iter__(self) -> Iterator[int]:
        for window in self.windows:
            yield from window

    @classmethod
    def parse(cls, spec: str | None, start: int | None, every: int | None) -> "Iterations":
        """Parse --collect-iterations (`spec`) or, without it, --collect-start and --collect-every.

        Raises:
            ValueError: if a value is invalid, the windows overlap or are not in ascending order, or
                --collect-iterations is combined with one of the other flags.
        """
        if spec is None:
            return cls._from_counts(start, every)
        if start is not None or every is not None:
            other = "--collect-start" if start is not None else "--collect-every"
            raise ValueError(
                f"--collect-iterations {spec} and {other} both select iterations; give one of "
                "them (N-:K is every K-th iteration from N on)"
            )
        windows: list[range] = []
        for part in spec.split(","):
            window = _window(part.strip(), spec)
            if windows and window.start <= windows[-1][-1]:
                raise ValueError(
                    f"--collect-iterations {spec}: {part.strip()} begins before the end of "
                    "the previous window; give windows in ascending order that do not overlap"
                )
            windows.append(window)
        return cls(tuple(windows), f"--collect-iterations {spec}")

    @classmethod
    def _from_counts(cls, start: int | None, every: int | None) -> "Iterations":
        given = {"--collect-start": start, "--collect-every": every}
        for flag, value in given.items():
            if value is not None and value < 1:
                raise ValueError(f"{flag} is {value}; give 1 or more (the first iteration is 1)")
        named = (f"{flag} {value}" for flag, value in given.items() if value is not None)
        return cls((range(start or 1, ENDLESS, every or 1),), " ".join(named))


def _window(part: str, spec: str) -> range:
    """Parse one window of iterations: `7`, `1-3`, `100-` or `100-200:10`."""
    match = re.fullmatch(r"(\d+)(-(\d+)?)?(?::(\d+))?", part)
    if match is None or (match[4] and not match[2]):
        raise ValueError(
            f"--collect-iterations {spec}: {part!r} is not understood; give iterations and "
            "windows such as 7, 1-3, 100- or 100-200:10 (every 10th), with commas between"
        )
    first, step = int(match[1]), int(match[4] or 1)
    last = first if not match[2] else int(match[3]) if match[3] else ENDLESS - 1
    if first < 1 or last < first or step < 1:
        raise ValueError(
            f"--collect-iterations {spec}: {part} contains no iteration; the first is 1, and a "
            "window goes from the lower to the higher number"
        )
    return range(first, last + 1, step)


def how_many(control_iter: int | None, iterations: Iterations, done: int) -> int:
    """Return the number of iterations to collect before training stops; 0 for no limit.

    Args:
        control_iter: requested number; None stands for all iterations that --collect-iterations
            selects, or for 1 without that flag.
        iterations: the selected iterations.
        done: number of iterations completed before this run.

    Raises:
        ValueError: if fewer than `control_iter` iterations are selected.
    """
    remaining = iterations.after(done).count()
    if control_iter is None:
        return (remaining or 0) if iterations.source.startswith("--collect-iterations") else 1
    named = iterations.count()
    if named is not None and named < control_iter:
        raise ValueError(
            f"--control-iter {control_iter} is never reached: {iterations.source} selects {named} "
            "iteration(s); lower --control-iter, or leave it out to collect all of them"
        )
    # If this run resumes another, the earlier run collected the selected iterations up to `done`.
    return min(control_iter, remaining) if remaining else control_iter


def check_in_run(
    iterations: Iterations, control_iter: int, done: int, train_iters: int | None
) -> None:
    """Raise ValueError if training would end before the requested iterations are collected.

    Args:
        iterations: the selected iterations.
        control_iter: number of iterations to collect; 0 for no limit.
        done: number of iterations completed before this run.
        train_iters: last iteration of the run, if known.

    Raises:
        ValueError: if the run trains none of the selected iterations, or fewer than `control_iter`
            of them.
    """
    if train_iters is not None and done >= train_iters:
        return
    trained = iterations.after(done)
    trained = trained if train_iters is None else trained.until(train_iters)
    count = trained.count()
    if count == 0:
        end = "on" if train_iters is None else f"to {train_iters}"
        raise ValueError(
            f"{iterations.source} selects none of the iterations of this run, {done + 1} {end}; "
            "select some of these, or raise --train-iters"
        )
    if count is None or count >= control_iter:
        return
    # Count the selected iterations up to `done` as well: if this run resumes another, the earlier
    # run may have collected them.
    whole = iterations if train_iters is None else iterations.until(train_iters)
    named = whole.count()
    if named is not None and named < control_iter:
        if not iterations.source:
            raise ValueError(
                f"--control-iter {control_iter} is more than the {named} iteration(s) of a run "
                f"to --train-iters {train_iters}; lower --control-iter, or raise --train-iters"
            )
        raise ValueError(
            f"{iterations.source} selects {named} of the iterations 1 to {train_iters}, fewer than "
            f"the {control_iter} to collect; raise --train-iters, or give --control-iter {named}"
        )
