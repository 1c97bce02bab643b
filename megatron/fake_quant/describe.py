"""The formats as a table, from the same data that quantizes."""

import math
from collections.abc import Iterable, Sequence

import torch

from megatron.fake_quant.formats import Cast, ElementFormat, Format, HiFloat8
from megatron.fake_quant.hifloat8 import LARGEST_EXPONENT, SMALLEST_EXPONENT
from megatron.fake_quant.names import ALIASES

SCALE_BITS = 8  #: of an E8M0 block scale
HEADER = (
    "format", "also", "bits a value", "largest", "smallest normal", "smallest", "block",
    "ties, overflow",
)  # fmt: skip


def _power(x: float) -> str:
    """A power of two as one; anything else as it is."""
    mantissa, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= x <= 1024 else f"{x:.9g}"


def _element(element: ElementFormat | HiFloat8 | Cast) -> tuple[int, float, float, float, str]:
    """Bits, largest, smallest normal and smallest positive value, and how it rounds."""
    if isinstance(element, HiFloat8):
        overflow = "to ±32768" if element.overflow == "saturate" else "to Inf"
        largest, smallest = math.ldexp(1, LARGEST_EXPONENT), math.ldexp(1, SMALLEST_EXPONENT)
        return 8, largest, math.ldexp(1, -LARGEST_EXPONENT), smallest, f"away from zero, {overflow}"
    if isinstance(element, Cast):
        info = torch.finfo(element.dtype)
        return info.bits, info.max, info.tiny, info.smallest_normal * info.eps, "even, to Inf"
    normal = math.ldexp(1, element.emin)
    subnormal = math.ldexp(1, element.emin - element.mantissa_bits)
    return element.bits, element.max, normal, subnormal, "even, saturates"


def row(fmt: Format) -> tuple[str, ...]:
    """One format's cells, in the order of `HEADER`."""
    bits, largest, normal, smallest, rounding = _element(fmt.element)
    block = "none"
    stored = float(bits)
    if fmt.scaling is not None:
        block = f"{fmt.scaling.size}, E8M0 scale, {fmt.scaling.rule}"
        stored += SCALE_BITS / fmt.scaling.size
    aliases = ", ".join(alias for alias, name in ALIASES.items() if name == fmt.name)
    numbers = (f"{stored:g}", _power(largest), _power(normal), _power(smallest))
    return (fmt.name, aliases, *numbers, block, rounding)


def markdown(formats: Iterable[Format]) -> str:
    """A Markdown table of the formats."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return "\n".join(
        [line(HEADER), "|" + " --- |" * len(HEADER), *(line(row(fmt)) for fmt in formats)]
    )
