"""CPU kernels for formats with block scales.

They make one pass over memory and allocate no temporary tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant import float8_scales
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.float8_scales import SIXTH
from megatron.fake_quant.float8_scales import WIDER as RATIO
from megatron.fake_quant.formats import Format
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
WIDER = np.float32(RATIO)
HALF_POWER = np.int32(1 << 22)  #: bits of 2^-127
FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
COLUMNS = 512  #: number of columns in a tile, small enough that its rows stay in the cache
E4M3 = Element(
    np.int32((127 - 6) << 23),
    np.int32((127 + 8) << 23 | 6 << 20),
    np.int32(3 << 23),
    np.int32(8),
    SIGN,
)


UE5M3 = Element(
    np.int32((127 - 14) << 23),
    np.int32((127 + 16) << 23 | 6 << 20),
    np.int32(3 << 23),
    np.int32(16),
    SIGN,
)
SMALLEST_UE5M3 = np.int32((127 - 17) << 23)
SMALLEST_NORMAL = np.int32(1 << 23)
#: Orders of operations: compute the scale and multiply values by its reciprocal (E8M0, E4M3);
#: compute the scale and divide values by it (UE5M3); compute the factor by which values are
#: multiplied, and use its reciprocal as the scale (float32 scales).
MULTIPLIED, DIVIDED, FLOAT32 = np.int32(0), np.int32(1), np.int32(2)


class Rule(NamedTuple):
    """Constants for computing a block's scale from the block's largest magnitude."""

    #: E8M0: if the mantissa of a block's maximum is at least this large, the scale is doubled
    carry_from: np.int32
    #: E8M0: 0; E4M3: factor that turns a block's maximum, divided by `divisor`, into the scale;
    #: UE5M3: outer scale; float32: number to which a block's maximum is mapped
    encode: np.float32
    #: factor by which scaled results are multiplied; E4M3: outer scale, or 1 if there is none;
    #: E8M0: 1 / headroom; other scales: 1
    decode: np.float32
    #: E4M3 and UE5M3: divisor of a block's maximum; E8M0: headroom, the factor by which values are
    #: multiplied before rounding
    divisor: np.float32 = ONE
    kind: np.int32 = MULTIPLIED  #: order of operations: MULTIPLIED, DIVIDED or FLOAT32
    search: np.int32 = ZERO  #: error that a search minimizes: 1 for MAE, 2 for MSE; 0 for no search
    amax: np.float32 = ONE  #: largest finite magnitude of the tensor, if there is a search
    target: np.float32 = ONE  #: number to which `amax` is mapped, if there is a search


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants for computing the block scales of a format.

    finite_amax: function that returns the tensor's largest finite magnitude; called only if the
        format has a tensor scale.
    """
    scaling, element = fmt.scaling, fmt.element
    assert isinstance(scaling, BlockScaling)
    assert isinstance(element, ElementFormat)
    if scaling.scale == "e8m0":
        share = np.float32(scaling.share)
        carry = np.int32(carry_bits(fmt))
        return Rule(carry, np.float32(0), np.float32(1 / scaling.share), share)
    divisor = np.float32(float8_scales.top(scaling, element))
    if scaling.scale == "fp32":
        return Rule(ZERO, divisor, ONE, kind=FLOAT32)
    kind = MULTIPLIED if scaling.scale == "e4m3" else DIVIDED
    search = np.int32(("none", "mae", "mse").index(scaling.search))
    if scaling.outer == "none":
        return Rule(ZERO, ONE, ONE, divisor, kind, search)
    amax, target = finite_amax(), np.float32(float8_scales.target(scaling, element))
    if kind == DIVIDED:
        outer = max(np.float32(amax.item()) / target, np.float32(float8_scales.SMALLEST_OUTER))
        return Rule(ZERO, outer, ONE, divisor, kind)
    whole = divide_by(amax, float(target))
    encode, decode = whole, np.float32(whole.reciprocal().item())
    if float8_scales.folds(scaling, element):
        encode, divisor = whole * SIXTH, ONE
    encoding = np.float32(encode.item())
    return Rule(ZERO, encoding, decode, divisor, kind, search, np.float32(amax.item()), target)


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
    """Return the factors applied before and after rounding a block, and a mask for sign bits.

    If the order of operations is DIVIDED, the first factor is a divisor.

    A block with an Inf or a NaN gets NaN factors and a mask of zero.
    """
    if amax >= INFINITY:
        return as_float(NAN), as_float(NAN), ZERO
    if rule.kind == FLOAT32:
        encode = max(min(rule.encode / as_float(amax), FLOAT32_MAX), as_float(SMALLEST_NORMAL))
        encode = ONE if amax == 0 else encode
        return encode, ONE / encode, SIGN
    if rule.kind == DIVIDED:
        wanted = as_bits(np.float32(as_float(amax) / rule.encode) / rule.divisor)
        clamped = min(max(wanted, SMALLEST_UE5M3), UE5M3.top)
        factor = np.float32(as_float(nearest_even(clamped, UE5M3)) * rule.encode)
        return factor, factor, SIGN
    if rule.encode == 0:
        byte = e8m0(amax, element, rule)
        return np.float32(power(254 - byte) * rule.divisor), power(byte), SIGN
    scale = e4m3(np.float32(as_float(amax) / rule.divisor) * rule.encode)
    return multiplier(scale, rule), scale, SIGN


