"""Align text tables, and escape text from files before it is shown.

All text from a file (names, metadata, messages that quote them) must be passed through `shown` or
`printable_lines` before it is printed, drawn or written to a page. A newline in a module name could
otherwise forge a line such as "0 error(s)", and an escape sequence could hide one.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.bounded_files import printable

LIMIT = 4096  #: longest name or message in characters; also the longest path on Linux
_FORMULA = ("=", "+", "-", "@")


def shown(value: object) -> str:
    """Return a name or message from a file on one line, control characters escaped."""
    text = str(value)
    return text if text.isprintable() and len(text) <= LIMIT else printable(text, limit=LIMIT)


def printable_lines(text: object) -> str:
    """Return a text with each of its lines escaped as by `shown`, but of any length."""
    return "\n".join(
        line if line.isprintable() else printable(line, limit=len(line))
        for line in str(text).split("\n")
    )


def csv_cell(value: str) -> str:
    """Return a text that no spreadsheet takes for a formula; a leading =, +, - or @ gets a `'`."""
    text = shown(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def align(rows: Sequence[tuple[object, ...]], *, text: int) -> list[str]:
    """Return the lines of a table whose columns are two spaces apart.

    Columns of numbers are aligned to the right; other columns, and the first `text` ones, to the
    left.
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
