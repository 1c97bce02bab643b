"""CPU kernels for formats with block scales.

They make one pass over memory and allocate no temporary tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant import float8_scales
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.float8_scales import SIXTH
from megatron.fake_quant.formats import ElementFormat, Format
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    NAN,
    ONE,
    SIGN,
    ZERO,
    Element,
    as_bits,
    as_float,
    fill_random,
    kernel,
    narrow,
    nearest_even,
    stochastic,
    widen,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.mx import carry_bits
from megatron.fake_quant.tensor_scale import divide_by

FRACTION = np.int32(0x7FFFFF)
HALF_POWER = np.int32(1 << 22)  #: bits of 2^-127
FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
COLUMNS = 512  #: number of columns in a tile, so few that its rows stay in the cache
E4M3 = Element(
    np.int32((127 - 6) << 23),
    np.int32((127 + 8) << 23 | 6 << 20),
    np.int32(3 << 23),
    np.int32(8),
    SIGN,
)


class Rule(NamedTuple):
    """Constants for computing a block's scale from the block's largest magnitude."""

    #: E8M0: if the mantissa of a block's maximum is at least this large, the scale is doubled
    carry_from: np.int32
    encode: np.float32  #: E4M3: a block's maximum times this is its scale; 0 for E8M0
    decode: np.float32  #: E4M3: decode factor of the tensor; 1 for E8M0
    divisor: np.float32 = ONE  #: E4M3: divisor of a block's maximum, before `encode`


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants for computing the E8M0 or E4M3 block scales of a format.

    finite_amax: function that returns the tensor's largest finite magnitude; called only if the
        format has a tensor scale.
    """
    if fmt.scale_rule is not None:
        return Rule(np.int32(carry_bits(fmt)), np.float32(0), np.float32(1))
    assert isinstance(fmt.scaling, BlockScaling)
    assert isinstance(fmt.element, ElementFormat)
    divisor = np.float32(float8_scales.top(fmt.scaling, fmt.element))
    if not fmt.has_outer_scale:
        return Rule(np.int32(0), np.float32(1), np.float32(1), divisor)
    whole = divide_by(finite_amax(), float8_scales.target(fmt.scaling, fmt.element))
    encode, decode = whole, np.float32(whole.reciprocal().item())
    if float8_scales.folds(fmt.scaling, fmt.element):
        encode, divisor = whole * SIXTH, ONE
    return Rule(np.int32(0), np.float32(encode.item()), decode, divisor)


@inlined
def e8m0(amax: Any, element: Any, rule: Any) -> Any:
    """Return the E8M0 byte of a block's scale, or -1 if the scale is NaN; see `mx.scale_bytes`."""
    if amax >= INFINITY:
        return np.int32(-1)
    exponent, fraction = amax >> 23, np.int32(amax & FRACTION)
    if exponent == 0 and amax > 0:
        exponent = 1
        while fraction <= FRACTION:
            fraction = np.int32(fraction << 1)
            exponent -= 1
        fraction = np.int32(fraction & FRACTION)
    byte = exponent - element.emax + (1 if fraction >= rule.carry_from else 0)
    return np.int32(0 if amax == 0 else min(max(byte, 0), 254))


@inlined
def power(byte: Any) -> Any:
    """Return 2^(byte - 127) as float32."""
    return as_float(np.int32(byte << 23) if byte > 0 else HALF_POWER)


@inlined
def block_scale(amax: Any, element: Any, rule: Any) -> Any:
    """Return the factors applied before and after rounding a block, and the mask of its signs.

    A block with an Inf or a NaN gets NaN factors and a mask of zero.
    """
    if amax >= INFINITY:
        return as_float(NAN), as_float(NAN), ZERO
    if rule.encode == 0:
        byte = e8m0(amax, element, rule)
        return power(254 - byte), power(byte), SIGN
    scaled = min(as_bits(np.float32(as_float(amax) / rule.divisor) * rule.encode), E4M3.top)
    scale = as_float(nearest_even(scaled, E4M3))
    return min(ONE / np.float32(scale * rule.decode), FLOAT32_MAX), scale, SIGN


@inlined
def scaled_down(bits: Any, down: Any, element: Any) -> Any:
    """Return the bits of a value's scaled magnitude, clamped to the element type's maximum."""
    return min(as_bits(as_float(np.int32(bits & MAGNITUDE)) * down), element.top)


