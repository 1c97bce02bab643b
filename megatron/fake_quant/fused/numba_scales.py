"""Compute the scales of many blocks at once, in CPU kernels for `BlockScaling`.

All loops here run over blocks and have no branches inside, so that LLVM vectorizes them. The scale
of a block that holds an Inf or a NaN has no meaning; the kernels overwrite such blocks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    ONE,
    ZERO,
    Element,
    as_bits,
    as_float,
    element_bits,
    nearest_even,
)
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.scalings import float8_scales
from megatron.fake_quant.scalings.float8_scales import SIXTH
from megatron.fake_quant.scalings.float8_scales import WIDER as RATIO
from megatron.fake_quant.scalings.float8_types import FLOAT8
from megatron.fake_quant.scalings.mx import carry_bits

FRACTION = np.int32(0x7FFFFF)
WIDER = np.float32(RATIO)
HALF_POWER = np.int32(1 << 22)  #: bits of 2^-127
FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)
SMALLEST_OUTER = np.float32(float8_scales.SMALLEST_OUTER)
LOWEST_BITS = np.int32(1 << 23)  #: bits of the smallest normal number
#: Difference between the exponent of an integer n and that of the subnormal number n * 2^-149.
SUBNORMAL_FIELD = np.int32(149)
E4M3 = element_bits(FLOAT8["e4m3"].element)
#: Orders of operations: compute the scale and multiply values by its reciprocal (E8M0, E4M3);
#: compute the scale and divide values by it (UE5M3, E6M2); compute the factor by which values are
#: multiplied, and use its reciprocal as the scale (float32 scales).
MULTIPLIED, DIVIDED, FLOAT32 = np.int32(0), np.int32(1), np.int32(2)


class Rule(NamedTuple):
    """Constants for computing a block's scale from the block's largest magnitude."""

    #: E8M0: if the mantissa of a block's maximum is at least this large, the scale is doubled
    carry_from: np.int32
    #: E8M0: 0; E4M3: factor that turns a block's maximum, divided by `divisor`, into the scale;
    #: UE5M3 and E6M2: outer scale; float32: number to which a block's maximum is mapped
    encode: np.float32
    #: factor by which scaled results are multiplied; E4M3: outer scale, or 1 if there is none;
    #: E8M0: 1 / headroom; other scales: 1
    decode: np.float32
    #: 8-bit floats: divisor of a block's maximum; E8M0: headroom, the factor by which values are
    #: multiplied before rounding
    divisor: np.float32 = ONE
    kind: np.int32 = MULTIPLIED  #: order of operations: MULTIPLIED, DIVIDED or FLOAT32
    search: np.int32 = ZERO  #: error that a search minimizes: 1 for MAE, 2 for MSE; 0 for no search
    amax: np.float32 = ONE  #: largest finite magnitude of the tensor, if there is a search
    target: np.float32 = ONE  #: number to which an outer scale maps the largest finite magnitude
    scale: Element = E4M3  #: number type of the scale, if it is an 8-bit float
    lowest: np.int32 = ZERO  #: UE5M3 and E6M2: bits of the smallest scale
    #: True if `encode`, `decode` and `amax` are not constants, because the tensor has several outer
    #: scales
    grouped: bool = False
    #: True if the scale of the tensor or of whole rows is not applied to rounded values
    apart: bool = False
    #: factor by which `encode` is multiplied: 1/6 in NVFP4's order of operations, otherwise 1
    fold: np.float32 = ONE


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> Rule:
    """Return the constants for computing the block scales of a format.

    finite_amax: function that returns the tensor's largest finite magnitude; called only if the
        format has a tensor scale.
    """
    rule = rule_of_format(fmt)
    scaling = fmt.scaling
    assert isinstance(scaling, BlockScaling)
    if scaling.outer != "tensor":
        return rule
    amax = finite_amax()
    rule = rule._replace(amax=np.float32(amax.item()))
    if rule.kind == DIVIDED:
        return rule._replace(encode=max(rule.amax / rule.target, SMALLEST_OUTER))
    with np.errstate(all="ignore"):
        whole = encode_factor.py_func(rule.target, rule.amax)
        return rule._replace(encode=whole * rule.fold, decode=ONE / whole)


@functools.lru_cache(maxsize=1024)
def rule_of_format(fmt: Format) -> Rule:
    """Return the constants of `make_rule` that do not depend on the tensor.

    If the format has a tensor scale, `amax`, `encode` and `decode` have their defaults.
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
        return Rule(ZERO, divisor, ONE, kind=FLOAT32, apart=scaling.apart)
    kind = FLOAT8[scaling.scale]
    folds = float8_scales.folds(scaling, element)
    rule = Rule(
        ZERO,
        ONE,
        ONE,
        divisor=ONE if folds else divisor,
        kind=MULTIPLIED if scaling.scale == "e4m3" else DIVIDED,
        search=np.int32(("none", "mae", "mse").index(scaling.search)),
        scale=element_bits(kind.element),
        lowest=np.float32(kind.lowest).view(np.int32),
        fold=np.float32(SIXTH.item()) if folds else ONE,
    )
    if scaling.outer == "none":
        return rule
    rule = rule._replace(target=np.float32(float8_scales.target(scaling, element)))
    if scaling.outer != "tensor":
        return rule._replace(grouped=True)
    # The tensor scale can be left out only with E4M3 scales; otherwise, it is part of the divisor.
    return rule._replace(apart=scaling.apart and scaling.scale == "e4m3")


