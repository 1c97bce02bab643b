"""Write the page of a study: the verdict, its pictures and a table, in one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.analysis import report
from megatron.analysis.study.engine import Study
from megatron.analysis.study.verdict import by_candidate, cells
from megatron.analysis.text_table import shown

_CSS = Path(report.__file__).parent / "page.css"
_COLUMNS = ("place", "candidate", "layers", "SQNR, median (dB)", "lowest (dB)", "bits per value")


def page(
    result: Study, folder: Path, sentences: Sequence[str], pictures: Mapping[str, bytes]
) -> bytes:
    """Return the HTML page.

    Args:
        folder: folder of the dump, for the title.
        sentences: the verdict.
        pictures: PNG pictures by caption.
    """
    title = html.escape(f"Study of {shown(folder.name)}")
    parts = [f"<h1>{title}</h1>", *(f"<p>{html.escape(text)}</p>" for text in sentences)]
    for caption, content in pictures.items():
        encoded = base64.b64encode(content).decode()
        parts.append(
            f'<h2>{html.escape(caption)}</h2><div class="scroll">'
            f'<img alt="{html.escape(caption)}" style="max-width: 100%" '
            f'src="data:image/png;base64,{encoded}"></div>'
        )
    parts += ["<h2>All places</h2>", _table(result)]
    notes = [f"{count} {shown(reason)}" for reason, count in sorted(result.left_out.items())]
    notes += [str(problem) for problem in result.problems]
    if notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        parts.append(f'<h2>Left out</h2><ul id="left-out">{items}</ul>')
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    return text.encode(errors="backslashreplace")


def _table(result: Study) -> str:
    """Return a table with one row per place and candidate."""
    if result.rows.empty:
        return "<p>No results.</p>"
    table = cells(result.rows)
    order = {name: at for at, name in enumerate(by_candidate(table)["candidate"])}
    grouped = table.groupby(["place", "candidate"], sort=False).agg(
        layers=("layer_idx", "nunique"),
        median=("sqnr_db", "median"),
        lowest=("sqnr_db", "min"),
        bits=("bits", "mean"),
    )
    rows = sorted(grouped.itertuples(), key=lambda row: order[row.Index[1]])
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells_of_row) + "</tr>"
        for cells_of_row in (
            (*row.Index, str(row.layers), f"{row.median:.1f}", f"{row.lowest:.1f}", f"{row.bits:g}")
            for row in rows
        )
    ]
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return f'<div class="scroll tall"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
