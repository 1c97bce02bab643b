"""Align text tables, and escape text from files before it is displayed.

All text that comes from a file (names, metadata, and messages that quote them) must be passed
through `shown` or `printable_lines` before it is printed, drawn or written to a page. Otherwise, a
newline in a module name could forge a line such as "0 error(s)", and an escape sequence could hide
a line.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.bounded_files import printable

#: Maximum length of a name or message in characters; Linux has the same limit for paths.
LIMIT = 4096
_FORMULA = ("=", "+", "-", "@")


def shown(value: object) -> str:
    """Format a name or message as one line, with control characters escaped.

    The text is cut to `LIMIT` characters.
    """
    text = str(value)
    return text if text.isprintable() and len(text) <= LIMIT else printable(text, limit=LIMIT)


def printable_lines(text: object) -> str:
    """Return `text` with control characters escaped in each line; newlines are kept.

    Unlike `shown`, this function does not limit the length.
    """
    return "\n".join(
        line if line.isprintable() else printable(line, limit=len(line))
        for line in str(text).split("\n")
    )


def csv_cell(value: str) -> str:
    """Return `value` in a form that a spreadsheet does not interpret as a formula.

    A `'` is placed before a leading =, +, - or @.
    """
    text = shown(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def align(rows: Sequence[tuple[object, ...]], *, text: int) -> list[str]:
    """Return the lines of a table with aligned columns, separated by two spaces.

    The first `text` columns are aligned to the left. Each later column is aligned to the right if
    it contains only numbers below its header, and otherwise to the left.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if number and position >= text else cell.ljust(width)
            for position, (cell, width, number) in enumerate(zip(row, widths, numeric, strict=True))
        ]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True
