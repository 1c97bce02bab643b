"""Write the result of a comparison as one HTML page that needs neither network nor scripts."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from megatron.analysis.diff.growth import growth_figure
from megatron.analysis.diff.settings import Facts
from megatron.analysis.diff.summary import Summary
from megatron.analysis.diff.text import Row, counts, lists, origin_sentence, tables, verdict
from megatron.analysis.outputs.render import picture
from megatron.analysis.plots.style import in_style
from megatron.analysis.report import fill, page_style
from megatron.analysis.text_table import shown

_TEMPLATE = Path(__file__).with_name("page.html")


def page(summary: Summary, facts: Facts) -> bytes:
    """Return the HTML page: a picture, and the verdict, tables and lists of the text output."""
    head = [f'<p class="verdict"><b>{_escaped(verdict(summary, facts))}</b></p>']
    if sentence := origin_sentence(summary):
        head.append(f'<p class="verdict">{_escaped(sentence)}</p>')
    head.append(f"<p>{_escaped(counts(summary))}</p>")
    head += [f'<p class="note">{_escaped(line)}</p>' for line in facts.lines()]
    parts = [_picture(summary)]
    for title, rows in tables(summary).items():
        parts += [f"<h2>{_escaped(title)}</h2>", _table(rows)]
    for title, texts in lists(summary).items():
        items = "".join(f"<li>{_escaped(text)}</li>" for text in texts)
        parts += [f"<h2>{_escaped(title)}</h2>", f"<ul>{items}</ul>"]
    content = {
        "title": "Difference of two runs",
        "style": page_style(),
        "head": "\n".join(head),
        "main": "\n".join(parts),
    }
    text = fill(_TEMPLATE.read_text(encoding="utf-8"), content)
    return text.encode(errors="backslashreplace")


def _picture(summary: Summary) -> str:
    with in_style():
        image = base64.b64encode(picture(growth_figure(summary), "png")).decode()
    alternative = "Relative error of each tensor in the order of execution"
    return f'<img alt="{alternative}" src="data:image/png;base64,{image}">'


def _table(rows: Sequence[Row]) -> str:
    """Return a table; columns of names are aligned to the left, columns of numbers to the right."""
    header, *body = rows
    classes = [' class="name"' if _has_names(column) else "" for column in zip(*body, strict=True)]
    lines = [_cells(header, "th", classes), *(_cells(row, "td", classes) for row in body)]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _has_names(column: Sequence[object]) -> bool:
    return any(re.fullmatch(r"-|inf|[\d.e+-]+", str(cell)) is None for cell in column)


def _cells(row: Row, tag: str, classes: Sequence[str]) -> str:
    pairs = zip(row, classes, strict=True)
    cells = [f"<{tag}{style}>{_escaped(cell)}</{tag}>" for cell, style in pairs]
    return f"<tr>{''.join(cells)}</tr>"


def _escaped(text: object) -> str:
    return html.escape(shown(text))
