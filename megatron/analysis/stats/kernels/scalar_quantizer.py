"""Quantize one value at a time, with the arithmetic of the fused kernels of `megatron.fake_quant`.

The scale of a block is given by its *class*.

A class stands for the byte that the format stores for the block's scale. It is an E8M0 byte in
formats with E8M0 scales, the code of an E4M3 number in nvfp4, and 0 in formats without block
scales. Formats that are counted together share an E8M0 byte, from which that of each format differs
by a constant. What a value becomes, and whether it underflows or is clipped, depends only on its
bits and its class. Values can therefore be counted by class and bit pattern first and quantized
afterwards, a few thousand instead of millions.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.fake_quant import code_points as element_codes
from megatron.fake_quant.formats import (
    BlockScaling,
    Cast,
    Element,
    ElementFormat,
    Format,
    HiFloat8,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    as_bits,
    as_float,
    inlined,
    nearest_even,
)
from megatron.fake_quant.fused.numba_bits import Element as ElementBits
from megatron.fake_quant.fused.numba_blocks import E4M3, FLOAT32_MAX, Rule, e8m0, power, scaled_up
from megatron.fake_quant.fused.numba_elementwise import LARGEST, nearest_hifloat8
from megatron.fake_quant.mx import CARRY_FROM
from megatron.fake_quant.nvfp4 import LARGEST as NVFP4_LARGEST
from megatron.fake_quant.nvfp4 import SIXTH
from megatron.fake_quant.tensor_scale import divide_by, encode_scale

FLOAT, HIFLOAT8, TO_BFLOAT16, TO_FLOAT16 = 0, 1, 2, 3  #: kinds of elements
AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16 = 0, 1, 2  #: dtypes of the result
CLASSES = 256
NAN_E8M0, NAN_E4M3 = 255, 127
#: The largest float32 magnitude that HiFloat8 rounds to its largest number; 40960 overflows.
_HIFLOAT8_LIMIT = np.int32(np.float32(40960).view(np.int32) - 1)
_DTYPES = {torch.float32: AS_FLOAT32, torch.bfloat16: AS_BFLOAT16, torch.float16: AS_FLOAT16}
_HALF = ElementBits(
    np.int32((127 - 14) << 23), np.int32(INFINITY), np.int32(10 << 23), np.int32(15), SIGN
)
_HALF_OVERFLOW = np.int32(np.float32(65520).view(np.int32))  #: rounds to Inf in float16
_NO_RULE = Rule(np.int32(0), np.float32(0), np.float32(1))


class ScalarQuantizer(NamedTuple):
    """A format for one tensor, as the kernels take it."""

    kind: Any  #: FLOAT, HIFLOAT8, TO_BFLOAT16 or TO_FLOAT16
    dtype: Any  #: of the result: AS_FLOAT32, AS_BFLOAT16 or AS_FLOAT16
    element: ElementBits
    rule: Rule
    beyond: Any  #: HiFloat8: what overflows becomes
    limit: Any  #: the largest scaled magnitude that still rounds to the largest number
    down: Any  #: [classes] float32: what a value is multiplied by before rounding
    up: Any  #: [classes] float32: and after it
    bytes: Any  #: [classes] stored byte of the scale
    codes: Any  #: [65536] code of an element value by the upper half of its float32 bits


def bits_of(value: float) -> np.int32:
    """Of the float32."""
    found: np.int32 = np.float32(value).view(np.int32)
    return found


@functools.cache
def element_bits(element: ElementFormat) -> ElementBits:
    """An element as the fused kernels take it."""
    return ElementBits(
        lowest=bits_of(math.ldexp(1, element.emin)),
        top=bits_of(element.max),
        mantissa=np.int32(element.mantissa_bits << 23),
        emax=np.int32(element.emax),
        zero_sign=np.int32(0) if element.twos_complement else SIGN,
    )


@functools.cache
def rounding_limit(element: ElementFormat) -> np.int32:
    """Return the bits of the largest float32 that rounds to the element's largest number.

    The rounding edge lies half a step above that number. A value on the edge belongs to the largest
    number only if the tie goes down, which it does to an even mantissa. (Without a mantissa it goes
    up.)
    """
    half_step = 1 << (22 - element.mantissa_bits)
    top = int(bits_of(element.max))
    even = element.mantissa_bits > 0 and not top & (2 * half_step)
    down = element.ties == "even" and even
    limit: np.int32 = np.int32(top + half_step - (0 if down else 1))
    return limit


@functools.cache
def code_table(element: Element) -> NDArray[np.int32]:
    """Code of each element value by the upper half of its float32 bits; 0 for what is none."""
    table = np.zeros(1 << 16, np.int32)
    if isinstance(element, Cast):
        return table
    values = element_codes.code_values(element)
    largest = values[values.isfinite()].max()  # int8 has a number below minus that, never used
    values = torch.cat([values[values.abs() <= largest], torch.tensor([-0.0])])
    upper = values.view(torch.int32).numpy() >> 16 & 0xFFFF
    table[upper] = element_codes.encode(values, element).numpy()
    return table


def number_of_codes(element: Element) -> int:
    """How many codes an element has; 0 for a cast, whose codes are not counted."""
    return 0 if isinstance(element, Cast) else 1 << element.bits


def make_coder(fmt: Format, dtype: torch.dtype, amax: float, emax: int = 0) -> ScalarQuantizer:
    """The coder of a format that rounds to nearest, for a tensor with this largest magnitude.

    emax: of the group's classes, see `plan.Group`.
    """
    follows = isinstance(fmt.scaling, (TensorScaling, TwoLevelScaling))
    return _make_coder(fmt, dtype, amax if follows else 0.0, emax)


@functools.lru_cache(maxsize=64)
def _make_coder(fmt: Format, dtype: torch.dtype, amax: float, emax: int = 0) -> ScalarQuantizer:
    kind, element, beyond, limit = FLOAT, _HALF, LARGEST, _HIFLOAT8_LIMIT
    if isinstance(fmt.element, ElementFormat):
        element = element_bits(fmt.element)
        limit = rounding_limit(fmt.element)
    elif isinstance(fmt.element, HiFloat8):
        kind = HIFLOAT8
        beyond = LARGEST if fmt.element.overflow == "saturate" else INFINITY
    else:
        kind = TO_BFLOAT16 if fmt.element.dtype == torch.bfloat16 else TO_FLOAT16
    rule = _rule(fmt, amax)
    down, up = np.ones(CLASSES, np.float32), np.ones(CLASSES, np.float32)
    stored = np.arange(CLASSES)
    if isinstance(fmt.scaling, TensorScaling):
        encode = encode_scale(torch.tensor(amax, dtype=torch.float32), fmt.scaling)
        down[:], up[:] = encode.item(), encode.reciprocal().item()
    elif fmt.scaling is not None:
        if isinstance(fmt.scaling, BlockScaling):
            stored = np.clip(stored + (emax - int(element.emax)), 0, NAN_E8M0 - 1)
            stored[NAN_E8M0] = NAN_E8M0
        class_scales(stored, rule, down, up)
    table = code_table(fmt.element)
    return ScalarQuantizer(
        kind, _DTYPES[dtype], element, rule, beyond, limit, down, up, stored, table
    )


def _rule(fmt: Format, amax: float) -> Rule:
    if isinstance(fmt.scaling, BlockScaling):
        assert isinstance(fmt.element, ElementFormat)
        significand = CARRY_FROM[fmt.scaling.rule](fmt.element)  # in [0.5, 1]
        carry_from = int(math.ldexp(significand, 24)) - (1 << 23)
        return Rule(np.int32(carry_from), np.float32(0), np.float32(1))
    if isinstance(fmt.scaling, TwoLevelScaling):
        whole = divide_by(torch.tensor(amax, dtype=torch.float32), NVFP4_LARGEST)
        sixth, decode = (whole * SIXTH).item(), whole.reciprocal().item()
        return Rule(np.int32(0), np.float32(sixth), np.float32(decode))
    return _NO_RULE


@kernel
def class_scales(stored: Any, rule: Any, down: Any, up: Any) -> None:
    """What the values of each class are multiplied by; NaN for the class of NaN."""
    for c in range(CLASSES):
        if rule.encode == 0:
            byte = stored[c]
            down[c] = power(254 - byte) if byte < NAN_E8M0 else as_float(NAN)
            up[c] = power(byte) if byte < NAN_E8M0 else as_float(NAN)
        elif c >= NAN_E4M3:
            down[c] = up[c] = as_float(NAN)
        else:
            field, mantissa = c >> 3, c & 7
            whole = mantissa + (8 if field > 0 else 0)
            up[c] = np.float32(whole) * as_float(np.int32((max(field, 1) - 10 + 127) << 23))
            down[c] = min(np.float32(1) / np.float32(up[c] * rule.decode), FLOAT32_MAX)


@kernel
def classify(amax: Any, element: Any, rule: Any, classes: Any) -> None:
    """The class of each block, from the float32 bits of its largest magnitude; both flat.

    element: of E8M0 scales with the exponent that the group's classes have.
    """
    for i in range(len(amax)):
        if rule.encode == 0:
            byte = e8m0(amax[i], element, rule)
            classes[i] = NAN_E8M0 if byte < 0 else byte
        elif amax[i] >= INFINITY:
            classes[i] = NAN_E4M3
        else:
            scaled = min(as_bits(as_float(amax[i]) * rule.encode), E4M3.top)
            scale = nearest_even(scaled, E4M3)
            if scale >= E4M3.lowest:
                classes[i] = ((scale >> 23) - 120) << 3 | ((scale >> 20) & 7)
            else:
                classes[i] = np.int32(as_float(scale) * np.float32(512))


@inlined
def to_half(magnitude: Any) -> Any:
    """A finite or infinite magnitude as float16 has it."""
    rounded = magnitude
    if magnitude < INFINITY:
        rounded = INFINITY if magnitude >= _HALF_OVERFLOW else nearest_even(magnitude, _HALF)
    return np.int32(rounded)


@inlined
def to_bfloat16(bits: Any) -> Any:
    """Of a number or Inf."""
    return np.int32(np.int32(bits + 0x7FFF + ((bits >> 16) & 1)) & np.int32(-65536))


@inlined
def scaled_magnitude(bits: Any, class_: Any, coder: Any) -> Any:
    """In the range of the elements, before anything saturates."""
    return as_bits(as_float(np.int32(bits & MAGNITUDE)) * coder.down[class_])


@inlined
def element_magnitude(scaled: Any, coder: Any) -> Any:
    """Rounded to the element; of HiFloat8 what is beyond it may be Inf."""
    if coder.kind == FLOAT:
        return nearest_even(min(scaled, coder.element.top), coder.element)
    if coder.kind == HIFLOAT8:
        rounded = nearest_hifloat8(min(scaled, np.int32(LARGEST + (1 << 23))))
        return coder.beyond if rounded > LARGEST else rounded
    if coder.kind == TO_BFLOAT16:
        return np.int32(to_bfloat16(scaled))
    return to_half(scaled)


@inlined
def is_beyond(scaled: Any, coder: Any) -> Any:
    """Return whether a scaled magnitude lies beyond the rounding edge of the largest number."""
    if coder.kind == FLOAT or coder.kind == HIFLOAT8:
        return scaled > coder.limit
    return element_magnitude(scaled, coder) == INFINITY


@inlined
def result_bits(rounded: Any, bits: Any, class_: Any, coder: Any) -> Any:
    """What `fake_quantize` gives for a number, from its element's magnitude, in float32 bits."""
    up = coder.up[class_]
    if coder.kind == FLOAT:
        value = scaled_up(rounded, bits, up, SIGN, coder.element, coder.rule)
    else:
        sign = np.int32(bits & SIGN) if rounded != 0 or coder.kind != HIFLOAT8 else np.int32(0)
        value = np.int32(as_bits(as_float(rounded) * up) | sign)
    if coder.dtype == AS_BFLOAT16:
        return to_bfloat16(value)
    if coder.dtype == AS_FLOAT16:
        return np.int32(to_half(np.int32(value & MAGNITUDE)) | np.int32(value & SIGN))
    return value


@kernel
def quantized(bits: Any, class_: Any, coder: Any) -> Any:
    """Return a quantized value (float32 bits), its element's magnitude, and whether it is beyond
    the largest number.

    The function is not inlined by numba, so that it is compiled once. It runs for every float32
    value. Excluding values under a scale of zero would need a second table lookup here, which takes
    2.4 times as long; `account` recognizes them without it.
    """
    scaled = scaled_magnitude(bits, class_, coder)
    rounded = np.int32(element_magnitude(scaled, coder))
    return np.int32(result_bits(rounded, bits, class_, coder)), rounded, is_beyond(scaled, coder)
