"""Quantize single values with the arithmetic of the fused kernels of `megatron.fake_quant`.

The inputs are the float32 bits of a value and the *scale class* of its block, or class for short.
The class identifies the scale of the block by the byte that the format stores for it. This is an
E8M0 byte in formats with E8M0 scales, the code of an E4M3 number in nvfp4, and 0 in formats without
block scales. Formats that are counted together share one class per block; the E8M0 byte of each
format differs from the class by a constant (see `format_groups.Group.emax`).

The quantized value depends only on the bits and the class, and so does whether the value underflows
or is clipped. Millions of values can therefore be counted by bit pattern and class first, and only
a few thousand combinations need to be quantized.

Quantization takes three steps, all of which operate on magnitudes as float32 bits:

    scaled     the magnitude times the factor `down` of the class
    rounded    the nearest element value, at most the largest number of the element type
    result     `rounded` times the factor `up` of the class, rounded to the dtype of the tensor;
               the sign of the value is restored
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.kernels.compiled import kernel
from megatron.fake_quant import code_points as element_codes
from megatron.fake_quant.elements import Element, ElementFormat
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    as_bits,
    as_float,
    element_bits,
    nearest_even,
)
from megatron.fake_quant.fused.numba_bits import Element as ElementBits
from megatron.fake_quant.fused.numba_blocks import scaled_up
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_elementwise import LARGEST, nearest_hifloat8
from megatron.fake_quant.fused.numba_scales import E4M3, FLOAT32_MAX, Rule, e8m0, make_rule, power
from megatron.fake_quant.rounding import check_rounding
from megatron.fake_quant.scalings.tensor_scale import factors

FLOAT, HIFLOAT8, TO_BFLOAT16, TO_FLOAT16 = 0, 1, 2, 3  #: kinds of element types
AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16 = 0, 1, 2  #: possible dtypes of the result
CLASSES = 256
NAN_E8M0, NAN_E4M3 = 255, 127  #: scale classes of blocks that hold NaN or Inf
#: Bits of the largest float32 that HiFloat8 rounds to its largest number: just below 40960.
_HIFLOAT8_LIMIT = np.int32(np.float32(40960).view(np.int32) - 1)
_DTYPES = {torch.float32: AS_FLOAT32, torch.bfloat16: AS_BFLOAT16, torch.float16: AS_FLOAT16}
_HALF = ElementBits(
    lowest=np.int32((127 - 14) << 23),
    top=np.int32(INFINITY),
    mantissa=np.int32(10 << 23),
    emax=np.int32(15),
    zero_sign=SIGN,
    shifter=np.int32((13 << 23) + (1 << 22)),
)
#: Bits of the smallest float32 that overflows to Inf in float16.
_HALF_OVERFLOW = np.int32(np.float32(65520).view(np.int32))
_NO_RULE = Rule(np.int32(0), np.float32(0), np.float32(1))


class ScalarQuantizer(NamedTuple):
    """Parameters of a format for one tensor, in the form that the kernels require."""

    kind: Any  #: FLOAT, HIFLOAT8, TO_BFLOAT16 or TO_FLOAT16
    dtype: Any  #: dtype of the result: AS_FLOAT32, AS_BFLOAT16 or AS_FLOAT16
    element: ElementBits
    rule: Rule  #: rule that determines the scale of a block from its largest magnitude
    overflow: Any  #: float32 bits of the result of an overflow in HiFloat8
    limit: Any  #: float32 bits of the largest scaled magnitude that is not clipped
    down: Any  #: float32 factors by which values are multiplied before rounding, by scale class
    up: Any  #: float32 factors by which rounded values are multiplied, by scale class
    bytes: Any  #: bytes that the format stores for the scale, by scale class
    codes: Any  #: codes, indexed by the upper half of an element's float32 bits; shape [65536]


@functools.cache
def rounding_limit(element: ElementFormat) -> np.int32:
    """Return the bits of the largest float32 that rounds to the element type's largest number.

    The overflow threshold lies half a step above the largest number. A value equal to the threshold
    is a tie. A tie is rounded down only if ties go to even and the largest number has an even
    mantissa. (Without mantissa bits, it is rounded up.)
    """
    half_step = 1 << (22 - element.mantissa_bits)
    top = int(element_bits(element).top)
    even = element.mantissa_bits > 0 and not top & (2 * half_step)
    down = element.ties == "even" and even
    limit: np.int32 = np.int32(top + half_step - (0 if down else 1))
    return limit


@functools.cache
def code_table(element: Element) -> NDArray[np.int32]:
    """Return a table of element codes, indexed by the upper half of a value's float32 bits.

    Entries that correspond to no element value are 0.
    """
    table = np.zeros(1 << 16, np.int32)
    if element.is_cast:
        return table
    values = element_codes.code_values(element)
    largest = values[
        values.isfinite()
    ].max()  # int8's lowest number, which is less than -largest, is not used
    values = torch.cat([values[values.abs() <= largest], torch.tensor([-0.0])])
    upper = values.view(torch.int32).numpy() >> 16 & 0xFFFF
    table[upper] = element_codes.encode(values, element).numpy()
    return table


def number_of_codes(element: Element) -> int:
    """Return the number of codes of an element type; 0 if they are not counted (bf16, fp16)."""
    return 0 if element.is_cast else 1 << element.bits


def make_quantizer(fmt: Format, dtype: torch.dtype, amax: float, emax: int = 0) -> ScalarQuantizer:
    """Return the parameters with which one tensor is quantized in a round-to-nearest format.

    Args:
        dtype: dtype of the tensor.
        amax: largest magnitude of the tensor.
        emax: exponent for which the classes are computed; see `format_groups.Group.emax`.

    Raises:
        ValueError: if the format does not round to nearest.
    """
    check_rounding(fmt.rounding, ("nearest",), "the count of values by class")
    return _make_quantizer(fmt, dtype, amax if fmt.has_tensor_scale else 0.0, emax)


@functools.lru_cache(maxsize=64)
def _make_quantizer(fmt: Format, dtype: torch.dtype, amax: float, emax: int = 0) -> ScalarQuantizer:
    kind, element, overflow, limit = FLOAT, _HALF, LARGEST, _HIFLOAT8_LIMIT
    if fmt.element.is_cast:
        kind = TO_BFLOAT16 if fmt.element.dtype == torch.bfloat16 else TO_FLOAT16
    elif fmt.element.tapered:
        kind = HIFLOAT8
        overflow = LARGEST if fmt.element.saturates else INFINITY
    else:
        element = element_bits(fmt.element)
        limit = rounding_limit(fmt.element)
    rule = _NO_RULE
    down, up = np.ones(CLASSES, np.float32), np.ones(CLASSES, np.float32)
    stored = np.arange(CLASSES)
    finite_amax = functools.partial(torch.tensor, amax, dtype=torch.float32)
    if fmt.block_size is None:
        down[:], up[:] = factors(fmt, finite_amax)
    else:
        rule = make_rule(fmt, finite_amax)
        if fmt.block_scale == "E8M0":
            stored = np.clip(stored + (emax - int(element.emax)), 0, NAN_E8M0 - 1)
            stored[NAN_E8M0] = NAN_E8M0
        class_scales(stored, rule, down, up)
    table = code_table(fmt.element)
    return ScalarQuantizer(
        kind, _DTYPES[dtype], element, rule, overflow, limit, down, up, stored, table
    )


@kernel
def class_scales(stored: Any, rule: Any, down: Any, up: Any) -> None:
    """Compute the factors by which values of each scale class are multiplied.

    One factor is applied before rounding and one after rounding.

    The factors of blocks that hold NaN or Inf are NaN.

    Args:
        stored: [classes] byte that is stored for the scale.
        down, up: [classes] output arrays for the factors before and after rounding.
    """
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
    """Compute the scale class of each block from its largest magnitude.

    Args:
        amax: [blocks] largest magnitudes, as float32 bits.
        element: element type; for E8M0 scales, with the group's `emax` as its exponent.
        classes: [blocks] output array.
    """
    for i in range(len(amax)):
        if rule.encode == 0:
            byte = e8m0(amax[i], element, rule)
            classes[i] = NAN_E8M0 if byte < 0 else byte
        elif amax[i] >= INFINITY:
            classes[i] = NAN_E4M3
        else:
            wanted = np.float32(as_float(amax[i]) / rule.divisor) * rule.encode
            scaled = min(as_bits(wanted), E4M3.top)
            scale = nearest_even(scaled, E4M3)
            if scale >= E4M3.lowest:
                classes[i] = ((scale >> 23) - 120) << 3 | ((scale >> 20) & 7)
            else:
                classes[i] = np.int32(as_float(scale) * np.float32(512))


@inlined
def to_half(magnitude: Any) -> Any:
    """Round a magnitude to float16; the magnitude may be Inf but not NaN."""
    rounded = magnitude
    if magnitude < INFINITY:
        rounded = INFINITY if magnitude >= _HALF_OVERFLOW else nearest_even(magnitude, _HALF)
    return np.int32(rounded)


@inlined
def to_bfloat16(bits: Any) -> Any:
    """Round a finite number or Inf to bfloat16; ties go to even."""
    return np.int32(np.int32(bits + 0x7FFF + ((bits >> 16) & 1)) & np.int32(-65536))


@inlined
def scaled_magnitude(bits: Any, class_: Any, quantizer: Any) -> Any:
    """Return a value's magnitude, scaled to the range of the element type but not yet clipped."""
    return as_bits(as_float(np.int32(bits & MAGNITUDE)) * quantizer.down[class_])