@inlined
def scaled_up(rounded: Any, bits: Any, up: Any, keep: Any, element: Any, rule: Any) -> Any:
    """Multiply a rounded magnitude by its scale and restore the sign of `bits`.

    `keep` is the block's mask for sign bits; see `block_scale`. Return the bits of the result.
    """
    sign = np.int32(bits & keep)
    if rounded == 0:
        sign = np.int32(sign & element.zero_sign)
    return np.int32(as_bits(np.float32(as_float(rounded) * up) * rule.decode) | sign)


@inlined
def line(
    src: Any,
    dst: Any,
    down: Any,
    up: Any,
    keep: Any,
    element: Any,
    rule: Any,
    random: Any,
    index: Any,
    buffer: Any,
) -> Any:
    """Quantize values that are consecutive in memory; `down` and `up` hold a factor per value.

    `index` is the position of the first value in the tensor. One call covers many blocks, because
    starting a loop takes time.
    """
    if random.on:
        drawn = buffer[fill_random(buffer, index, len(src), random) :]
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = stochastic(scaled_down(bits, down[j], element), element, drawn[j])
            dst[j] = narrow(scaled_up(rounded, bits, up[j], keep[j], element, rule), dst[j])
    else:
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = nearest_even(scaled_down(bits, down[j], element), element)
            dst[j] = narrow(scaled_up(rounded, bits, up[j], keep[j], element, rule), dst[j])


@kernel
def rows(
    src: Any, dst: Any, size: Any, element: Any, rule: Any, random: Any, start: Any, stop: Any
) -> None:
    """Quantize rows `start` to `stop - 1` of a `[rows, n]` array, in blocks along the last axis."""
    n = src.shape[1]
    width = max(COLUMNS // size, 1) * size
    keep, buffer = np.empty(width, np.int32), np.empty(width + 7, np.int32)
    down, up = np.empty(width, np.float32), np.empty(width, np.float32)
    for row in range(start, stop):
        for left in range(0, n, width):
            read, written = src[row, left : left + width], dst[row, left : left + width]
            for first in range(0, len(read), size):
                block = read[first : first + size]
                amax = ZERO
                for j in range(len(block)):
                    amax = max(amax, np.int32(widen(block[j]) & MAGNITUDE))
                last = first + size
                down[first:last], up[first:last], keep[first:last] = block_scale(
                    amax, element, rule
                )
            index = np.int64(row) * n + left
            line(read, written, down, up, keep, element, rule, random, index, buffer)


@kernel
def columns(
    src: Any,
    dst: Any,
    size: Any,
    square: Any,
    element: Any,
    rule: Any,
    random: Any,
    start: Any,
    stop: Any,
) -> None:
    """Quantize an `[outer, n, inner]` array in blocks along the middle axis, or in square blocks.

    Square blocks extend over the last two axes. `start` and `stop` count groups of `size` rows; the
    groups of one matrix come before the groups of the next matrix.
    """
    n, inner = src.shape[1], src.shape[2]
    blocks = (n + size - 1) // size
    width = max(COLUMNS // size, 1) * size if square else COLUMNS
    amax, keep = np.empty(width, np.int32), np.empty(width, np.int32)
    down, up = np.empty(width, np.float32), np.empty(width, np.float32)
    buffer = np.empty(width + 7, np.int32)
    for item in range(start, stop):
        outer, first = item // blocks, item % blocks * size
        last = min(first + size, n)
        for left in range(0, inner, width):
            right = min(left + width, inner)
            amax[:] = 0
            for i in range(first, last):
                read = src[outer, i, left:right]
                for j in range(len(read)):
                    amax[j] = max(amax[j], np.int32(widen(read[j]) & MAGNITUDE))
            if square:
                for group in range(0, width, size):
                    amax[group : group + size] = amax[group : group + size].max()
            for j in range(width):
                down[j], up[j], keep[j] = block_scale(amax[j], element, rule)
            for i in range(first, last):
                read, written = src[outer, i, left:right], dst[outer, i, left:right]
                index = (np.int64(outer) * n + i) * inner + left
                line(read, written, down, up, keep, element, rule, random, index, buffer)
