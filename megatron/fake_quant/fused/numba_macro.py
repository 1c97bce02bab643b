"""CPU kernel for MX formats with a mantissa per macro block; see `macro_blocks.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant.elements import E2M1 as E2M1_ELEMENT
from megatron.fake_quant.float32_bits import MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    MAGNITUDE,
    ONE,
    SIGN,
    ZERO,
    as_bits,
    as_float,
    element_bits,
    kernel,
    nearest_even,
    stochastic,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_tiles import (
    COLUMNS,
    DEPTH,
    extent,
    fill_special,
    maxima,
    spread,
)
from megatron.fake_quant.scalings import macro_blocks
from megatron.fake_quant.scalings.mx import carry_bits
from megatron.fake_quant.special_scalings import MacroScaling

E2M1 = element_bits(E2M1_ELEMENT)
SIX = np.float32(E2M1_ELEMENT.max)
SMALLEST = np.float32(macro_blocks.SMALLEST)
STEPS = np.int32(macro_blocks.STEPS)
FRACTION = np.int32((1 << MANTISSA_BITS) - 1)
#: number of low bits of a float32 mantissa that a factor leaves out; it stores the other 8 bits
DROPPED = np.int32(MANTISSA_BITS - 8)
HALF_POWER = np.int32(1 << (MANTISSA_BITS - 1))  #: bits of 2^-127
LARGEST_BYTE = np.int32(254)


class Rule(NamedTuple):
    """Constants of a format."""

    carry_from: np.int32  #: mantissa of a block's maximum from which the block's scale is doubled
    together: int  #: number of columns that a block has in a tile
    stochastic: bool  #: True for stochastic rounding, False for rounding to nearest


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants of a format with macro blocks, which has no tensor scale."""
    assert isinstance(fmt.scaling, MacroScaling)
    inner = macro_blocks.block_scaling(fmt.scaling)
    carry = carry_bits(Format("mxfp4", fmt.element, inner))
    return Rule(np.int32(carry), inner.size // DEPTH, fmt.stochastic)


@inlined
def power(byte: Any) -> Any:
    """Return 2^(byte - 127) as float32."""
    return as_float(np.int32(byte << 23) if byte > 0 else HALF_POWER)


@inlined
def factor(amax: Any) -> Any:
    """Return the factor of a macro block, given the bits of its largest magnitude."""
    quotient = as_bits(SIX / max(as_float(amax), SMALLEST))
    mantissa = np.int32(np.int32(quotient >> DROPPED) & np.int32(STEPS - 1))
    wanted = np.float32(ONE + np.float32(np.float32(mantissa) / np.float32(STEPS)))
    return wanted if as_bits(as_float(amax) * wanted) < INFINITY else ONE


@inlined
def scale_byte(amax: Any, rule: Any) -> Any:
    """Return the E8M0 byte of a block's scale, given the bits of its largest magnitude.

    A subnormal maximum has the smallest scale, so the position of its leading bit is irrelevant.
    """
    carry = 1 if np.int32(amax & FRACTION) >= rule.carry_from else 0
    byte = np.int32(np.int32(amax >> 23) - E2M1.emax + carry)
    return min(max(byte, ZERO), LARGEST_BYTE)


@kernel
def macro(rule: Any, tiles: Any, drawn: Any, cut: Any, start: Any, stop: Any) -> None:
    """Quantize the tiles `start` to `stop - 1` in place."""
    amax, whole = np.empty(COLUMNS, np.int32), np.empty(COLUMNS, np.int32)
    factors = np.empty(COLUMNS, np.float32)
    down, up = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        maxima(tile, amax, place.columns)
        spread(amax, place, rule.together)
        for j in range(place.columns):
            whole[j] = amax[j]
        spread(whole, place, cut.size // DEPTH)
        for j in range(place.columns):
            factors[j] = factor(whole[j])
            byte = scale_byte(as_bits(as_float(amax[j]) * factors[j]), rule)
            down[j], up[j] = power(np.int32(LARGEST_BYTE - byte)), power(byte)
        for i in range(DEPTH):
            values, random = tile[i], drawn[item - start, i]
            for j in range(place.columns):
                magnitude = as_float(np.int32(values[j] & MAGNITUDE))
                scaled = as_bits(np.float32(magnitude * factors[j]) * down[j])
                scaled = min(scaled, E2M1.top)
                if rule.stochastic:
                    rounded = stochastic(scaled, E2M1, random[j])
                else:
                    rounded = nearest_even(scaled, E2M1)
                result = as_bits(np.float32(as_float(rounded) * up[j]) / factors[j])
                values[j] = np.int32(result | np.int32(values[j] & SIGN))
        fill_special(tile, whole, place.columns)
