"""From the results of jobs to those of tensors: the engine's book-keeping.

assembly = ResultMerger(tensors, formats, cache)
for number, result in assembly.results(on_threads(assembly.jobs(), workers)):
    ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from megatron.analysis.stats.cache import Cache, Entry
from megatron.analysis.stats.jobs import Failure, Job, JobResult, measure_job, read_outcome
from megatron.analysis.stats.logical_tensors import (
    FormatErrors,
    LogicalTensor,
    Part,
    ShardIndex,
    put_together,
)
from megatron.analysis.stats.serialization import VALUES
from megatron.analysis.stats.values import Values

Where = tuple[int, ShardIndex, Entry | None]  #: tensor, part, and what it is kept under
PartResult = tuple[int, tuple[Values, FormatErrors] | Failure]


class ResultMerger:
    """Which results are there, which are to be computed, and to which tensor each belongs."""

    def __init__(
        self, tensors: Sequence[LogicalTensor], formats: Sequence[str], cache: Cache | None
    ):
        self.tensors, self.formats, self.cache = tensors, formats, cache
        self._wanted = {VALUES, *formats}
        self._jobs: list[Where] = []  # by the job's number
        self._kept: list[Where] = []  # all there: read when their turn comes
        self._measured: dict[int, dict[ShardIndex, tuple[Values, FormatErrors]]] = {}
        self._failed: set[int] = set()

    def jobs(self) -> list[Job]:
        """What is not in the cache."""
        jobs = []
        for number, tensor in enumerate(self.tensors):
            for place, part in tensor.parts.items():
                entry = self._entry(part)
                there = self.cache.names(entry) if self.cache and entry else set()
                if self._wanted <= there:
                    self._kept.append((number, place, entry))
                    continue
                missing = tuple(name for name in self.formats if name not in there)
                jobs.append(Job(len(self._jobs), part, missing))
                self._jobs.append((number, place, entry))
        return jobs

    def _read(
        self, contents: dict[str, bytes], *, kept: bool
    ) -> tuple[Values, FormatErrors] | None:
        """Return the statistics that the bytes hold; None if a cached entry is damaged."""
        try:
            return read_outcome(contents, self.formats)
        except (ValueError, TypeError, IndexError, StopIteration, MemoryError, struct.error):
            if not kept:  # just computed, so this is a bug of this program
                raise
            return None

    def _entry(self, part: Part) -> Entry | None:
        try:
            return self.cache.entry(part) if self.cache is not None else None
        except OSError:  # a file that is gone: the job says so
            return None

    def results(self, outcomes: Iterator[tuple[int, JobResult]]) -> Iterator[PartResult]:
        """Tensors by number as they are complete, one time each; and each file that could not be
        read, with the number of its tensor, which may be complete without.
        """
        for where in self._kept:
            yield from self._add(where, JobResult({}, ()))
        for job, outcome in outcomes:
            yield from self._add(self._jobs[job], outcome)

    def _add(self, where: Where, outcome: JobResult) -> Iterator[PartResult]:
        number, place, entry = where
        yield from ((number, failure) for failure in outcome.failures)
        if outcome.failures and not outcome.contents:
            self._failed.add(number)
            return
        contents = outcome.contents
        if self.cache is not None and entry is not None:
            # a file that cannot be read is said by every call: nothing is kept that would hide it
            if contents and not outcome.failures:
                self.cache.put(entry, contents)
            if not self._wanted <= contents.keys():
                contents = self.cache.get(entry) | contents
        tensor, read = self.tensors[number], None
        if self._wanted <= contents.keys():
            read = self._read(contents, kept=entry is not None)
            contents = contents if read is not None else {}
        if missing := self._wanted - contents.keys():
            # it was there, and is damaged, or another process threw it away
            formats = tuple(name for name in self.formats if name in missing)
            again = measure_job(Job(0, tensor.parts[place], formats))
            whole = contents | again.contents if again.contents else {}
            yield from self._add(where, JobResult(whole, again.failures))
            return
        if number in self._failed:
            return
        measured = self._measured.setdefault(number, {})
        assert read is not None
        measured[place] = read
        if len(measured) < len(tensor.parts):
            return
        try:
            yield number, put_together(tensor, self._measured.pop(number))
        except ValueError as error:  # files of several tensors under one record
            path = tensor.row.path
            yield number, Failure(path, f"its shards do not fit together ({error})")