@inlined
def e4m3(wanted: Any) -> Any:
    """Return the E4M3 number nearest to `wanted`, at most 448."""
    return as_float(nearest_even(min(as_bits(wanted), E4M3.top), E4M3))


@inlined
def multiplier(scale: Any, rule: Any) -> Any:
    """Return the factor by which values with an E4M3 scale are multiplied before rounding."""
    return min(ONE / np.float32(scale * rule.decode), FLOAT32_MAX)


@inlined
def error(bits: Any, scale: Any, down: Any, element: Any, rule: Any) -> Any:
    """Return the error of one value under a candidate scale; see `float8_scales._error`."""
    code = as_float(nearest_even(scaled_down(bits, down, element), element))
    value = np.float32(np.float32(np.float32(code * scale) * rule.amax) / rule.target)
    difference = np.float32(value - as_float(np.int32(bits & MAGNITUDE)))
    return np.float32(difference * difference) if rule.search == 2 else abs(difference)


@inlined
def candidates(amax: Any, rule: Any) -> Any:
    """Return the two candidates of a search: scales that map a block's maximum to 6 and to 4."""
    wanted = np.float32(np.float32(as_float(amax) / rule.divisor) * rule.encode)
    return e4m3(wanted), e4m3(np.float32(wanted * WIDER))


@inlined
def scaled_down(bits: Any, down: Any, element: Any) -> Any:
    """Return the bits of a value's scaled magnitude, clamped to the element type's maximum."""
    return min(as_bits(as_float(np.int32(bits & MAGNITUDE)) * down), element.top)


@inlined
def divided(bits: Any, divisor: Any, element: Any) -> Any:
    """Return the bits of a value's magnitude / `divisor`, clamped to the type's largest number."""
    return min(as_bits(as_float(np.int32(bits & MAGNITUDE)) / divisor), element.top)


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
            scaled = scaled_down(bits, down[j], element)
            if rule.kind == DIVIDED:
                scaled = divided(bits, down[j], element)
            rounded = stochastic(scaled, element, drawn[j])
            dst[j] = narrow(scaled_up(rounded, bits, up[j], keep[j], element, rule), dst[j])
    elif rule.kind == DIVIDED:
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = nearest_even(divided(bits, down[j], element), element)
            dst[j] = narrow(scaled_up(rounded, bits, up[j], keep[j], element, rule), dst[j])
    else:
        for j in range(len(src)):
            bits = widen(src[j])
            rounded = nearest_even(scaled_down(bits, down[j], element), element)
            dst[j] = narrow(scaled_up(rounded, bits, up[j], keep[j], element, rule), dst[j])


