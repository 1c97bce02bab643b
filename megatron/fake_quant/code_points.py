"""Convert between the codes (bit patterns) of an element type and their values."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.fake_quant.elements import (
    CodedElement,
    Element,
    ElementFormat,
    HiFloat8,
    TableElement,
)

HIFLOAT8_NAN, HIFLOAT8_INF = 0x80, 0x6F
#: First code, number of exponent bits and number of mantissa bits for each HiFloat8 dot field that
#: is followed by exponent bits. See `hifloat8.py`.
HIFLOAT8_DOTS = ((0x60, 4, 1), (0x40, 3, 2), (0x20, 2, 3), (0x10, 1, 3))
_DENORMAL_DOT = 4  #: number of bits of HiFloat8's longest dot fields, which no exponent follows


@functools.cache
def code_values(element: Element) -> Tensor:
    """Return the values of all codes of an element type, as a float32 CPU tensor `[2^bits]`.

    Raises:
        ValueError: if the element type is a cast, which has no table of codes.
    """
    if element.is_cast:
        raise ValueError(f"{element.name} has no table of codes here; use x.to({element.dtype})")
    return torch.tensor(_CODES[type(element)].values(element), dtype=torch.float32, device="cpu")


def _element_values(element: ElementFormat) -> list[float]:
    if element.twos_complement:
        step = math.ldexp(1, element.emin - element.mantissa_bits)
        half = 1 << (element.bits - 1)
        return [step * (code - 2 * half if code >= half else code) for code in range(2 * half)]
    count = 1 << (element.exponent_bits + element.mantissa_bits)
    positive = [_magnitude(code, element) for code in range(count)]
    return [*positive, *(-value for value in positive)] if element.signed else positive


def _element_widths(code: int, element: ElementFormat) -> tuple[int, ...]:
    return 1, element.exponent_bits, element.mantissa_bits


def _magnitude(code: int, element: ElementFormat) -> float:
    """Return the number that a code stands for; `code` must not include the sign bit."""
    exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
    implicit = (1 << element.mantissa_bits) if exponent else 0
    value = math.ldexp(implicit + mantissa, max(exponent, 1) - element.bias - element.mantissa_bits)
    if value <= element.max:
        return value
    return math.nan if mantissa else math.inf


def _hifloat8_value(code: int) -> float:
    """Return the number that a HiFloat8 code stands for (arXiv 2409.16626, table 1)."""
    if code == HIFLOAT8_NAN:
        return math.nan
    sign, magnitude = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if magnitude == HIFLOAT8_INF:
        return sign * math.inf
    if magnitude < 8:
        return sign * math.ldexp(1, magnitude - 23) if magnitude else 0.0
    if magnitude < 16:
        width, exponent, bits = 0, 0, 3
    else:
        # The dot fields 11, 10, 01 and 001 are followed by exponents of 4, 3, 2 and 1 bits. The
        # first bit of an exponent is its sign.
        _, width, bits = next(dot for dot in HIFLOAT8_DOTS if magnitude >= dot[0])
        field = magnitude >> bits & ((1 << width) - 1)
        leading = 1 << (width - 1)
        exponent = (leading | field & (leading - 1)) * (-1 if field & leading else 1)
    mantissa = magnitude & ((1 << bits) - 1)
    return sign * math.ldexp(1 + mantissa / (1 << bits), exponent)


def _hifloat8_widths(code: int, element: HiFloat8) -> tuple[int, ...]:
    magnitude = code & 0x7F
    for first, exponent, mantissa in HIFLOAT8_DOTS:
        if magnitude >= first:
            return 1, 7 - exponent - mantissa, exponent, mantissa
    return 1, _DENORMAL_DOT, 0, 7 - _DENORMAL_DOT


@dataclass(frozen=True, slots=True)
class _Codes:
    """Functions that decode the codes of all element types of one Python class."""

    values: Callable[..., list[float]]  #: function that returns the values of all codes
    widths: Callable[..., tuple[int, ...]]  #: function that returns a code's field widths


_CODES: Mapping[type, _Codes] = MappingProxyType(
    {
        ElementFormat: _Codes(_element_values, _element_widths),
        HiFloat8: _Codes(
            lambda element: [_hifloat8_value(code) for code in range(256)], _hifloat8_widths
        ),
        TableElement: _Codes(
            lambda element: list(element.values), lambda code, element: (element.bits,)
        ),
    }
)


def field_widths(code: int, element: CodedElement) -> tuple[int, ...]:
    """Return the number of bits in each bit field of a code.

    The fields are sign, dot (in HiFloat8 only), exponent and mantissa; or the position in a table.
    """
    return _CODES[type(element)].widths(code, element)


@functools.cache
def _positive(element: CodedElement) -> tuple[Tensor, Tensor]:
    """Return the sorted values of an element type from 0 to Inf, and their codes."""
    values = code_values(element)
    codes = torch.arange(len(values), device=values.device)
    chosen = (values >= 0) & ~torch.signbit(values)
    order = values[chosen].argsort()
    return values[chosen][order].contiguous(), codes[chosen][order].to(torch.uint8)


@functools.cache
def nan_code(element: CodedElement) -> int | None:
    """Return the code for NaN, or None if the element type has no NaN."""
    codes = code_values(element).isnan().nonzero().flatten().tolist()
    if not codes:
        return None
    # Of E5M2's three positive NaN codes, torch and ml_dtypes write the last one.
    return int(codes[len(codes) // 2 - 1]) if len(codes) > 1 else int(codes[0])


def encode(values: Tensor, element: CodedElement) -> Tensor:
    """Return the uint8 codes of float32 `values`, which must all be values of the element type.

    NaN becomes the code for NaN. If the element type has no NaN, it becomes the code for zero; the
    scale of its block is NaN in this case.
    """
    if element.is_table:
        table = code_values(element).to(values.device)
        return torch.searchsorted(table, values.nan_to_num(0.0).contiguous()).to(torch.uint8)
    numbers, codes = (table.to(values.device) for table in _positive(element))
    magnitude = values.abs().nan_to_num_(0.0, posinf=math.inf)
    result = codes[torch.searchsorted(numbers, magnitude.contiguous())]
    negative = torch.signbit(values) & ~values.isnan()
    if element.twos_complement:
        result = torch.where(negative, result.neg() & ((1 << element.bits) - 1), result)
    else:
        if not element.negative_zero:
            negative &= magnitude > 0
        result = result | (negative.to(torch.uint8) << (element.bits - 1))
    nan = nan_code(element)
    return result if nan is None else result.masked_fill_(values.isnan(), nan)


def decode(codes: Tensor, element: CodedElement) -> Tensor:
    """Return the float32 values that uint8 `codes` stand for."""
    return code_values(element).to(codes.device)[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte along the last axis, with the first code in the low half.

    The result has the shape `[..., ceil(n / 2)]`. If n is odd, the last high half is zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = torch.unflatten(codes, -1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """Undo `pack_nibbles`; `count` is the length of the last axis before packing."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]
