"""Write report.html, a self-contained page that needs neither a network nor a server.

The page contains its data as JSON (`content.py`), its script (`page.js`, which lists the sections)
and Plotly's JavaScript, which draws the figures. All three are compressed; `unpack.js` starts them.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.report.content import content

_HERE = Path(__file__).parent
#: Patterns that match the list of figures in the page, and the path of a figure.
_FIGURES = re.compile(r'(<script type="application/json" id="figures">)\[.*?\](?=</script>)')
_FILE = re.compile(r"(?:[\w+-][\w.+-]*/)?[\w+-][\w.+-]*\.(?:png|svg|pdf)", re.ASCII)


def write_report(figure_data: FigureData, path: Path) -> Path:
    """Write the report atomically, and return the path of the file.

    Raises:
        ImportError: plotly, which provides the JavaScript, is not installed.
    """
    page = render(content(figure_data))
    return write(path, page.encode(errors="backslashreplace"))


def link_figures(path: Path, names: Iterable[str]) -> None:
    """Link figures in an existing report; they may have been drawn after the report was written.

    Args:
        path: path of the report.
        names: paths of files relative to the report; files that are not figures are left out.
    """
    listed = json.dumps([name for name in sorted(set(names)) if _FILE.fullmatch(name)])
    page, count = _FIGURES.subn(lambda match: match[1] + listed, path.read_text("utf-8"), count=1)
    if count:
        write(path, page.encode())


def render(data: dict[str, Any]) -> str:
    """Return the HTML page with the given content; see `content.content`."""
    from plotly.offline import get_plotlyjs

    parts = {
        "title": html.escape(str(data["title"])),
        "style": page_style(),
        "data": packed(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        "plotly": packed(get_plotlyjs()),
        "script": packed(_part("page.js")),
        "unpack": _part("unpack.js"),
    }
    return fill(_part("page.html"), parts)


def packed(text: str) -> str:
    """Return a text compressed by gzip, in base64; the same text always gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return a template with each `{{name}}` replaced by the part with this name.

    Braces in the parts stay as they are.
    """
    before, *rest = template.split("{{")
    pieces = [before]
    for part in rest:
        name, _, text = part.partition("}}")
        pieces += [parts[name], text]
    return "".join(pieces)


def page_style() -> str:
    """Return the style sheet of all pages."""
    return _part("page.css")


def _part(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
