"""The formats as a table, and in few words each; `format_report.py` says all about one.

The numbers come from `format_properties.py`, that is from the code that quantizes.
"""

import math
from collections.abc import Iterable, Sequence

from megatron.fake_quant.formats import (
    Format,
    GroupScaling,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.names import ALIASES

HEADER = (
    "format",
    "also",
    "bits a value",
    "largest",
    "smallest normal",
    "smallest",
    "scale",
    "rounding, overflow",
)


def number(x: float) -> str:
    """A power of two as one where that is shorter; anything else as it is."""
    mantissa, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= x <= 1024 else f"{x:.9g}"


def rounding(fmt: Format) -> str:
    """In a word or two."""
    return (
        f"ties {format_properties.ties(fmt.element)}" if fmt.rounding == "nearest" else fmt.rounding
    )


def scale(fmt: Format) -> str:
    """What scales there are, in short."""
    scaling = fmt.scaling
    if scaling is None:
        return "none"
    if isinstance(scaling, TensorScaling):
        power = ", a power of two" if scaling.power_of_two else ""
        return f"float32 for all, to {scaling.target:g}{power}"
    size = f"{scaling.size} x {scaling.size}" if scaling.square else f"{scaling.size}"
    if isinstance(scaling, TwoLevelScaling):
        return f"E4M3 for {size}, float32 for all"
    if isinstance(scaling, GroupScaling):
        return f"E6M2 for {size}, a bit for 8, a bit for 4"
    return f"E8M0 for {size} by {scaling.rule}"


def row(fmt: Format) -> tuple[str, ...]:
    """One format's cells, in the order of `HEADER`."""
    values = format_properties.positive_values(fmt.element)
    numbers = (float(values[-1]), format_properties.smallest_normal(fmt.element), float(values[0]))
    overflow = "saturates" if format_properties.saturates(fmt.element) else "to Inf"
    return (
        fmt.name,
        ", ".join(aliases(fmt)),
        f"{format_properties.bits_a_value(fmt):.9g}",
        *map(number, numbers),
        scale(fmt),
        f"{rounding(fmt)}, {overflow}",
    )


def aliases(fmt: Format) -> list[str]:
    """Other names of a named format."""
    return [alias for alias, name in ALIASES.items() if name == fmt.name]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown has it, not aligned."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def markdown(formats: Iterable[Format]) -> str:
    """A Markdown table of the formats."""
    return markdown_table(HEADER, map(row, formats))
