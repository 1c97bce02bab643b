"""CPU kernel for IF4 and MixFP4, whose blocks choose an element type; see `element_choice.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant.elements import E2M1 as E2M1_ELEMENT
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import (
    MAGNITUDE,
    ONE,
    SIGN,
    UNITS,
    ZERO,
    as_bits,
    as_float,
    element_bits,
    kernel,
    nearest_even,
    stochastic,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_scales import FLOAT32_MAX, e4m3
from megatron.fake_quant.fused.numba_tiles import COLUMNS, DEPTH, extent, fill_special, maxima
from megatron.fake_quant.scalings.tensor_scale import divide_by
from megatron.fake_quant.special_scalings import ChoiceScaling

E2M1 = element_bits(E2M1_ELEMENT)
SIX, SEVEN = np.float32(6), np.float32(7)
WIDER, NARROWER = np.float32(7 / 6), np.float32(6 / 7)  #: ratios of IF4's two largest elements
NOTHING = np.float32(0)
#: Adding and then subtracting this number rounds to an integer, because float32 numbers near it are
#: integers.
SHIFTER = np.float32(1 << 23)


class Rule(NamedTuple):
    """Constants of a format and a tensor."""

    encode: np.float32  #: factor that turns a block's maximum, divided by 6 or 7, into its scale
    decode: np.float32  #: factor by which scaled results are multiplied
    amax: np.float32  #: largest finite magnitude of the tensor
    target: np.float32  #: number to which `amax` is mapped
    shared: bool  #: True for IF4, whose integers and E2M1 elements share a scale
    absolute: bool  #: True to compare absolute errors, False to compare squared errors
    stochastic: bool  #: True for stochastic rounding, False for rounding to nearest


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants of a format and of a tensor with the given largest magnitude."""
    assert isinstance(fmt.scaling, ChoiceScaling)
    amax, target = finite_amax().cpu(), fmt.scaling.target
    encode = divide_by(amax, target)
    return Rule(
        encode=np.float32(encode.item()),
        decode=np.float32(encode.reciprocal().item()),
        amax=np.float32(amax.item()),
        target=np.float32(target),
        shared=fmt.scaling.shared,
        absolute=fmt.scaling.error == "mae",
        stochastic=fmt.stochastic,
    )


@inlined
def multiplier(scale: Any, rule: Any) -> Any:
    """Return the factor that maps values to elements; 0 for a scale of 0."""
    return min(ONE / np.float32(scale * rule.decode), FLOAT32_MAX) if scale > 0 else NOTHING


@inlined
def integer_steps(magnitude: Any, down: Any, rule: Any) -> Any:
    """Return a scaled magnitude in steps of the integer element type, clamped to 7."""
    scaled = np.float32(magnitude * down)
    return min(np.float32(scaled * WIDER) if rule.shared else scaled, SEVEN)


@inlined
def float_bits(magnitude: Any, down: Any) -> Any:
    """Return the float32 bits of a scaled magnitude, after clamping it to 6.0, E2M1's maximum."""
    return min(as_bits(np.float32(magnitude * down)), E2M1.top)


@inlined
def error(scaled: Any, magnitude: Any, rule: Any) -> Any:
    """Return the error of a value, given its element times block scale and amax as `scaled`."""
    difference = np.float32(np.float32(scaled / rule.target) - magnitude)
    return abs(difference) if rule.absolute else np.float32(difference * difference)


@inlined
def float_error(bits: Any, down: Any, up: Any, rule: Any) -> Any:
    """Return the error of a value with an E2M1 element."""
    magnitude = as_float(np.int32(bits & MAGNITUDE))
    rounded = as_float(nearest_even(float_bits(magnitude, down), E2M1))
    return error(np.float32(np.float32(rounded * up) * rule.amax), magnitude, rule)


@inlined
def integer_error(bits: Any, down: Any, up: Any, rule: Any) -> Any:
    """Return the error of a value with an integer element."""
    magnitude = as_float(np.int32(bits & MAGNITUDE))
    rounded = np.float32(integer_steps(magnitude, down, rule) + SHIFTER) - SHIFTER
    value = np.float32(np.float32(rounded * up) * rule.amax)
    return error(np.float32(value * NARROWER) if rule.shared else value, magnitude, rule)


