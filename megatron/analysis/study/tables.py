"""Write the tables of a study as Parquet and CSV files."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.study.engine import Study
from megatron.analysis.text_table import csv_cell


def write_tables(result: Study, folder: Path) -> list[Path]:
    """Write `study` and, if it was measured, `budget` in both forms, and return the paths.

    Files of an earlier study are replaced.
    """
    paths = []
    for name, table in (("study", result.rows), ("budget", result.budgets)):
        if table.empty and name == "budget":
            continue
        content = io.BytesIO()
        table.to_parquet(content, index=False)
        paths.append(write(folder / f"{name}.parquet", content.getvalue()))
        text = _safe(table).to_csv(index=False, lineterminator="\n")
        paths.append(write(folder / f"{name}.csv", text.encode(errors="backslashreplace")))
    return paths


def _safe(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with texts that no spreadsheet interprets as formulas."""
    columns = {
        name: [csv_cell(value) if isinstance(value, str) else value for value in table[name]]
        for name in table
        if not pd.api.types.is_numeric_dtype(table[name])
    }
    return table.assign(**columns)
