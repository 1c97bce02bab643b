"""Compute tables of statistics from the records of a dump."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError
from megatron.analysis.progress import Progress
from megatron.analysis.stats.cache import Cache, open_cache
from megatron.analysis.stats.errors import FormatErrors
from megatron.analysis.stats.executors import affordable, on_cluster, on_threads
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.jobs import Failure, measure_job
from megatron.analysis.stats.logical_tensors import (
    NOTE_SEPARATOR,
    LogicalTensor,
    first_passes,
    logical_tensors,
)
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.result import Statistics, TensorArrays
from megatron.analysis.stats.result_columns import ResultColumns, arrays_of
from megatron.analysis.store import TensorStore

_STRICT = "remove the file, or leave --strict out"
_NO_FORMATS_OF = "no format is computed for {dtype} values"  # note for unsupported dtypes


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
    """Compute the statistics of the tensors in a dump.

    Args:
        formats: names of formats in `megatron.fake_quant`; if empty, only the values are described.
        select: subset of `store.records`, as returned by `store.select`; None selects all records.
        workers: number of threads; None means one per processor.
        max_memory: maximum memory of this process, in bytes; the number of threads is reduced to
            fit.
        scheduler: address of a Dask scheduler. Its workers must see the dump under the same path.
            `workers` and `max_memory` do not apply to them, because they have their own limits.
        cache: folder in which results are stored for later calls; None disables the cache.
        strict: whether to raise an exception for the first file that cannot be read, instead of
            listing it in `problems`.
        progress: whether to report the progress on stderr.

    Raises:
        ValueError: if a format is unknown, or `max_memory` does not suffice for one thread.
        UnreadableTensorError: if `strict` is set and a file cannot be read.
    """
    names = group_formats(formats).names
    workers = affordable(workers, max_memory)
    records = store.records if select is None else select
    all_tensors = list(logical_tensors(records, dump=store.records))
    tensors = first_passes(all_tensors)
    problems = list(store.problems)
    if strict and problems:
        first = problems[0]
        raise UnreadableTensorError(first.path, f"{first.why}; {_STRICT}")
    columns, done, failures = ResultColumns(), set(), []
    bar = Progress(len(tensors), "Measuring", "tensor", shown=progress)
    with bar, open_cache(cache, store.folder) as results_cache:
        merger = ResultMerger(tensors, names, results_cache)
        jobs = merger.jobs()
        job_results = on_cluster(jobs, scheduler) if scheduler else on_threads(jobs, workers)
        for number, result in merger.results(job_results):
            done.add(number)
            bar.update(len(done) - bar.done)
            if isinstance(result, Failure):
                if strict:
                    raise UnreadableTensorError(Path(result.path), f"{result.why}; {_STRICT}")
                failures.append((number, result.path, result.why))
                continue
            columns.add(number, tensors[number], *result, _note(tensors[number], names, result[1]))
        if results_cache is not None:
            results_cache.prune()
    problems += [Problem(Path(path), why) for _, path, why in sorted(failures)]
    tensor_table, format_table, numbers = columns.tables()

    def load_arrays(tensor: int) -> TensorArrays:
        with open_cache(cache, store.folder) as results_cache:
            return _arrays(tensors[numbers[tensor]], names, results_cache)

    remarks = [results_cache.remark] if results_cache is not None and results_cache.remark else []
    repeats = len(all_tensors) - len(tensors)
    return Statistics(tensor_table, format_table, problems, load_arrays, remarks, repeats)


def _note(tensor: LogicalTensor, formats: Sequence[str], errors: FormatErrors) -> str:
    notes = [tensor.note] if tensor.note else []
    if formats and not errors and tensor.row.slice is None:
        notes.append(_NO_FORMATS_OF.format(dtype=tensor.row.dtype))
    return NOTE_SEPARATOR.join(notes)


def _arrays(
    tensor: LogicalTensor, formats: Sequence[str], results_cache: Cache | None
) -> TensorArrays:
    """Return the histograms of a tensor; compute those that are not in the cache."""
    merger = ResultMerger([tensor], formats, results_cache)
    job_results = ((job.number, measure_job(job)) for job in merger.jobs())
    failure = None
    for _, result in merger.results(job_results):
        if not isinstance(result, Failure):
            return arrays_of(*result)
        failure = result
    assert failure is not None
    raise ValueError(f"{failure.path}: {failure.why}")
