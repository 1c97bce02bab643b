"""Write the statistics of a dump as text with aligned columns and one line per tensor.

Numbers have nine significant digits, which are enough to identify a float32 value. With a fixed
number of decimal places, gradients of 1e-7 would appear as 0.0000.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from megatron.analysis.dump.run_endings import ending
from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.stats.export import note_lines
from megatron.analysis.stats.measure import STATISTICS, Measurements
from megatron.analysis.stats.moments import Moments
from megatron.analysis.stats.result import words_of_repeats
from megatron.analysis.store import TensorStore
from megatron.analysis.text_table import align, printable_lines, shown

GROUPS = (
    ("quant_type", "By quantization type"),
    ("layer_type", "By layer type"),
    ("operation", "By operation"),
    ("use", "By use in matmuls"),
)
TENSOR_COLUMNS = (
    "iteration",
    "micro_batch",
    "data_rank",
    "layer_idx",
    "module",
    "operation",
    "phase",
    "tensor_name",
    "quant_type",
    "format",
    "dtype",
    "shape",
    "shards",
)


def format_statistics(
    dump: TensorStore, measured: Measurements, problems: Sequence[Problem]
) -> str:
    """Return the statistics of a dump as text.

    The text contains the runs, the statistics overall, by group and by tensor, and the files that
    could not be read.
    """
    summary = measured.summary()
    lines = [
        f"Statistics of the tensors in {shown(dump.folder)}",
        f"{len(measured.table)} tensors, {summary.count} values"
        + (f"; {len(problems)} files could not be read (listed at the end)" if problems else ""),
        "NaN and Inf are counted and left out of every other number; std divides by n.",
        *([f"{lost} files listed in an index are missing"] if (lost := len(dump.missing)) else []),
        *([words_of_repeats(measured.repeats)] if measured.repeats else []),
        "",
        "Runs",
        *(f"  {line}" for line in _runs(dump)),
        *(["", "Notes", *note_lines(notes)] if (notes := measured.notes()) else []),
        "",
        "Overall",
        *align([("tensors", *STATISTICS), (len(measured.table), *_numbers(summary))], text=0),
    ]
    for column, title in GROUPS:
        rows = [(name, n, *_numbers(group)) for name, (n, group) in measured.by(column).items()]
        lines += ["", title, *align([(column, "tensors", *STATISTICS), *rows], text=1)]
    header = (*TENSOR_COLUMNS, *STATISTICS, "file")
    lines += ["", "Tensors", *align([header, *_tensor_rows(dump, measured.table)], text=0)]
    if problems:
        lines += ["", "Could not be read", *(f"  {problem}" for problem in problems)]
    return printable_lines("\n".join(lines) + "\n")


def _runs(dump: TensorStore) -> list[str]:
    """Return one line per run, with its number of tensors and facts from its run card."""
    lines = []
    for run_id, count in dump.runs().items():
        card = dump.run_card(run_id) if run_id else {}
        facts = [f"{count} tensors"]
        for key, word in (("quant_type", ""), ("device", "on "), ("seed", "seed ")):
            if card.get(key) is not None:
                facts.append(f"{word}{card[key]}")
        facts.append(ending(card))
        lines.append(f"{run_id or '(unknown run)'}: {', '.join(facts)}")
    return lines


def _tensor_rows(dump: TensorStore, table: pd.DataFrame) -> Iterable[tuple[object, ...]]:
    """Yield one row per tensor, in the order of the table."""
    for row in table.to_dict("records"):
        known = [_known(row[name]) for name in TENSOR_COLUMNS]
        yield (*known, *_numbers(row["summary"]), shown(row["path"].relative_to(dump.folder)))


def _known(value: object) -> str:
    """Format a field of a record for a table cell; unknown values are shown as "-"."""
    if isinstance(value, (list, tuple)):
        return "x".join(str(size) for size in value) or "scalar"
    if value is None or pd.isna(value):
        return "-"
    # pandas changes integers to floats if a column contains None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) or "-"


def _numbers(summary: Moments) -> list[str]:
    """Return the statistics as text, with nine significant digits; counts are integers."""
    values = [getattr(summary, name) for name in STATISTICS]
    return [str(value) if isinstance(value, int) else f"{value:.9g}" for value in values]
