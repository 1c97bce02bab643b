"""Summarize the results of a comparison as counts, extremes and lists of bounded length."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.analysis.diff.comparison import (
    DIFFERENT,
    ONLY_A,
    ONLY_B,
    UNREADABLE,
    Result,
    Rules,
)

LISTED = 10  #: maximum number of results in each list


@dataclass
class Group:
    """Counts and largest errors of the results of one layer and operation, or of one iteration."""

    tensors: int = 0
    #: Number of tensors that differ by more than the tolerances allow or cannot be compared.
    different: int = 0
    error: float = 0.0  #: largest relative error
    largest: Result | None = None  #: result with the largest relative error
    local: float = math.nan  #: largest local error
    most_local: Result | None = None

    def add(self, result: Result) -> None:
        """Add the result of a pair."""
        self.tensors += 1
        self.different += result.status in (DIFFERENT, UNREADABLE)
        if result.difference is not None and result.difference.unequal:
            error = result.difference.relative_error
            if self.largest is None or error > self.error:
                self.error, self.largest = error, result
        local = local_error(result)
        if not math.isnan(local) and not local <= self.local:
            self.local, self.most_local = local, result


def local_error(result: Result) -> float:
    """Return the local part of a result's difference, or NaN if it is unknown."""
    if result.origin is None or result.origin.unknown:
        return math.nan
    return result.origin.local


@dataclass(frozen=True, slots=True)
class Point:
    """Relative error of a tensor, which the figure shows as a point."""

    position: int
    operation: str
    layer_idx: int | None
    layer_type: str
    module: str | None
    tensor_name: str
    error: float
    local: float  #: local error; NaN if it is unknown

    def is_same_tensor(self, other: Point) -> bool:
        """Return whether two points are about the same tensor, possibly on different ranks."""
        names = ("operation", "module", "tensor_name")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass
class Summary:
    """Counts, extremes and short lists of the results of a comparison."""

    rules: Rules
    counts: Counter[str] = field(default_factory=Counter)  #: number of results by status
    first: Result | None = None  #: first pair that differs or cannot be compared
    first_alone: Result | None = None  #: first record that only one run has
    #: First pairs that differ or cannot be compared, at most `LISTED`.
    different: list[Result] = field(default_factory=list)
    #: First records that only one run has, at most `LISTED`.
    alone: list[Result] = field(default_factory=list)
    #: Number of records that only one run has, by iteration and status.
    alone_by_iteration: Counter[tuple[Any, str]] = field(default_factory=Counter)
    #: First pairs that cannot be compared, at most `LISTED`.
    unreadable: list[Result] = field(default_factory=list)
    #: First pass, as (iteration, micro-batch), in which any value differs; None if there is none.
    first_pass: tuple[Any, Any] | None = None
    #: Results of `first_pass`, grouped by operation and layer.
    layers: dict[tuple[str, int | None], Group] = field(default_factory=dict)
    iterations: dict[Any, Group] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)  #: pairs of `first_pass`
    unknown: Counter[str] = field(default_factory=Counter)  #: number of unknown origins, by reason
    _current: tuple[Any, Any] | None = None  #: pass of the latest result
    _local: list[tuple[float, int, Result]] = field(default_factory=list)  #: largest local errors

    @property
    def agrees(self) -> bool:
        """True if no result counts as a difference between the runs."""
        return not any(self.rules.fails(status) and n for status, n in self.counts.items())

    @property
    def pairs(self) -> int:
        """Number of pairs of tensors, including those that cannot be compared."""
        return sum(self.counts.values()) - self.counts[ONLY_A] - self.counts[ONLY_B]

    @property
    def most_local(self) -> list[Result]:
        """Results with the largest local errors, the largest first."""
        return [result for _, _, result in sorted(self._local, reverse=True)]

    def follow(self, results: Iterable[Result]) -> Iterator[Result]:
        """Add each result to the summary, and yield it."""
        for number, result in enumerate(results):
            self.add(result, number)
            yield result

    def add(self, result: Result, number: int) -> None:
        """Add a result; `number` counts the results from 0."""
        self.counts[result.status] += 1
        if result.status in (ONLY_A, ONLY_B):
            self.alone_by_iteration[result.key.iteration, result.status] += 1
            self.first_alone = self.first_alone or result
            _append(self.alone, result)
            return
        if self.rules.fails(result.status):
            self.first = self.first or result
            _append(self.different, result)
        if result.status == UNREADABLE:
            _append(self.unreadable, result)
        if result.origin is not None and result.origin.unknown:
            self.unknown[result.origin.unknown] += 1
        local = local_error(result)
        if local > 0:
            heapq.heappush(self._local, (local, -number, result))
            if len(self._local) > LISTED:
                heapq.heappop(self._local)
        self.iterations.setdefault(result.key.iteration, Group()).add(result)
        self._add_to_pass(result)

    def _add_to_pass(self, result: Result) -> None:
        """Add a result to `layers` and `points`, which describe the first pass that differs."""
        key = result.key
        of_pass = (key.iteration, result.row.micro_batch)
        if self.first_pass is None and of_pass != self._current:
            self.layers.clear()
            self.points.clear()
        self._current = of_pass
        if self.first_pass not in (None, of_pass):
            return
        difference = result.difference
        if difference is None:
            return
        if difference.unequal:
            self.first_pass = of_pass
        operation = str(key.operation)
        self.layers.setdefault((operation, key.layer_idx), Group()).add(result)
        point = Point(
            result.position,
            operation,
            key.layer_idx,
            str(key.layer_type),
            key.module,
            str(key.tensor_name),
            difference.relative_error,
            local_error(result),
        )
        if self.points and point.is_same_tensor(self.points[-1]):
            last = self.points.pop()
            known = [local for local in (last.local, point.local) if not math.isnan(local)]
            point = replace(
                last, error=max(last.error, point.error), local=max(known, default=math.nan)
            )
        self.points.append(point)


def _append(results: list[Result], result: Result) -> None:
    if len(results) < LISTED:
        results.append(result)
