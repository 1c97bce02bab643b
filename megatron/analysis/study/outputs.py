"""Write the results of a study: its verdict, pictures, page, recipe and tables."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from megatron.analysis.outputs.atomic_write import naming, write, write_keeping
from megatron.analysis.study.engine import Study
from megatron.analysis.study.gradients import gradients_of
from megatron.analysis.study.page import page
from megatron.analysis.study.pictures import draw_budget, draw_verdict
from megatron.analysis.study.proposal import RECIPE_FILE, places_of, propose, recipe_text
from megatron.analysis.study.verdict import cells, verdict
from megatron.analysis.text_table import csv_cell

#: Files that only some studies write.
_OPTIONAL = (
    *("budget.parquet", "budget.csv", "budget.png", "study.png"),
    *("gradients.parquet", "gradients.csv", "accumulators.parquet", "accumulators.csv"),
)


def check_recipes(recipes: Iterable[Path], folder: Path, *, bits: float | None) -> None:
    """Raise ValueError if a given recipe is the file to which the proposal will be written."""
    for recipe in recipes if bits is not None else ():
        if recipe.resolve() == (folder / RECIPE_FILE).resolve():
            raise ValueError(
                f"--bits would replace {recipe}, which is also given with --recipes; rename the "
                "recipe, or choose another folder with --output-dir"
            )


def remove_others(folder: Path, written: Iterable[Path]) -> bool:
    """Remove the tables and pictures of an earlier study that the last one has not replaced.

    Args:
        folder: output folder.
        written: paths of the files of the last study.

    Returns:
        Whether the recipe of an earlier study is in the folder; it is not removed.
    """
    new = {path.name for path in written}
    for name in _OPTIONAL:
        if name not in new:
            with naming(folder / name):
                (folder / name).unlink(missing_ok=True)
    return RECIPE_FILE not in new and (folder / RECIPE_FILE).exists()


def write_outputs(
    result: Study, folder: Path, *, dump: Path, bits: float | None = None
) -> tuple[list[str], list[Path]]:
    """Write all files of a study; return the sentences of the verdict and the paths of the files.

    Files of an earlier study are replaced; a changed recipe is kept under another name.

    Args:
        folder: output folder.
        dump: folder of the dump.
        bits: bit budget of the recipe; None for no recipe.

    Raises:
        ValueError: if the cheapest formats exceed the bit budget; the tables are written before
            this check.
    """
    paths = write_tables(result, folder)
    proposal = None if bits is None else propose(places_of(result.rows), bits)
    if proposal is not None:
        recipe = folder / RECIPE_FILE
        write_keeping(recipe, recipe_text(proposal, str(dump)).encode())
        paths.insert(0, recipe)
    sentences = verdict(result, proposal)
    pictures = {}
    if not cells(result.rows).empty:
        pictures["study.png"] = draw_verdict(result, sentences, proposal)
    if (budget := draw_budget(result)) is not None:
        pictures["budget.png"] = budget
    written = [write(folder / name, content) for name, content in pictures.items()]
    captions = {"study.png": "Verdict", "budget.png": "Error budget"}
    named = {captions[name]: content for name, content in pictures.items()}
    html = write(folder / "study.html", page(result, dump, sentences, named))
    return sentences, [html, *written, *paths]


def write_tables(result: Study, folder: Path) -> list[Path]:
    """Write the tables `study`, `budget` and `gradients`, and return the paths.

    Each table is written as Parquet and as CSV. An empty `budget` or `gradients` is left out.
    """
    paths = []
    tables = {"study": result.rows, "budget": result.budgets}
    if not result.rows.empty:
        tables["gradients"] = gradients_of(cells(result.rows))
    for name, table in tables.items():
        if table.empty and name != "study":
            continue
        paths += write_table(table, folder, name, left_out=result.left_out)
    return paths


def write_table(
    table: pd.DataFrame, folder: Path, name: str, *, left_out: Mapping[str, int]
) -> list[Path]:
    """Write a table as Parquet and as CSV, and return the paths.

    The metadata of the Parquet file (`DataFrame.attrs`) contain `left_out`: what the study left
    out, counted by reason.
    """
    content = io.BytesIO()
    table = table.copy(deep=False)
    table.attrs = {"left_out": dict(left_out)}
    table.to_parquet(content, index=False)
    text = _safe(table).to_csv(index=False, lineterminator="\n")
    return [
        write(folder / f"{name}.parquet", content.getvalue()),
        write(folder / f"{name}.csv", text.encode(errors="backslashreplace")),
    ]


def _safe(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table, with its texts changed so that no spreadsheet reads them as formulas."""
    columns = {
        name: [csv_cell(value) if isinstance(value, str) else value for value in table[name]]
        for name in table
        if not pd.api.types.is_numeric_dtype(table[name])
    }
    return table.assign(**columns)