@inlined
def search_columns(
    tile: Any, amax: Any, down: Any, up: Any, wide: Any, scratch: Any, element: Any, rule: Any
) -> Any:
    """Replace the scale of each block, a column of `tile`, by the better of two candidates.

    `scratch` has four rows for the candidates' factors and errors, and `wide` holds a row of bits.
    """
    for j in range(tile.shape[1]):
        six, four = candidates(amax[j], rule)
        scratch[0, j], scratch[1, j], scratch[2, j] = multiplier(four, rule), four, np.float32(0)
        scratch[3, j] = np.float32(0)
    for i in range(tile.shape[0]):
        # a separate loop, so that the next loop handles numbers of a single width
        for j in range(tile.shape[1]):
            wide[j] = widen(tile[i, j])
        for j in range(tile.shape[1]):
            bits = wide[j]
            four = error(bits, scratch[1, j], scratch[0, j], element, rule)
            scratch[2, j] = np.float32(scratch[2, j] + four)
            six = error(bits, up[j], down[j], element, rule)
            scratch[3, j] = np.float32(scratch[3, j] + six)
    for j in range(tile.shape[1]):
        if amax[j] < INFINITY and scratch[2, j] < scratch[3, j]:
            down[j], up[j] = scratch[0, j], scratch[1, j]


@kernel
def rows(
    src: Any, dst: Any, size: Any, element: Any, rule: Any, random: Any, start: Any, stop: Any
) -> None:
    """Quantize rows `start` to `stop - 1` of a `[rows, n]` array, in blocks along the last axis."""
    n = src.shape[1]
    width = max(COLUMNS // size, 1) * size
    keep, buffer = np.empty(width, np.int32), np.empty(width + 7, np.int32)
    down, up = np.empty(width, np.float32), np.empty(width, np.float32)
    # A search arranges blocks as columns, so that vector instructions handle several blocks.
    count = width // size
    maxima, scratch = np.empty(count, np.int32), np.empty((6, count), np.float32)
    turned, wide = np.zeros((size, count), np.int32), np.empty(count, np.int32)
    for row in range(start, stop):
        for left in range(0, n, width):
            read, written = src[row, left : left + width], dst[row, left : left + width]
            for first in range(0, len(read), size):
                block = read[first : first + size]
                amax = ZERO
                for j in range(len(block)):
                    amax = max(amax, np.int32(widen(block[j]) & MAGNITUDE))
                last = first + size
                scales = block_scale(amax, element, rule)
                down[first:last], up[first:last], keep[first:last] = scales
                if rule.search > 0:
                    number = first // size
                    maxima[number], scratch[4, number], scratch[5, number] = (
                        amax,
                        scales[0],
                        scales[1],
                    )
                    for j in range(size):
                        turned[j, number] = widen(block[j]) if j < len(block) else ZERO
            if rule.search > 0:
                tile = turned[:, : (len(read) + size - 1) // size]
                search_columns(tile, maxima, scratch[4], scratch[5], wide, scratch, element, rule)
                for number in range(tile.shape[1]):
                    first = number * size
                    down[first : first + size] = scratch[4, number]
                    up[first : first + size] = scratch[5, number]
            index = np.int64(row) * n + left
            line(read, written, down, up, keep, element, rule, random, index, buffer)


@kernel
def columns(
    src: Any,
    dst: Any,
    size: Any,
    square: Any,
    strips: Any,
    element: Any,
    rule: Any,
    random: Any,
    start: Any,
    stop: Any,
) -> None:
    """Quantize an `[outer, n, inner]` array in blocks along the middle axis, or in square blocks.

    Square blocks extend over the last two axes. `start` and `stop` count groups of `size` rows, and
    each group is cut into `strips` parts. The groups of one matrix come before those of the next.
    """
    n, inner = src.shape[1], src.shape[2]
    blocks = (n + size - 1) // size
    width = max(COLUMNS // size, 1) * size if square else COLUMNS
    amax, keep = np.empty(width, np.int32), np.empty(width, np.int32)
    down, up = np.empty(width, np.float32), np.empty(width, np.float32)
    buffer, scratch = np.empty(width + 7, np.int32), np.empty((4, width), np.float32)
    strip = (inner + width * strips - 1) // (width * strips) * width
    for item in range(start, stop):
        outer, first = item // strips // blocks, item // strips % blocks * size
        last = min(first + size, n)
        begin = item % strips * strip
        for left in range(begin, min(begin + strip, inner), width):
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
            if rule.search > 0:
                tile = src[outer, first:last, left:right]
                search_columns(tile, amax, down, up, buffer, scratch, element, rule)
            for i in range(first, last):
                read, written = src[outer, i, left:right], dst[outer, i, left:right]
                index = (np.int64(outer) * n + i) * inner + left
                line(read, written, down, up, keep, element, rule, random, index, buffer)
