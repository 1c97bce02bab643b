"""From the results of jobs to those of tensors: the engine's book-keeping.

assembly = Assembly(tensors, formats, cache)
for number, result in assembly.results(on_threads(assembly.jobs(), workers)):
    ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.analysis.stats.cache import VALUES, Cache, key_of
from megatron.analysis.stats.logical import Found, Logical, Part, Place, put_together
from megatron.analysis.stats.values import Values
from megatron.analysis.stats.work import Failure, Job, Outcome, read_outcome


class Assembly:
    """Which results are there, which are to be computed, and to which tensor each belongs."""

    def __init__(self, tensors: Sequence[Logical], formats: Sequence[str], cache: Cache | None):
        self.tensors, self.formats, self.cache = tensors, formats, cache
        self._place: list[tuple[int, Place]] = []  # by the job's number
        self._keys: list[str | None] = []
        self._held: list[dict[str, bytes]] = []
        self._measured: dict[int, dict[Place, tuple[Values, Found]]] = {}
        self._complete: list[tuple[int, Place, dict[str, bytes]]] = []
        self._failed: set[int] = set()

    def jobs(self) -> list[Job]:
        """What is not in the cache."""
        jobs = []
        for number, tensor in enumerate(self.tensors):
            for place, part in tensor.parts.items():
                key, held = self._look_up(part)
                missing = tuple(name for name in self.formats if name not in held)
                if not missing and VALUES in held:
                    self._complete.append((number, place, held))
                else:
                    jobs.append(Job(len(self._place), part, missing))
                    self._place.append((number, place))
                    self._keys.append(key)
                    self._held.append(held)
        return jobs

    def _look_up(self, part: Part) -> tuple[str | None, dict[str, bytes]]:
        if self.cache is None:
            return None, {}
        try:
            key = key_of(part)
        except OSError:  # a file that is gone: the job says so
            return None, {}
        return key, self.cache.get(key)

    def results(
        self, outcomes: Iterator[tuple[int, Outcome]]
    ) -> Iterator[tuple[int, tuple[Values, Found] | Failure]]:
        """Tensors by number as they are complete, one time each; and each file that could not be
        read, with the number of its tensor, which may be complete without.
        """
        for number, place, held in self._complete:
            yield from self._add(number, place, held)
        for job, outcome in outcomes:
            number, place = self._place[job]
            yield from ((number, failure) for failure in outcome.failures)
            if not outcome.contents:
                self._failed.add(number)
                continue
            key = self._keys[job]
            # a file that cannot be read is said by every call: nothing is kept that would hide it
            if self.cache is not None and key is not None and not outcome.failures:
                self.cache.put(key, outcome.contents.items())
            yield from self._add(number, place, self._held[job] | outcome.contents)

    def _add(
        self, number: int, place: Place, contents: dict[str, bytes]
    ) -> Iterator[tuple[int, tuple[Values, Found] | Failure]]:
        if number in self._failed:
            return
        measured = self._measured.setdefault(number, {})
        measured[place] = read_outcome(contents, self.formats)
        tensor = self.tensors[number]
        if len(measured) < len(tensor.parts):
            return
        try:
            yield number, put_together(tensor, self._measured.pop(number))
        except ValueError as error:  # files of several tensors under one record
            path = tensor.row.path
            yield number, Failure(path, f"its shards do not fit together ({error})")