@inlined
def element_magnitude(scaled: Any, quantizer: Any) -> Any:
    """Round a scaled magnitude to the element type; HiFloat8, bf16 and fp16 may overflow to Inf."""
    if quantizer.kind == FLOAT:
        return nearest_even(min(scaled, quantizer.element.top), quantizer.element)
    if quantizer.kind == HIFLOAT8:
        rounded = nearest_hifloat8(min(scaled, np.int32(LARGEST + (1 << 23))))
        return quantizer.overflow if rounded > LARGEST else rounded
    if quantizer.kind == TO_BFLOAT16:
        return np.int32(to_bfloat16(scaled))
    return to_half(scaled)


@inlined
def is_clipped(scaled: Any, quantizer: Any) -> Any:
    """Return whether a scaled magnitude is beyond the overflow threshold of the element type."""
    if quantizer.kind == FLOAT or quantizer.kind == HIFLOAT8:
        return scaled > quantizer.limit
    return element_magnitude(scaled, quantizer) == INFINITY


@inlined
def result_bits(rounded: Any, bits: Any, class_: Any, quantizer: Any) -> Any:
    """Return the quantized value that `fake_quantize` computes, as float32 bits.

    Args:
        rounded: element magnitude of the value.
        bits: float32 bits of the original value, which determine the sign.
    """
    up = quantizer.up[class_]
    if quantizer.kind == FLOAT:
        value = scaled_up(rounded, bits, up, quantizer.rule.decode, quantizer.element)
    else:
        sign = np.int32(bits & SIGN) if rounded != 0 or quantizer.kind != HIFLOAT8 else np.int32(0)
        value = np.int32(as_bits(as_float(rounded) * up) | sign)
    if quantizer.dtype == AS_BFLOAT16:
        return to_bfloat16(value)
    if quantizer.dtype == AS_FLOAT16:
        return np.int32(to_half(np.int32(value & MAGNITUDE)) | np.int32(value & SIGN))
    return value


@kernel
def quantized(bits: Any, class_: Any, quantizer: Any) -> Any:
    """Return a quantized value (float32 bits), its element magnitude, and whether it is clipped.

    This function runs for every float32 value. It is not inlined, so that numba compiles it only
    once. Values whose scale is zero underflow and should not count as clipped. Checking the scale
    here would need a second table lookup, which makes the function 2.4 times slower; `account`
    recognizes these values by their result.
    """
    scaled = scaled_magnitude(bits, class_, quantizer)
    rounded = np.int32(element_magnitude(scaled, quantizer))
    return (
        np.int32(result_bits(rounded, bits, class_, quantizer)),
        rounded,
        is_clipped(scaled, quantizer),
    )
