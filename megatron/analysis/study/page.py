"""Write the page of a study: the verdict, its pictures and a table, in one HTML file."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.analysis import report
from megatron.analysis.study.engine import Study
from megatron.analysis.study.gradients import gradients_of
from megatron.analysis.study.verdict import by_candidate, cells
from megatron.analysis.text_table import shown

_CSS = Path(report.__file__).parent / "page.css"
_COLUMNS = ("place", "candidate", "layers", "SQNR, median (dB)", "lowest (dB)", "bits per value")


def page(
    result: Study, folder: Path, sentences: Sequence[str], pictures: Mapping[str, bytes]
) -> bytes:
    """Return the page of a study as HTML.

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
    parts += ["<h2>All places</h2>", _table(result), *_gradients(result)]
    notes = [f"{shown(reason)}: {count}" for reason, count in sorted(result.left_out.items())]
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
    """Return an HTML table of the errors, with one row per place and candidate.

    A result with NaN or Inf counts as worse than any other.
    """
    table = cells(result.rows)
    if table.empty:
        return "<p>No results.</p>"
    order = {name: at for at, name in enumerate(by_candidate(table)["candidate"])}
    table = table.assign(
        sqnr_db=table["sqnr_db"].mask(table["spoiled"], -math.inf),
        weighted=table["bits"] * table["values"],
    )
    grouped = table.groupby(["place", "candidate"], sort=False).agg(
        layers=("layer_idx", "nunique"),
        median=("sqnr_db", "median"),
        lowest=("sqnr_db", "min"),
        weighted=("weighted", "sum"),
        values=("values", "sum"),
    )
    grouped["bits"] = grouped["weighted"] / grouped["values"]
    rows = sorted(grouped.itertuples(), key=lambda row: order[row.Index[1]])
    return _markup(
        _COLUMNS,
        [
            (
                *row.Index,
                str(row.layers),
                *("not finite" if x == -math.inf else f"{x:.1f}" for x in (row.median, row.lowest)),
                f"{row.bits:g}",
            )
            for row in rows
        ],
    )


def _gradients(result: Study) -> list[str]:
    """Return the section on the gradient rule; empty if the study has no gradients.

    The table has one row per candidate, gradient and layer that the rule flags.
    """
    if (gradients := gradients_of(cells(result.rows))).empty:
        return []
    flagged = gradients[gradients["flagged"]].sort_values("gradient_to_noise", kind="stable")
    parts = [
        '<h2 id="gradients">Gradients against quantization noise</h2>',
        f"<p>{len(flagged)} of {len(gradients)} gradients have an rms below √3 times that of their "
        "quantization noise (arXiv 2505.19115).</p>",
    ]
    if len(flagged):
        rows = [
            (row.place, row.candidate, str(row.layer_idx), f"{row.gradient_to_noise:.2f}")
            for row in flagged.itertuples()
        ]
        parts.append(_markup(("gradient", "candidate", "layer", "gradient / noise"), rows))
    return parts


def _markup(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table as HTML."""
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    names = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll tall"><table><tr>{names}</tr>{"".join(lines)}</table></div>'
