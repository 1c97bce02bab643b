"""CPU kernel for MX9 and MX6; see `pair_exponents.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.float32_bits import BIAS, MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    ONE,
    POWER_254,
    UNITS,
    ZERO,
    as_bits,
    as_float,
    kernel,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_tiles import COLUMNS, DEPTH, extent, fill_special, maxima
from megatron.fake_quant.special_scalings import PairScaling

BINADE = np.int32(1 << MANTISSA_BITS)
NOTHING = np.float32(0)
#: Adding and then subtracting this number rounds to an integer, because float32 numbers near it are
#: integers.
SHIFTER = np.float32(1.5 * (1 << MANTISSA_BITS))


class Rule(NamedTuple):
    """Constants of a format."""

    lowest: np.int32  #: float32 bits of the smallest scale
    mantissa: np.int32  #: number of mantissa bits, shifted left to the exponent field of a float32
    stochastic: bool  #: True for stochastic rounding, False for rounding to nearest
    largest: np.float32  #: largest element, in units of the elements' spacing


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants of MX9 or MX6, which have no tensor scale."""
    assert isinstance(fmt.scaling, PairScaling)
    assert isinstance(fmt.element, ElementFormat)
    mantissa = fmt.element.mantissa_bits
    return Rule(
        np.int32((fmt.scaling.lowest + BIAS) << MANTISSA_BITS),
        np.int32(mantissa << MANTISSA_BITS),
        fmt.stochastic,
        np.float32(fmt.element.max * (1 << mantissa)),
    )


@inlined
def stochastic_steps(steps: Any, drawn: Any) -> Any:
    """Round a number to an integer stochastically; -0 becomes 0."""
    size = abs(steps)
    whole = np.float32(np.int32(size))
    up = np.float32(np.float32(size - whole) * UNITS) >= np.float32(np.int32(drawn + 1))
    whole = whole + ONE if up else whole
    return (-whole if steps < 0 else whole) + NOTHING


@inlined
def quantize_row(values: Any, drawn: Any, spacing: Any, columns: Any, rule: Any) -> Any:
    """Round a row of a tile to multiples of `spacing`."""
    for j in range(columns):
        step = as_float(spacing[j])
        inverse = as_float(np.int32(POWER_254 - spacing[j]))
        steps = min(max(np.float32(as_float(values[j]) * inverse), -rule.largest), rule.largest)
        if rule.stochastic:
            steps = stochastic_steps(steps, drawn[j])
        else:
            steps = np.float32(steps + SHIFTER) - SHIFTER
        values[j] = as_bits(steps * step)


@kernel
def pairs(rule: Any, tiles: Any, drawn: Any, cut: Any, start: Any, stop: Any) -> None:
    """Quantize the tiles `start` to `stop - 1` in place."""
    amax, spacing = np.empty(COLUMNS, np.int32), np.empty(COLUMNS, np.int32)
    for item in range(start, stop):
        tile, columns = tiles[item - start], extent(cut, item).columns
        maxima(tile, amax, columns)
        for row in range(DEPTH):
            values = tile[row]
            if row & 1 == 0:
                other = tile[row + 1]
                for j in range(columns):
                    shared = np.int32(amax[j] & INFINITY)
                    first = np.int32(values[j] & MAGNITUDE)
                    pair = max(first, np.int32(other[j] & MAGNITUDE))
                    scale = np.int32(shared - (BINADE if pair < shared else ZERO))
                    spacing[j] = np.int32(max(scale, rule.lowest) - rule.mantissa)
            quantize_row(values, drawn[item - start, row], spacing, columns, rule)
        fill_special(tile, amax, columns)
