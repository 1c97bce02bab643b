"""Computes the statistics of every tensor of a dump: in parallel, each file read once.

Threads, not processes: the time goes into compiled loops, which release the interpreter's lock, and
nothing is copied. A worker holds one piece of one tensor; histograms are kept by group, not by
tensor (half a megabyte each), so memory does not grow with the dump.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.layout import layout_of
from megatron.analysis.stats.moments import Moments, merge
from megatron.analysis.stats.plan import make_plan
from megatron.analysis.stats.pool import one_torch_thread, processors
from megatron.analysis.stats.tensor import measure
from megatron.analysis.store import TensorStore
from megatron.analysis.tensor_files import Problem, UnreadableTensorError

#: Histograms are kept apart by these columns.
GROUPING = ("quant_type", "layer_type", "operation")
#: Columns of the table that come from the record; `rank` is the world rank.
RECORD_COLUMNS = (
    "run_id", "iteration", "micro_batch", "rank", "layer_type", "layer_idx", "module", "operation",
    "phase", "component", "tensor_name", "quant_type", "format", "dtype", "shape",
)  # fmt: skip
#: Columns of the table that are computed from the values: fields and properties of `Moments`.
STATISTICS = ("count", "min", "max", "mean", "std", "rms", "amax", "zeros", "nan", "inf")


@dataclass
class Measurements:
    """What was computed of a dump."""

    table: pd.DataFrame  #: a row a tensor: RECORD_COLUMNS, STATISTICS, summary, bytes, path
    histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)  #: by GROUPING
    problems: list[Problem] = field(default_factory=list)  #: files that could not be read

    def summary(self) -> Moments:
        """Of all values."""
        return merge(self.table["summary"])

    def by(self, column: str) -> dict[str, tuple[int, Moments]]:
        """Number of tensors and their joint summary for each value of a column; most tensors first,
        then in the order in which they were written.
        """
        groups = self.table.groupby(column, sort=False)["summary"]
        found = {str(name): (len(group), merge(group)) for name, group in groups}
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def histograms_by(self, column: str) -> dict[str, Histogram]:
        """Joint histogram for each value of one of the GROUPING columns."""
        position = GROUPING.index(column)
        joined: dict[str, Histogram] = {}
        for key, histogram in self.histograms.items():
            joined[key[position]] = joined.get(key[position], Histogram.empty()) + histogram
        return joined

    def histogram(self) -> Histogram:
        """Of all values."""
        return sum(self.histograms.values(), start=Histogram.empty())


def measure_dump(
    store: TensorStore,
    *,
    workers: int | None = None,
    progress: Callable[[object], None] | None = None,
) -> Measurements:
    """Measure every tensor of a dump; `progress` gets the record of each, from any thread.

    A file that cannot be read is a problem in the result, and all the others are measured.
    """
    rows: dict[int, dict[str, Any]] = {}
    problems: dict[int, Problem] = {}
    histograms: dict[tuple[str, ...], Histogram] = {}
    lock, nothing = threading.Lock(), make_plan(())

    def work(position: int, record: Any) -> None:
        row = _row(record)
        try:
            tensor = store.load(record)
            layout = layout_of(tuple(tensor.shape), layer_type=None, tensor_name=None)
            values, _ = measure(tensor, layout, nothing)
        except (UnreadableTensorError, TypeError) as error:
            why = error.why if isinstance(error, UnreadableTensorError) else str(error)
            problems[position] = Problem(Path(record.path), why)
        else:
            summary, histogram = values.moments, values.histogram
            row |= {name: getattr(summary, name) for name in STATISTICS} | {"summary": summary}
            key = tuple(row[name] for name in GROUPING)
            with lock:
                rows[position] = row
                if key in histograms:
                    histograms[key].counts[:] += histogram.counts
                else:
                    histograms[key] = histogram
        if progress is not None:
            with lock:
                progress(record)

    with one_torch_thread(), ThreadPoolExecutor(workers or processors()) as pool:
        jobs = [pool.submit(work, *item) for item in enumerate(store.records.itertuples())]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # an interrupt or our own mistake: do not measure the rest first
            pool.shutdown(cancel_futures=True)
    for job in jobs:
        job.result()
    columns = [*RECORD_COLUMNS, *STATISTICS, "summary", "path"]
    table = pd.DataFrame([rows[position] for position in sorted(rows)], columns=columns)
    return Measurements(table, histograms, [problems[position] for position in sorted(problems)])


def _row(record: Any) -> dict[str, Any]:
    """The record's part of a row; what groups tensors is never null."""
    known = {name: getattr(record, name) for name in RECORD_COLUMNS}
    row = {name: None if value is pd.NA else value for name, value in known.items()}
    row |= {name: str(row[name] or "unknown") for name in GROUPING}
    row["rank"] = row["rank"] or 0
    row["path"] = Path(record.path)
    return row
