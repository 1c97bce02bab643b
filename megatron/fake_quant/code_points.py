"""What each code of an element means, and the code of each value."""

import functools
import math

import torch
from torch import Tensor

from megatron.fake_quant.formats import Cast, Element, ElementFormat, HiFloat8

HIFLOAT8_NAN, HIFLOAT8_INF = 0x80, 0x6F
#: First code, bits of the exponent, bits of the mantissa.
HIFLOAT8_DOTS = ((0x60, 4, 1), (0x40, 3, 2), (0x20, 2, 3), (0x10, 1, 3))


@functools.cache
def code_values(element: Element) -> Tensor:
    """The float32 number that each code stands for, by code: `[2^bits]`, on the CPU.

    Raises:
        ValueError: the element is a cast, whose codes torch has.
    """
    if isinstance(element, Cast):
        raise ValueError(f"{element.name} has no table of codes here; use x.to({element.dtype})")
    if isinstance(element, HiFloat8):
        values = [_hifloat8_value(code) for code in range(256)]
    elif element.twos_complement:
        step = math.ldexp(1, element.emin - element.mantissa_bits)
        half = 1 << (element.bits - 1)
        values = [step * (code - 2 * half if code >= half else code) for code in range(2 * half)]
    else:
        positive = [_magnitude(code, element) for code in range(1 << (element.bits - 1))]
        values = [*positive, *(-value for value in positive)]
    return torch.tensor(values, dtype=torch.float32)


def _magnitude(code: int, element: ElementFormat) -> float:
    """What a code without its sign bit stands for."""
    exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
    implicit = (1 << element.mantissa_bits) if exponent else 0
    value = math.ldexp(implicit + mantissa, max(exponent, 1) - element.bias - element.mantissa_bits)
    if value <= element.max:
        return value
    return math.nan if mantissa else math.inf


def _hifloat8_value(code: int) -> float:
    """Reads sign, dot, exponent and mantissa off a code: arXiv 2409.16626, table 1."""
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
        # The dots 11, 10, 01 and 001 stand for exponents of 4 to 1 bits, the first their sign.
        _, width, bits = next(dot for dot in HIFLOAT8_DOTS if magnitude >= dot[0])
        field = magnitude >> bits & ((1 << width) - 1)
        leading = 1 << (width - 1)
        exponent = (leading | field & (leading - 1)) * (-1 if field & leading else 1)
    mantissa = magnitude & ((1 << bits) - 1)
    return sign * math.ldexp(1 + mantissa / (1 << bits), exponent)


@functools.cache
def _positive(element: ElementFormat | HiFloat8) -> tuple[Tensor, Tensor]:
    """The numbers >= 0 (and Inf) that have codes, ascending, and these codes."""
    values = code_values(element)
    codes = torch.arange(len(values))
    chosen = (values >= 0) & ~torch.signbit(values)
    order = values[chosen].argsort()
    return values[chosen][order].contiguous(), codes[chosen][order].to(torch.uint8)


@functools.cache
def nan_code(element: ElementFormat | HiFloat8) -> int | None:
    """The code for NaN, None where there is none."""
    codes = code_values(element).isnan().nonzero().flatten().tolist()
    if not codes:
        return None
    # E5M2 has three a sign; the last is the one that torch and ml_dtypes write.
    return int(codes[len(codes) // 2 - 1]) if len(codes) > 1 else int(codes[0])


def encode(values: Tensor, element: ElementFormat | HiFloat8) -> Tensor:
    """The uint8 codes of float32 `values`, each of which must be one of the element's.

    NaN becomes the element's NaN, or zero where it has none: its block's scale says NaN then.
    """
    numbers, codes = (table.to(values.device) for table in _positive(element))
    magnitude = values.abs().nan_to_num_(0.0, posinf=math.inf)
    found = codes[torch.searchsorted(numbers, magnitude.contiguous())]
    negative = torch.signbit(values) & ~values.isnan()
    if isinstance(element, HiFloat8):
        found = found | ((negative & (magnitude > 0)).to(torch.uint8) << 7)
    elif element.twos_complement:
        found = torch.where(negative, found.neg(), found)
    else:
        found = found | (negative.to(torch.uint8) << (element.bits - 1))
    nan = nan_code(element)
    return found if nan is None else found.masked_fill_(values.isnan(), nan)


def decode(codes: Tensor, element: ElementFormat | HiFloat8) -> Tensor:
    """The float32 values of uint8 `codes`."""
    return code_values(element).to(codes.device)[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte along the last axis, the first in the low half: `[..., ceil(n / 2)]`.

    An odd end is filled with zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = torch.unflatten(codes, -1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """Undo `pack_nibbles`; `count` is the length of the last axis."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]
