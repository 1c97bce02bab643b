"""`compute`: from records to tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from megatron.analysis.stats.cache import VALUES, Cache, key_of
from megatron.analysis.stats.frames import Frames, arrays_of
from megatron.analysis.stats.logical import Found, Logical, Place, logical_tensors, put_together
from megatron.analysis.stats.plan import make_plan
from megatron.analysis.stats.pool import affordable, on_cluster, on_threads
from megatron.analysis.stats.result import Statistics, TensorArrays
from megatron.analysis.stats.values import Values
from megatron.analysis.stats.work import Failure, Job, Outcome, measure_job, read_outcome
from megatron.analysis.store import TensorStore
from megatron.analysis.tensor_files import Problem, UnreadableTensorError

_STRICT = "remove the file, or leave --strict out"
_NO_FORMATS_OF = "no format is computed of {dtype} values"


def compute(
    store: TensorStore,
    formats: Sequence[str] = (),
    *,
    select: pd.DataFrame | None = None,
    workers: int | None = None,
    max_memory: int | None = None,
    scheduler: str | None = None,
    cache: Path | None = None,
    strict: bool = False,
    progress: bool = False,
) -> Statistics:
    """Statistics of the tensors of a dump, each file read once.

    Args:
        formats: names of `megatron.fake_quant`; none: of the values only.
        select: a part of `store.records`, as `store.select` gives it; all if None.
        workers: threads; as many as there are processors if None.
        max_memory: bytes that this process may use; fewer threads if need be.
        scheduler: address of a Dask scheduler, whose workers see the dump under the same path.
        cache: a folder for results, from which a second call takes them; None: nothing is kept.
        strict: raise for the first file that cannot be read, instead of listing it in `problems`.
        progress: show a bar on a terminal.

    Raises:
        ValueError: an unknown format, or too little memory.
        UnreadableTensorError: under `strict`, a file that cannot be read.
    """
    names = make_plan(formats).names
    workers = affordable(workers, max_memory)
    records = store.records if select is None else select
    tensors = list(logical_tensors(records))
    problems = list(store.problems)
    if strict and problems:
        first = problems[0]
        raise UnreadableTensorError(first.path, f"{first.why}; {_STRICT}")
    frames = Frames()
    # a terminal gets a bar; a log gets nothing
    bar = tqdm(
        total=len(tensors), desc="Measuring", unit="tensor", leave=False,
        disable=None if progress else True,
    )  # fmt: skip
    with bar, closing(Cache(cache)) if cache is not None else nullcontext() as kept:
        work = _Work(tensors, names, kept)
        jobs = work.jobs()
        outcomes = on_cluster(jobs, scheduler) if scheduler else on_threads(jobs, workers)
        for number, result in work.results(outcomes):
            bar.update()
            if isinstance(result, Failure):
                problem = Problem(Path(result.path), result.why)
                if strict:
                    raise UnreadableTensorError(problem.path, f"{problem.why}; {_STRICT}")
                problems.append(problem)
                continue
            frames.add(number, tensors[number], *result, _note(tensors[number], names, result[1]))
    table, of_formats, numbers = frames.tables()

    def load_arrays(tensor: int) -> TensorArrays:
        return _arrays(tensors[numbers[tensor]], names, cache)

    return Statistics(table, of_formats, problems, load_arrays)


class _Work:
    """Which results are there, which are to be computed, and to which tensor each belongs."""

    def __init__(self, tensors: Sequence[Logical], formats: Sequence[str], cache: Cache | None):
        self.tensors, self.formats, self.cache = tensors, formats, cache
        self._place: list[tuple[int, Place]] = []  # by the job's number
        self._keys: list[str | None] = []
        self._held: list[dict[str, bytes]] = []
        self._measured: dict[int, dict[Place, tuple[Values, Found]]] = {}
        self._complete: list[tuple[int, Place, dict[str, bytes]]] = []
        self._failed: dict[int, Failure] = {}

    def jobs(self) -> list[Job]:
        """What is not in the cache."""
        jobs = []
        for number, tensor in enumerate(self.tensors):
            for place, part in tensor.parts.items():
                key, held = self._look_up(number, tensor, place)
                missing = tuple(name for name in self.formats if name not in held)
                if not missing and VALUES in held:
                    self._complete.append((number, place, held))
                elif number not in self._failed:
                    jobs.append(Job(len(self._place), part, missing))
                    self._place.append((number, place))
                    self._keys.append(key)
                    self._held.append(held)
        return jobs

    def _look_up(
        self, number: int, tensor: Logical, place: Place
    ) -> tuple[str | None, dict[str, bytes]]:
        if self.cache is None:
            return None, {}
        part = tensor.parts[place]
        try:
            key = key_of(part)
        except OSError as error:
            self._failed[number] = Failure(part.paths[0], error.strerror or str(error))
            return None, {}
        return key, self.cache.get(key)

    def results(
        self, outcomes: Iterator[tuple[int, Outcome]]
    ) -> Iterator[tuple[int, tuple[Values, Found] | Failure]]:
        """Tensors by number as they are complete, one time each."""
        yield from self._failed.items()
        for number, place, held in self._complete:
            yield from self._add(number, place, held)
        for job, outcome in outcomes:
            number, place = self._place[job]
            if isinstance(outcome, Failure):
                if number not in self._failed:
                    self._failed[number] = outcome
                    yield number, outcome
                continue
            key = self._keys[job]
            if self.cache is not None and key is not None:
                self.cache.put(key, outcome.items())
            yield from self._add(number, place, self._held[job] | outcome)

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


def _note(tensor: Logical, formats: Sequence[str], found: Found) -> str:
    notes = [tensor.note] if tensor.note else []
    if formats and not found and tensor.row.slice is None:
        notes.append(_NO_FORMATS_OF.format(dtype=tensor.row.dtype))
    return "; ".join(notes)


def _arrays(tensor: Logical, formats: Sequence[str], cache: Path | None) -> TensorArrays:
    """From the cache, else computed."""
    with closing(Cache(cache)) if cache is not None else nullcontext() as kept:
        work = _Work([tensor], formats, kept)
        outcomes = ((job.number, measure_job(job)) for job in work.jobs())
        for _, result in work.results(outcomes):
            if isinstance(result, Failure):
                raise ValueError(f"{result.path}: {result.why}")
            return arrays_of(*result)
    raise AssertionError("a tensor without parts")
