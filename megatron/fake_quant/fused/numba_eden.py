"""CPU kernel for MS-EDEN, which corrects E4M3 block scales; see `eden.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import numba_scales
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    ONE,
    SIGN,
    Element,
    Random,
    as_bits,
    as_float,
    element_bits,
    fill_random,
    kernel,
    nearest_even,
    stochastic,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_scales import E4M3, FLOAT32_MAX, e4m3, multiplier
from megatron.fake_quant.fused.numba_tiles import (
    COLUMNS,
    DEPTH,
    Cut,
    extent,
    fill_special,
    maxima,
    spread,
)
from megatron.fake_quant.rounding_modes import EDEN_GROUP

PARTS = EDEN_GROUP // DEPTH  #: number of columns that a group has in a tile


class Rule(NamedTuple):
    """Constants of a format and a tensor."""

    element: Element
    scale: numba_scales.Rule
    random: Random
    size: int  #: number of values per block
    blocks: int  #: number of blocks along the axis


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor], cut: Cut, random: Random) -> Rule:
    """Return the constants of a format and of a tensor with the given largest magnitude."""
    assert isinstance(fmt.element, ElementFormat)
    assert fmt.block_size is not None
    scale = numba_scales.make_rule(fmt, finite_amax)
    blocks = -(-cut.n // fmt.block_size)
    return Rule(element_bits(fmt.element), scale, random, fmt.block_size, blocks)


@inlined
def scaled(bits: Any, down: Any, element: Any) -> Any:
    """Return the scaled magnitude of a value, and the element to which it is rounded."""
    magnitude = min(np.float32(as_float(np.int32(bits & MAGNITUDE)) * down), FLOAT32_MAX)
    return magnitude, as_float(nearest_even(min(as_bits(magnitude), element.top), element))


@inlined
def sum_columns(terms: Any, first: Any, near: Any) -> Any:
    """Return the sum of the terms of a group's columns, in the order of `eden._group_sums`."""
    a, b = terms[first] + terms[first + 4 * near], terms[first + near] + terms[first + 5 * near]
    first += 2 * near
    c, d = terms[first] + terms[first + 4 * near], terms[first + near] + terms[first + 5 * near]
    return (a + c) + (b + d)


@inlined
def group_sums(
    tile: Any, down: Any, up: Any, place: Any, element: Any, terms: Any, sums: Any
) -> Any:
    """Write sum x^2 and sum xq of each group to `sums[:, 0]`, where q is x rounded.

    Here, x is a scaled magnitude and q its element. `terms` holds temporary results.
    """
    squares, products = terms[0], terms[1]
    for i in range(DEPTH):
        values = tile[i]
        for j in range(place.columns):
            x, q = scaled(values[j], down[j], element)
            squares[j] = np.float64(x) * np.float64(x) if up[j] > 0 else 0.0
            products[j] = np.float64(x) * np.float64(q) if up[j] > 0 else 0.0
        for first in range(0, place.columns, place.near * PARTS):
            for j in range(place.near):
                group = first // PARTS + j
                sums[0, i, group] = sum_columns(squares, first + j, place.near)
                sums[1, i, group] = sum_columns(products, first + j, place.near)
    half = DEPTH // 2
    while half > 0:
        for i in range(half):
            for j in range(place.columns // PARTS):
                sums[0, i, j] += sums[0, i + half, j]
                sums[1, i, j] += sums[1, i + half, j]
        half //= 2


@inlined
def corrected(scale: Any, factor: Any, random: Any) -> Any:
    """Return a scale times `factor`, rounded stochastically; a scale of 0 stays 0."""
    wanted = min(as_bits(np.float32(scale * factor)), E4M3.top)
    return as_float(stochastic(wanted, E4M3, random)) if scale > 0 else scale


@inlined
def correct(up: Any, sums: Any, place: Any, cut: Any, rule: Any, buffer: Any) -> Any:
    """Correct the scales of all columns.

    Random bits belong to the position of a block in a tensor whose last axis is the blocks' axis.
    The blocks of a tile are neighbors in this tensor if blocks also run along the last axis in
    memory. Their bits are then generated in one loop, which LLVM vectorizes.
    """
    together = rule.size // DEPTH
    row, left, drawn = place.first // cut.n, place.first % cut.n, 0
    if cut.inner > 1:
        left = place.first // cut.inner % cut.n
        row = place.first // (cut.inner * cut.n) * cut.inner + place.first % cut.inner
    else:
        index = row * rule.blocks + left // rule.size
        drawn = fill_random(buffer, index, place.columns // together, rule.random)
    for first in range(0, place.columns, place.near * PARTS):
        for j in range(place.near):
            group = first // PARTS + j
            skipped = drawn + first // together
            if cut.inner > 1:
                index = (row + j) * rule.blocks + left // rule.size
                skipped = fill_random(buffer, index, PARTS // together, rule.random)
            square, product = sums[0, 0, group], sums[1, 0, group]
            factor = ONE if product == 0 else np.float32(square / product)
            for part in range(PARTS):
                column = first + j + part * place.near
                random = buffer[skipped + part // together]
                up[column] = corrected(up[column], factor, random)


@kernel
def eden(rule: Any, tiles: Any, drawn: Any, cut: Any, start: Any, stop: Any) -> None:
    """Quantize the tiles `start` to `stop - 1` in place."""
    amax, buffer = np.empty(COLUMNS, np.int32), np.empty(COLUMNS + 7, np.int32)
    down, up = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    terms, sums = np.empty((2, COLUMNS)), np.empty((2, DEPTH, COLUMNS // PARTS))
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        maxima(tile, amax, place.columns)
        spread(amax, place, rule.size // DEPTH)
        for j in range(place.columns):
            wanted = np.float32(as_float(amax[j]) / rule.scale.divisor) * rule.scale.encode
            up[j] = e4m3(wanted) if amax[j] < INFINITY else np.float32(0)
            down[j] = multiplier(up[j], rule.scale.decode)
        group_sums(tile, down, up, place, rule.element, terms, sums)
        correct(up, sums, place, cut, rule, buffer)
        for i in range(DEPTH):
            values = tile[i]
            for j in range(place.columns):
                _, q = scaled(values[j], down[j], rule.element)
                sign = np.int32(values[j] & (SIGN if q > 0 else rule.element.zero_sign))
                value = np.float32(q * up[j]) * rule.scale.decode
                values[j] = np.int32(as_bits(value) | sign)
        fill_special(tile, amax, place.columns)
