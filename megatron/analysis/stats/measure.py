"""What the quick look needs: moments tensor by tensor and histograms by group, in one reading.

Histograms are kept by group, not by tensor (half a megabyte each), so memory does not grow with the
dump.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.outputs.registry import OPERANDS, RESULTS
from megatron.analysis.stats.cache import opened
from megatron.analysis.stats.executors import on_threads, processors
from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.jobs import Failure
from megatron.analysis.stats.logical_tensors import LogicalTensor, first_passes, logical_tensors
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.moments import Moments, merge
from megatron.analysis.stats.result import notes_by_text
from megatron.analysis.store import TensorStore

#: Histograms are kept apart by these columns.
GROUPING = ("quant_type", "layer_type", "operation", "use")
#: Columns of the table that come from the records: `data_rank` is the data-parallel rank whose data
#: it is, `shards` the number of files, `shape` that of the logical tensor.
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
    """What was computed of a dump."""

    table: pd.DataFrame  #: a row a tensor: RECORD_COLUMNS, STATISTICS, summary, path, note
    histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)  #: by GROUPING
    problems: list[Problem] = field(default_factory=list)  #: files that could not be read
    repeats: int = 0  #: tensors of recomputed forward passes that were skipped

    def summary(self) -> Moments:
        """Of all values."""
        return merge(self.table["summary"])

    def notes(self) -> dict[str, int]:
        """As `Statistics.notes`."""
        return notes_by_text(self.table["note"])

    def by(self, column: str) -> dict[str, tuple[int, Moments]]:
        """Number of tensors and their joint summary for each value of a column; most tensors first,
        then in the order in which they were written.
        """
        groups = self.table.groupby(column, sort=False)["summary"]
        found = {str(name): (len(group), merge(group)) for name, group in groups}
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def only(self, use: str) -> Measurements:
        """Return the measurements of operands alone, or of results alone."""
        at = GROUPING.index("use")
        histograms = {key: found for key, found in self.histograms.items() if key[at] == use}
        table = self.table[self.table["use"] == use]
        return Measurements(table, histograms, self.problems, self.repeats)

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
    cache: Path | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Measurements:
    """Measure every logical tensor of a dump: shards are put together, replicas count once, codes
    are no values. A file that cannot be read is a problem in the result, and all the others are
    measured.

    Args:
        cache: folder with the results of `stats.compute`, which are taken from there and added to;
            None: everything is read.
        workers: threads; as many as there are processors if None.
        progress: show a bar on a terminal.
    """
    everything = list(logical_tensors(store.records))
    tensors = first_passes(everything)
    rows: dict[int, dict[str, Any]] = {}
    problems: list[tuple[int, str, str]] = []
    histograms: dict[tuple[str, ...], Histogram] = {}
    hidden = None if progress else True  # None: hidden where there is no terminal
    bar = tqdm(total=len(tensors), desc="Reading", unit="tensor", disable=hidden, leave=False)
    with bar, opened(cache, store.folder) as kept:
        assembly = ResultMerger(tensors, (), kept)
        outcomes = on_threads(assembly.jobs(), workers or processors())
        for number, result in assembly.results(outcomes):
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
    found = [Problem(Path(path), why) for _, path, why in sorted(problems)]
    return Measurements(table, histograms, found, len(everything) - len(tensors))


def use_of(layer_type: Any, tensor_name: Any) -> str:
    """Return whether a tensor is one of the operands or of the results of matmuls."""
    return OPERANDS if is_operand(layer_type, tensor_name) else RESULTS


def _row(tensor: LogicalTensor) -> dict[str, Any]:
    """The record's part of a row; what groups tensors is never null."""
    known = {name: getattr(tensor.row, name, None) for name in RECORD_COLUMNS}
    row = {name: None if value is pd.NA else value for name, value in known.items()}
    row["use"] = use_of(row["layer_type"], row["tensor_name"])
    row |= {name: str(row[name] or "unknown") for name in GROUPING}
    row |= {"data_rank": tensor.data_rank, "shards": tensor.files, "shape": tensor.shape}
    return row | {"path": Path(tensor.row.path), "note": tensor.note}
