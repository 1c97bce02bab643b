"""Break and shorten the texts of figures, which contain names of any length."""

from __future__ import annotations

import functools
import re
import warnings

import matplotlib
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from megatron.analysis.plots.style import families

ROOM = 0.95  #: usable part of a line; drawn characters are rounded to whole pixels
LONGEST = 36  #: maximum length of a quantization type or another name within a sentence


def list_below(ax: Axes, note: str) -> None:
    """Write a note of any length below the label of the x axis, which must already be set."""
    size = FontProperties(size=matplotlib.rcParams["axes.labelsize"]).get_size_in_points()
    inches = 0.9 * ax.get_position().width * ax.figure.figure.get_figwidth()
    label = [ax.get_xlabel()] if ax.get_xlabel() else []
    ax.set_xlabel("\n".join([*label, *text_lines(note, inches, size)]))


def brief(name: str, longest: int = LONGEST) -> str:
    """Return a name cut to `longest` characters, because names in files can have any length.

    The beginning and the end of the name remain.
    """
    if len(name) <= longest:
        return name
    kept = longest - 1
    return f"{name[: kept - kept // 3]}…{name[len(name) - kept // 3 :]}"


def text_lines(text: str, inches: float, size: float, *, bold: bool = False) -> list[str]:
    """Return a text as lines that are at most `inches` wide; longer words are broken.

    Args:
        size: font size in points.
    """
    room = ROOM * inches * 72 / size
    lines: list[str] = []
    line, used = "", 0.0
    for word in re.findall(r"\s*\S+", text.strip()):
        width = sum(_em(character, bold=bold) for character in word)
        if used + width <= room:
            line, used = line + word, used + width
            continue
        if line:
            lines.append(line)
        line, used = "", 0.0
        for character in word.strip():
            width = _em(character, bold=bold)
            if line and used + width > room:
                lines.append(line)
                line, used = "", 0.0
            line, used = line + character, used + width
    return [*lines, line] if line else lines


@functools.cache
def _em(character: str, *, bold: bool) -> float:
    """Return the width of a character as a fraction of the font size."""
    properties = FontProperties(family=families(), size=100, weight="bold" if bold else "normal")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        width, _, _ = text_to_path.get_text_width_height_descent(character, properties, False)
    return float(width) / 100
