"""Tables of the codes of an element type and their values, in Markdown or CSV."""

import csv
import io
import math
from dataclasses import dataclass

from megatron.fake_quant.code_points import code_values, field_widths
from megatron.fake_quant.elements import CodedElement, Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_table import markdown_table


@dataclass(frozen=True, slots=True)
class Code:
    """One code (bit pattern) of an element type, described by strings for a table."""

    code: str  #: code as a hexadecimal number
    bits: str  #: bit fields separated by spaces; HiFloat8's dot field follows the sign
    value: str  #: shortest decimal that identifies the value
    scientific: str  #: value as a significand times a power of two; empty for zero, Inf and NaN


def code_table(element: Element) -> list[Code]:
    """Return descriptions of all codes of an element type, in ascending order of the codes.

    Raises:
        ValueError: if the element type is a cast; see `code_values`.
    """
    if element.is_cast:
        raise ValueError(
            f"{element.name} is a plain torch cast with 2^{element.bits} codes, too many for a "
            f"table; convert one by torch.tensor(CODE, dtype=torch.uint{element.bits})"
            f".view({element.dtype})"
        )
    digits = -(-element.bits // 4)
    return [
        Code(f"0x{code:0{digits}X}", _bits(code, element), repr(value), _scientific(value))
        for code, value in enumerate(code_values(element).tolist())
    ]


def markdown(fmt: Format) -> str:
    """Return a Markdown table of the codes of the format's element type.

    There are two tables, each under the name of its element type, if a block can have either type.
    """
    tables = []
    for element in fmt.elements:
        rows = [(c.code, c.bits, c.value, c.scientific) for c in code_table(element)]
        table = markdown_table(("code", _parts(element), "value", "that is"), rows)
        tables.append(table if len(fmt.elements) == 1 else f"{element.name}\n\n{table}")
    return "\n\n".join(tables)


def _parts(element: Element) -> str:
    """Return the header of the column `Code.bits`: the names of the bit fields."""
    if element.is_table:
        return "position"
    if element.is_cast or element.tapered:
        return "sign dot exponent mantissa"
    return "sign integer fraction" if element.exponent_bits == 1 else "sign exponent mantissa"


def as_csv(fmt: Format) -> str:
    """Return all codes of the format's element type as CSV with the columns code, bits, value.

    A further column has the name of the element type if a block can have one of two.
    """
    several = len(fmt.elements) > 1
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("code", "bits", "value", *(["element"] if several else [])))
    for element in fmt.elements:
        name = [element.name] if several else []
        writer.writerows((c.code, c.bits, c.value, *name) for c in code_table(element))
    return text.getvalue().rstrip("\n")


def _bits(code: int, element: CodedElement) -> str:
    digits, parts = f"{code:0{element.bits}b}", []
    for width in field_widths(code, element):
        parts.append(digits[:width])
        digits = digits[width:]
    return " ".join(filter(None, parts))


def _scientific(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return ""
    significand, exponent = math.frexp(value)
    return f"{2 * significand:g} x 2^{exponent - 1}"
