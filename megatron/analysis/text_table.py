"""Tables as text: columns below each other."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Text that can be written in UTF-8: of a file's name that cannot, the bytes are escaped."""
    return text.encode(errors="backslashreplace").decode()


def align(rows: Sequence[tuple[object, ...]], *, text: int) -> list[str]:
    """Columns two spaces apart: the first `text` and whatever is not a number to the left."""
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
