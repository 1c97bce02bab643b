"""What each code of an element means, as a table: for people, and as CSV for programs."""

import csv
import io
import math
from dataclasses import dataclass

from megatron.fake_quant.code_points import HIFLOAT8_DOTS, code_values
from megatron.fake_quant.formats import Cast, Element, ElementFormat, Format, HiFloat8
from megatron.fake_quant.inspect.format_table import markdown_table

_DENORMAL_DOT = 4  #: bits of HiFloat8's longest dots, which no exponent follows


@dataclass(frozen=True, slots=True)
class Code:
    """One code of an element, in writing."""

    code: str  #: hexadecimal
    bits: str  #: sign, exponent and mantissa apart; in HiFloat8 the dot before the exponent
    value: str  #: the shortest decimal that is this number
    scientific: str  #: significand times a power of two; empty where there is none


def code_table(element: Element) -> list[Code]:
    """All codes, ascending.

    Raises:
        ValueError: the element is a cast, see `code_values`.
    """
    if isinstance(element, Cast):
        raise ValueError(
            f"{element.name} is a cast of torch's with 2^{element.bits} codes, not for a table; "
            f"see one by torch.tensor(CODE, dtype=torch.uint{element.bits}).view({element.dtype})"
        )
    digits = -(-element.bits // 4)
    return [
        Code(f"0x{code:0{digits}X}", _bits(code, element), repr(value), _scientific(value))
        for code, value in enumerate(code_values(element).tolist())
    ]


def markdown(fmt: Format) -> str:
    """A Markdown table of the codes of the format's element."""
    rows = [(c.code, c.bits, c.value, c.scientific) for c in code_table(fmt.element)]
    return markdown_table(("code", _parts(fmt.element), "value", "that is"), rows)


def _parts(element: Element) -> str:
    """What `bits` is made of."""
    if isinstance(element, HiFloat8):
        return "sign dot exponent mantissa"
    fixed = isinstance(element, ElementFormat) and element.exponent_bits == 1
    return "sign integer fraction" if fixed else "sign exponent mantissa"


def as_csv(fmt: Format) -> str:
    """Comma-separated: code, bits, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("code", "bits", "value"))
    writer.writerows((c.code, c.bits, c.value) for c in code_table(fmt.element))
    return text.getvalue().rstrip("\n")


def _bits(code: int, element: ElementFormat | HiFloat8) -> str:
    digits, parts = f"{code:0{element.bits}b}", []
    for width in _widths(code, element):
        parts.append(digits[:width])
        digits = digits[width:]
    return " ".join(filter(None, parts))


def _widths(code: int, element: ElementFormat | HiFloat8) -> tuple[int, ...]:
    """How many bits each part of a code has."""
    if isinstance(element, ElementFormat):
        return 1, element.exponent_bits, element.mantissa_bits
    magnitude = code & 0x7F
    for first, exponent, mantissa in HIFLOAT8_DOTS:
        if magnitude >= first:
            return 1, 7 - exponent - mantissa, exponent, mantissa
    return 1, _DENORMAL_DOT, 0, 7 - _DENORMAL_DOT


def _scientific(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return ""
    significand, exponent = math.frexp(value)
    return f"{2 * significand:g} x 2^{exponent - 1}"
