"""Overview table of number formats; `format_report.py` describes one format in full.

The numbers come from `format_properties.py`, which measures them on the quantization code.
"""

import math
from collections.abc import Iterable, Sequence

from megatron.fake_quant import scalings
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.names import ALIASES

HEADER = (
    "format",
    "aliases",
    "bits per value",
    "largest",
    "smallest normal",
    "smallest",
    "scale",
    "rounding, overflow",
)


def number(x: float) -> str:
    """Return a number as a decimal, or as `2^E` if it is a power of two below 1 or above 1024."""
    mantissa, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= x <= 1024 else f"{x:.9g}"


def rounding(fmt: Format) -> str:
    """Return a short name of the format's rounding mode, such as "ties even"."""
    return (
        f"ties {format_properties.ties(fmt.element)}" if fmt.rounding == "nearest" else fmt.rounding
    )


def row(fmt: Format) -> tuple[str, ...]:
    """Return the cells of the table row for one format, in the order of `HEADER`."""
    scales = scalings.describe(fmt)
    values = format_properties.positive_values(fmt.element)
    has_normals = format_properties.has_normal_numbers(fmt.element)
    overflow = "saturates" if format_properties.saturates(fmt.element) else "to Inf"
    return (
        fmt.name,
        ", ".join(aliases(fmt)),
        f"{format_properties.bits_a_value(fmt):.9g}",
        number(float(values[-1])),
        number(fmt.element.smallest_normal) if has_normals else "-",
        number(float(values[0])),
        "none" if scales is None else scales.brief,
        f"{rounding(fmt)}, {overflow}",
    )


def aliases(fmt: Format) -> list[str]:
    """Return the alternative names of a format."""
    return [alias for alias, name in ALIASES.items() if name == fmt.name]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, without padding its columns to equal width."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def markdown(formats: Iterable[Format]) -> str:
    """Return the overview table of `formats` in Markdown."""
    return markdown_table(HEADER, map(row, formats))
