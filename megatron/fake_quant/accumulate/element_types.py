"""Find an element type by its name, and check that a tensor has values of this type.

The types are the element types of the project's formats, by the names that `Element.name` returns
(e4m3, bfloat16, hif8, nf4, ...), AMD's types e4m3fnuz and e5m2fnuz, and float32.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.elements import (
    TABLES,
    Cast,
    Element,
    ElementFormat,
    HiFloat8,
    TableElement,
)
from megatron.fake_quant.names import get_element
from megatron.fake_quant.rounding import round_to

_FNUZ: tuple[Element, ...] = (
    ElementFormat("e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, max=240.0),
    ElementFormat("e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, max=57344.0),
)
_CASTS: tuple[Element, ...] = (Cast(torch.bfloat16), Cast(torch.float16), Cast(torch.float32))
#: Element types besides the `eXmY` types, by name. AMD's FP8 types on CDNA3 have no Inf, and their
#: exponent bias is one larger than that of OCP's types.
_OTHERS: Mapping[str, Element] = MappingProxyType(
    {element.name: element for element in (*_FNUZ, *_CASTS, HiFloat8(), *map(TableElement, TABLES))}
)
_WITH_INFINITY = ("e5m2", "bfloat16", "float16", "float32")


def get_element_type(name: str) -> Element:
    """Return the element type with the given name.

    Raises:
        ValueError: if there is no such element type; the message lists the accepted names.
    """
    if name in _OTHERS:
        return _OTHERS[name]
    try:
        return get_element(name)
    except ValueError as error:
        raise ValueError(f"{error}; or {', '.join(_OTHERS)}") from None


def smallest_exponent(name: str) -> int:
    """Return the exponent of the smallest normal number of the element type `name`."""
    return math.frexp(get_element_type(name).smallest_normal)[1] - 1


def check_accepted(accumulator: Accumulator, names: tuple[str, str]) -> None:
    """Refuse element types that the unit of an accumulator does not multiply with each other.

    Raises:
        ValueError: if the unit does not multiply them; the message gives the reason.
    """
    for name in names:
        element = get_element_type(name)
        if isinstance(element, HiFloat8) and accumulator.elements:
            raise ValueError(
                f"the accumulator {accumulator.name} does not multiply HiFloat8; no description of "
                "a matrix unit that multiplies HiFloat8 is public, so use the accumulator fp32"
            )
        if accumulator.elements and name not in accumulator.elements:
            raise ValueError(
                f"the accumulator {accumulator.name} does not multiply {name} elements; it "
                f"multiplies {', '.join(accumulator.elements)}"
            )
    if names[0] != names[1] and not accumulator.mixes:
        raise ValueError(
            f"the accumulator {accumulator.name} does not multiply {names[0]} by {names[1]} "
            "elements; give both operands the same type"
        )


def check_values(x: Tensor, name: str, operand: str) -> None:
    """Refuse a tensor with a value that is not a number of the element type `name`.

    Raises:
        ValueError: if there is such a value; the message shows it and calls the tensor `operand`.
    """
    element = get_element_type(name)
    rounded = x.to(element.dtype).to(x.dtype) if isinstance(element, Cast) else round_to(x, element)
    wrong = (rounded != x) & ~x.isnan()
    if name in _WITH_INFINITY:
        wrong &= ~x.isinf()
    if wrong.any():
        raise ValueError(
            f"{operand} contains {x[wrong][0].item():g}, which is not a number of the element "
            f"type {name}; pass elements without their scales, and name their types, as in "
            'elements=("e4m3", "e5m2")'
        )
