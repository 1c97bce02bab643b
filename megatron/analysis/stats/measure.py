"""Compute the moments of every tensor in a dump, and histograms of groups of tensors.

`quick_analysis` shows the results. Each file is read once. A histogram takes half a megabyte, so
there is one per group and not one per tensor. Memory use therefore does not grow with the size of
the dump.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.judged import OPERANDS, RESULTS
from megatron.analysis.progress import Progress
from megatron.analysis.stats.cache import open_cache
from megatron.analysis.stats.executors import on_threads, processors
from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.jobs import Failure
from megatron.analysis.stats.logical_tensors import LogicalTensor, first_passes, logical_tensors
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.moments import Moments, merge
from megatron.analysis.stats.result import notes_by_text
from megatron.analysis.store import TensorStore

#: Columns by which tensors are grouped for the histograms; there is one histogram per group.
GROUPING = ("quant_type", "layer_type", "operation", "use")
#: Columns of the table that come from the records. `data_rank` is the data-parallel rank whose data
#: the tensor holds, `shards` is the number of files, and `shape` is the logical tensor's shape.
RECORD_COLUMNS = (
    "run_id",
    "iteration",
    "micro_batch",
    "data_rank",
    "shards",
    "layer_type",
    "layer_idx",
    "module",
    "operation",
    "phase",
    "component",
    "tensor_name",
    "quant_type",
    "format",
    "dtype",
    "shape",
    "use",
)
#: Columns of the table that are computed from the values: fields and properties of `Moments`.
STATISTICS = ("count", "min", "max", "mean", "std", "rms", "amax", "zeros", "nan", "inf")


@dataclass
class Measurements:
    """Measured moments and histograms of a dump's tensors."""

    #: one row per tensor; columns: RECORD_COLUMNS, STATISTICS, summary (`Moments`), path and note
    table: pd.DataFrame
    #: one histogram per group of tensors, keyed by the values of the GROUPING columns
    histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)  #: files that could not be read
    #: number of tensors skipped because activation recomputation saved them a second time
    repeats: int = 0

    def summary(self) -> Moments:
        """Return the moments of the values of all tensors taken together."""
        return merge(self.table["summary"])

    def notes(self) -> dict[str, int]:
        """Return the number of tensors with each note; see `Statistics.notes`."""
        return notes_by_text(self.table["note"])

    def by(self, column: str) -> dict[str, tuple[int, Moments]]:
        """Group the tensors by `column`; return each group's number of tensors and moments.

        The groups are in descending order of the number of tensors; ties are in the order of the
        files.
        """
        groups = self.table.groupby(column, sort=False)["summary"]
        by_value = {str(name): (len(group), merge(group)) for name, group in groups}
        return dict(sorted(by_value.items(), key=lambda item: -item[1][0]))

    def only(self, use: str) -> Measurements:
        """Return the measurements of the tensors with one use: operands or results of matmuls."""
        at = GROUPING.index("use")
        histograms = {key: counts for key, counts in self.histograms.items() if key[at] == use}
        table = self.table[self.table["use"] == use]
        return Measurements(table, histograms, self.problems, self.repeats)

    def histograms_by(self, column: str) -> dict[str, Histogram]:
        """Return one histogram for each value of `column`, which must be in `GROUPING`."""
        position = GROUPING.index(column)
        joined: dict[str, Histogram] = {}
        for key, histogram in self.histograms.items():
            joined[key[position]] = joined.get(key[position], Histogram.empty()) + histogram
        return joined

    def histogram(self) -> Histogram:
        """Return the histogram of all values."""
        return sum(self.histograms.values(), start=Histogram.empty())


def measure_dump(
    store: TensorStore,
    *,
    cache: Path | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Measurements:
    """Measure every logical tensor of a dump.

    Shards are merged, replicas count once, and codes are left out. An unreadable file is listed
    in `problems` of the result, and all others are measured.

    Args:
        cache: folder of the cache, which is shared with `stats.compute`; None disables the cache.
        workers: number of threads; None means one per processor.
        progress: whether to report the progress on stderr.
    """
    all_tensors = list(logical_tensors(store.records))
    tensors = first_passes(all_tensors)
    rows: dict[int, dict[str, Any]] = {}
    problems: list[tuple[int, str, str]] = []
    histograms: dict[tuple[str, ...], Histogram] = {}
    bar = Progress(len(tensors), "Reading", "tensor", shown=progress)
    with bar, open_cache(cache, store.folder) as results_cache:
        merger = ResultMerger(tensors, (), results_cache)
        job_results = on_threads(merger.jobs(), workers or processors())
        for number, result in merger.results(job_results):
            if isinstance(result, Failure):
                problems.append((number, result.path, result.why))
                continue
            bar.update()
            moments, histogram = result[0].moments, result[0].histogram
            row = _row(tensors[number])
            row |= {name: getattr(moments, name) for name in STATISTICS} | {"summary": moments}
            rows[number] = row
            key = tuple(row[name] for name in GROUPING)
            if key in histograms:
                histograms[key].counts[:] += histogram.counts
            else:
                histograms[key] = histogram
    columns = [*RECORD_COLUMNS, *STATISTICS, "summary", "path", "note"]
    table = pd.DataFrame([rows[number] for number in sorted(rows)], columns=columns)
    unreadable = [Problem(Path(path), why) for _, path, why in sorted(problems)]
    return Measurements(table, histograms, unreadable, len(all_tensors) - len(tensors))


def use_of(layer_type: Any, tensor_name: Any) -> str:
    """Return OPERANDS if a tensor is an operand of a matmul, or RESULTS if it is a result."""
    return OPERANDS if is_operand(layer_type, tensor_name) else RESULTS


def _row(tensor: LogicalTensor) -> dict[str, Any]:
    """Return the part of a table row that comes from the record of the tensor.

    Columns in GROUPING are never null.
    """
    fields = {name: getattr(tensor.row, name, None) for name in RECORD_COLUMNS}
    row = {name: None if value is pd.NA else value for name, value in fields.items()}
    row["use"] = use_of(row["layer_type"], row["tensor_name"])
    row |= {name: str(row[name] or "unknown") for name in GROUPING}
    row |= {"data_rank": tensor.data_rank, "shards": tensor.files, "shape": tensor.shape}
    return row | {"path": Path(tensor.row.path), "note": tensor.note}
