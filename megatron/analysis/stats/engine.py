"""`compute`: from records to tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError
from megatron.analysis.stats.cache import Cache, opened
from megatron.analysis.stats.executors import affordable, on_cluster, on_threads
from megatron.analysis.stats.format_groups import make_plan
from megatron.analysis.stats.jobs import Failure, measure_job
from megatron.analysis.stats.logical_tensors import (
    NOTE_SEPARATOR,
    FormatErrors,
    LogicalTensor,
    first_passes,
    logical_tensors,
)
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.result import Statistics, TensorArrays
from megatron.analysis.stats.result_columns import ResultColumns, arrays_of
from megatron.analysis.store import TensorStore

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
        scheduler: address of a Dask scheduler, whose workers see the dump under the same path and
            have been told their threads and memory: `workers` and `max_memory` are not theirs.
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
    everything = list(logical_tensors(records, dump=store.records))
    tensors = first_passes(everything)
    problems = list(store.problems)
    if strict and problems:
        first = problems[0]
        raise UnreadableTensorError(first.path, f"{first.why}; {_STRICT}")
    frames, done, failures = ResultColumns(), set(), []
    # a terminal gets a bar; a log gets nothing
    bar = tqdm(
        total=len(tensors),
        desc="Measuring",
        unit="tensor",
        leave=False,
        disable=None if progress else True,
    )
    with bar, opened(cache, store.folder) as kept:
        work = ResultMerger(tensors, names, kept)
        jobs = work.jobs()
        outcomes = on_cluster(jobs, scheduler) if scheduler else on_threads(jobs, workers)
        for number, result in work.results(outcomes):
            done.add(number)
            bar.update(len(done) - bar.n)
            if isinstance(result, Failure):
                if strict:
                    raise UnreadableTensorError(Path(result.path), f"{result.why}; {_STRICT}")
                failures.append((number, result.path, result.why))
                continue
            frames.add(number, tensors[number], *result, _note(tensors[number], names, result[1]))
        if kept is not None:
            kept.prune()
    problems += [Problem(Path(path), why) for _, path, why in sorted(failures)]
    table, of_formats, numbers = frames.tables()

    def load_arrays(tensor: int) -> TensorArrays:
        with opened(cache, store.folder) as kept:
            return _arrays(tensors[numbers[tensor]], names, kept)

    remarks = [kept.remark] if kept is not None and kept.remark else []
    repeats = len(everything) - len(tensors)
    return Statistics(table, of_formats, problems, load_arrays, remarks, repeats)


def _note(tensor: LogicalTensor, formats: Sequence[str], found: FormatErrors) -> str:
    notes = [tensor.note] if tensor.note else []
    if formats and not found and tensor.row.slice is None:
        notes.append(_NO_FORMATS_OF.format(dtype=tensor.row.dtype))
    return NOTE_SEPARATOR.join(notes)


def _arrays(tensor: LogicalTensor, formats: Sequence[str], kept: Cache | None) -> TensorArrays:
    """From the cache, else computed."""
    work = ResultMerger([tensor], formats, kept)
    outcomes = ((job.number, measure_job(job)) for job in work.jobs())
    failure = None
    for _, result in work.results(outcomes):
        if not isinstance(result, Failure):
            return arrays_of(*result)
        failure = result
    assert failure is not None
    raise ValueError(f"{failure.path}: {failure.why}")
