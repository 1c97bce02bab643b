"""Merge the statistics of tensor parts, cached or computed, into statistics of whole tensors.

Example:

    merger = ResultMerger(tensors, formats, cache)
    for number, result in merger.results(on_threads(merger.jobs(), workers)):
        ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from megatron.analysis.stats.cache import Cache, Entry
from megatron.analysis.stats.errors import FormatErrors
from megatron.analysis.stats.jobs import Failure, Job, JobResult, measure_job, unpack_result
from megatron.analysis.stats.logical_tensors import LogicalTensor, Part, ShardIndex, merge_parts
from megatron.analysis.stats.serialization import VALUES
from megatron.analysis.stats.values import Values

#: Identity of a tensor part: number of its tensor, index within the tensor, and cache entry.
PartKey = tuple[int, ShardIndex, Entry | None]
#: Number of a tensor, and either its statistics or the file that could not be measured.
TensorResult = tuple[int, tuple[Values, FormatErrors] | Failure]


class ResultMerger:
    """Helper that merges the statistics of tensor parts, which jobs compute or the cache supplies.

    The results of a tensor are merged as soon as the results of all its parts are available.
    """

    def __init__(
        self, tensors: Sequence[LogicalTensor], formats: Sequence[str], cache: Cache | None
    ):
        self.tensors, self.formats, self.cache = tensors, formats, cache
        self._wanted = {VALUES, *formats}
        self._jobs: list[PartKey] = []  # tensor part that each job measures, by job number
        self._cached: list[PartKey] = []  # tensor parts whose results are all cached
        self._measured: dict[int, dict[ShardIndex, tuple[Values, FormatErrors]]] = {}
        self._failed: set[int] = set()

    def jobs(self) -> list[Job]:
        """Return one job for each tensor part for which the cache lacks results."""
        jobs = []
        for number, tensor in enumerate(self.tensors):
            for index, part in tensor.parts.items():
                entry = self._entry(part)
                cached = self.cache.names(entry) if self.cache and entry else set()
                if self._wanted <= cached:
                    self._cached.append((number, index, entry))
                    continue
                missing = tuple(name for name in self.formats if name not in cached)
                jobs.append(Job(len(self._jobs), part, missing))
                self._jobs.append((number, index, entry))
        return jobs

    def _unpack(
        self, contents: dict[str, bytes], *, from_cache: bool
    ) -> tuple[Values, FormatErrors] | None:
        """Deserialize the statistics of a part; return None if its cache entry was damaged."""
        try:
            return unpack_result(contents, self.formats)
        except (ValueError, TypeError, IndexError, StopIteration, MemoryError, struct.error):
            if not from_cache:  # the contents come from a job, so the error is a bug
                raise
            return None

    def _entry(self, part: Part) -> Entry | None:
        try:
            return self.cache.entry(part) if self.cache is not None else None
        except OSError:  # a file is missing; the job will report this
            return None

    def results(self, job_results: Iterator[tuple[int, JobResult]]) -> Iterator[TensorResult]:
        """Yield each tensor's statistics when all its parts are measured, and each unreadable file.

        A tensor with an unreadable file may still yield a result, because a replica can replace the
        file.
        """
        for key in self._cached:
            yield from self._add(key, JobResult({}, ()))
        for job, result in job_results:
            yield from self._add(self._jobs[job], result)

    def _add(self, key: PartKey, result: JobResult) -> Iterator[TensorResult]:
        number, index, entry = key
        yield from ((number, failure) for failure in result.failures)
        if result.failures and not result.contents:
            self._failed.add(number)
            return
        contents = result.contents
        if self.cache is not None and entry is not None:
            # a result with failures is not cached, so that every call reports the unreadable file
            if contents and not result.failures:
                self.cache.put(entry, contents)
            if not self._wanted <= contents.keys():
                contents = self.cache.get(entry) | contents
        tensor, statistics = self.tensors[number], None
        if self._wanted <= contents.keys():
            statistics = self._unpack(contents, from_cache=entry is not None)
            contents = contents if statistics is not None else {}
        if missing := self._wanted - contents.keys():
            # the cached entry is damaged, or another process deleted it
            formats = tuple(name for name in self.formats if name in missing)
            again = measure_job(Job(0, tensor.parts[index], formats))
            complete = contents | again.contents if again.contents else {}
            yield from self._add(key, JobResult(complete, again.failures))
            return
        if number in self._failed:
            return
        measured = self._measured.setdefault(number, {})
        assert statistics is not None
        measured[index] = statistics
        if len(measured) < len(tensor.parts):
            return
        try:
            yield number, merge_parts(tensor, self._measured.pop(number))
        except ValueError as error:  # the records of one tensor refer to files of several tensors
            path = tensor.row.path
            yield number, Failure(path, f"its shards do not fit together ({error})")