@inlined
def e8m0(amax: Any, element: Any, rule: Any) -> Any:
    """Return the E8M0 byte of a block's scale, or -1 if the scale is NaN; see `mx.scale_bytes`."""
    subnormal = amax < LOWEST_BITS
    bits = as_bits(np.float32(amax)) if subnormal else amax
    exponent = np.int32(np.int32(bits >> 23) - (SUBNORMAL_FIELD if subnormal else ZERO))
    carry = np.int32(1) if np.int32(bits & FRACTION) >= rule.carry_from else ZERO
    byte = np.int32(np.int32(exponent - element.emax) + carry)
    byte = min(max(byte, ZERO), np.int32(254))
    return np.int32(-1) if amax >= INFINITY else byte


@inlined
def power(byte: Any) -> Any:
    """Return 2^(byte - 127) as float32."""
    return as_float(np.int32(byte << 23) if byte > 0 else HALF_POWER)


@inlined
def e4m3(wanted: Any) -> Any:
    """Return the E4M3 number nearest to `wanted`, at most 448."""
    return as_float(nearest_even(min(as_bits(wanted), E4M3.top), E4M3))


@inlined
def multiplier(scale: Any, decode: Any) -> Any:
    """Return the factor by which values with an E4M3 scale are multiplied before rounding."""
    return min(ONE / np.float32(scale * decode), FLOAT32_MAX)


@inlined
def encode_factor(target: Any, amax: Any) -> Any:
    """Return target / amax, clamped to normal float32 numbers; see `tensor_scale.divide_by`."""
    factor = max(min(target / amax, FLOAT32_MAX), SMALLEST_NORMAL)
    return ONE if amax == 0 else factor


@inlined
def outer_scales(amax: Any, encode: Any, decode: Any, count: Any, rule: Any) -> Any:
    """Compute `encode` and, unless it is constant, `decode` of each block; see fields of `Rule`.

    `amax` has the largest finite magnitude of the values that share the outer scale.
    """
    if rule.kind == DIVIDED:
        for j in range(count):
            encode[j] = max(amax[j] / rule.target, SMALLEST_OUTER)
    else:
        for j in range(count):
            factor = encode_factor(rule.target, amax[j])
            encode[j] = factor * rule.fold
            decode[j] = ONE / factor


@inlined
def block_scales(
    amax: Any,
    encode: Any,
    decode: Any,
    ratio: Any,
    down: Any,
    up: Any,
    count: Any,
    element: Any,
    rule: Any,
) -> Any:
    """Compute the factors applied before and after rounding the values of each block.

    If the order of operations is DIVIDED, the first factor is a divisor. `ratio` is 1, or `WIDER`
    for the second candidate of a search, which only E4M3 scales have.
    """
    if rule.kind == FLOAT32:
        for j in range(count):
            factor = encode_factor(rule.encode, as_float(amax[j]))
            down[j] = factor
            up[j] = ONE if rule.apart else ONE / factor
    elif rule.kind == DIVIDED:
        for j in range(count):
            wanted = as_bits(np.float32(as_float(amax[j]) / encode[j]) / rule.divisor)
            clamped = min(max(wanted, rule.lowest), rule.scale.top)
            factor = np.float32(as_float(nearest_even(clamped, rule.scale)) * encode[j])
            down[j] = factor
            up[j] = factor
    elif rule.encode == 0:
        for j in range(count):
            byte = max(e8m0(amax[j], element, rule), ZERO)
            down[j] = np.float32(power(np.int32(254 - byte)) * rule.divisor)
            up[j] = power(byte)
    else:
        for j in range(count):
            wanted = np.float32(np.float32(as_float(amax[j]) / rule.divisor) * encode[j])
            scale = e4m3(np.float32(wanted * ratio[j]))
            down[j] = multiplier(scale, decode[j])
            up[j] = scale