@inlined
def block_scales(amax: Any, down: Any, up: Any, columns: Any, rule: Any) -> Any:
    """Write both element types' factors, applied before and after rounding, to `down` and `up`."""
    for j in range(columns):
        scale = e4m3(np.float32(np.float32(as_float(amax[j]) / SIX) * rule.encode))
        other = scale
        if not rule.shared:
            other = e4m3(np.float32(np.float32(as_float(amax[j]) / SEVEN) * rule.encode))
        up[0, j], up[1, j] = scale, other
        down[0, j], down[1, j] = multiplier(scale, rule), multiplier(other, rule)


@inlined
def choose(tile: Any, down: Any, up: Any, chosen: Any, columns: Any, rule: Any) -> Any:
    """Write -1 to `chosen` for each column that has integer elements, and 0 for the others.

    The factors of the chosen element type are written to the first rows of `down` and `up`.
    """
    first_down, second_down, first_up, second_up = down[0], down[1], up[0], up[1]
    floats, integers = down[2], up[2]
    for j in range(columns):
        floats[j], integers[j] = NOTHING, NOTHING
    for i in range(DEPTH // 2):
        near, far = tile[i], tile[i + DEPTH // 2]
        for j in range(columns):
            one = float_error(near[j], first_down[j], first_up[j], rule)
            two = float_error(far[j], first_down[j], first_up[j], rule)
            floats[j] = np.float32(floats[j] + np.float32(one + two))
        for j in range(columns):
            one = integer_error(near[j], second_down[j], second_up[j], rule)
            two = integer_error(far[j], second_down[j], second_up[j], rule)
            integers[j] = np.float32(integers[j] + np.float32(one + two))
    for j in range(columns):
        better = integers[j] < floats[j] or (not rule.shared and integers[j] == floats[j])
        chosen[j] = np.int32(-1) if better else ZERO
        first_down[j] = second_down[j] if better else first_down[j]
        first_up[j] = second_up[j] if better else first_up[j]


@inlined
def quantized(bits: Any, drawn: Any, down: Any, up: Any, chosen: Any, rule: Any) -> Any:
    """Return the bits of a dequantized value, given the factors of the chosen element type."""
    magnitude = as_float(np.int32(bits & MAGNITUDE))
    scaled, steps = float_bits(magnitude, down), integer_steps(magnitude, down, rule)
    if rule.stochastic:
        rounded = as_float(stochastic(scaled, E2M1, drawn))
        whole = np.float32(np.int32(steps))
        up_next = np.float32(np.float32(steps - whole) * UNITS) >= np.float32(np.int32(drawn + 1))
        integer = whole + ONE if up_next else whole
    else:
        rounded = as_float(nearest_even(scaled, E2M1))
        integer = np.float32(steps + SHIFTER) - SHIFTER
    value = np.float32((integer if chosen != 0 else rounded) * up)
    sign = np.int32(bits & SIGN)
    if rule.shared and chosen != 0:
        # The integers of IF4 are in two's complement and have no -0.
        sign = sign if integer > 0 else ZERO
        value = np.float32(value * NARROWER)
    return np.int32(as_bits(np.float32(value * rule.decode)) | sign)


@kernel
def choice(rule: Any, tiles: Any, drawn: Any, cut: Any, start: Any, stop: Any) -> None:
    """Quantize the tiles `start` to `stop - 1` in place."""
    amax, chosen = np.empty(COLUMNS, np.int32), np.empty(COLUMNS, np.int32)
    down, up = np.empty((3, COLUMNS), np.float32), np.empty((3, COLUMNS), np.float32)
    for item in range(start, stop):
        tile, columns = tiles[item - start], extent(cut, item).columns
        maxima(tile, amax, columns)
        block_scales(amax, down, up, columns, rule)
        choose(tile, down, up, chosen, columns, rule)
        factors, scales = down[0], up[0]
        for i in range(DEPTH):
            values, random = tile[i], drawn[item - start, i]
            for j in range(columns):
                values[j] = quantized(values[j], random[j], factors[j], scales[j], chosen[j], rule)
        fill_special(tile, amax, columns)
