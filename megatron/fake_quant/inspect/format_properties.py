"""The numbers that a format has, measured on the code that quantizes.

Values come from the tables of codes, behavior between and beyond them from rounding midpoints, Inf
and NaN, and scales from scaling up ones by every stored scale. Tables and pictures made from these
functions therefore cannot drift from `fake_quantize`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.fake_quant import reference, scalings
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.code_points import code_values
from megatron.fake_quant.float32_bits import INFINITY
from megatron.fake_quant.formats import Element, Format, Scaling
from megatron.fake_quant.packing import quantize
from megatron.fake_quant.quantize import fake_quantize


def exponent(value: float) -> int:
    """Return the exponent E of a finite number, whose magnitude is in [2^E, 2^(E+1))."""
    return math.frexp(value)[1] - 1


def all_values(element: Element) -> Tensor:
    """Return the float32 number that each code stands for, by code."""
    if not element.is_cast:
        return code_values(element)
    assert element.bits == torch.int16.itemsize * 8
    return torch.arange(1 << element.bits).to(torch.int16).view(element.dtype).float()


@functools.cache
def positive_values(element: Element) -> Tensor:
    """Return the finite numbers above zero, in ascending order."""
    values = all_values(element)
    return values[values.isfinite() & (values > 0)].sort().values


def round_nearest(x: Tensor, element: Element) -> Tensor:
    """Round float32 `x` to nearest, without a scale."""
    fmt = Format(element.name, element)
    return reference.fake_quantize(x, fmt, BlockLayout.of(tuple(x.shape), fmt, -1), None)


@dataclass(frozen=True, slots=True)
class Binades:
    """Neighboring binades [2^E, 2^(E+1)) with equally many, equally spaced numbers."""

    first: int  #: lowest E
    last: int  #: highest E
    count: int  #: numbers in each binade
    relative: float | None  #: spacing over 2^E; None if there is no larger number


@functools.cache
def binades(element: Element) -> tuple[Binades, ...]:
    """Return all binades with positive numbers, in ascending order."""
    values = positive_values(element)
    exponents = torch.frexp(values).exponent - 1
    result: list[Binades] = []
    for e in range(int(exponents[0]), int(exponents[-1]) + 1):
        inside = (exponents == e).nonzero().flatten()
        start, count = int(inside[0]), len(inside)
        # The last number of a binade is one step away from the next binade.
        steps = values[start : start + count + 1].diff()
        relative = math.ldexp(float(steps[0]), -e) if len(steps) else None
        last = result[-1] if result else None
        if last is not None and (last.count, last.relative) == (count, relative):
            result[-1] = replace(last, last=e)
        else:
            result.append(Binades(e, e, count, relative))
    return tuple(result)


@functools.cache
def ties(element: Element) -> str:
    """Return where rounding to nearest takes the midpoints of neighboring values, in words."""
    zero = torch.zeros(1)
    low = torch.cat([zero, positive_values(element)[:-1]])
    high = positive_values(element)
    up = round_nearest((low.double() + high.double()).div(2).float(), element) == high
    if up.all():
        return "away from zero"
    if up[1:].all():
        return "away from zero, but half of the smallest number to zero"
    odd_below = torch.arange(len(low)) % 2 == 1
    assert torch.equal(up, odd_below), f"{element} rounds midpoints in no known way"
    return "even"


def saturates(element: Element) -> bool:
    """Return whether values that are too large become the largest number instead of Inf."""
    return bool(round_nearest(torch.tensor([math.inf]), element).isfinite())


@functools.cache
def infinite_from(element: Element) -> float:
    """Return the smallest float32 that rounds to Inf; Inf itself if no number does."""
    if saturates(element):
        return math.inf
    largest = positive_values(element)[-1:]
    return _first(lambda x: round_nearest(x, element).isinf(), int(largest.view(torch.int32)))


def _first(holds: Callable[[Tensor], Tensor], low: int) -> float:
    """Return the smallest float32, up to Inf, above the one with bits `low` for which `holds`."""
    high = INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        bits = torch.tensor([middle], dtype=torch.int32)
        low, high = (low, middle) if holds(bits.view(torch.float32)).item() else (middle, high)
    return float(torch.tensor([high], dtype=torch.int32).view(torch.float32))


@functools.cache
def vanishes_from_half(element: Element) -> bool:
    """Return whether half of the smallest number rounds to zero."""
    return not round_nearest(positive_values(element)[:1] / 2, element).any()


def never_produced(element: Element) -> Tensor:
    """Return the codes, except those of NaN, of numbers that not even they themselves round to."""
    values = all_values(element)
    fixed = round_nearest(values, element) == values
    return (~fixed & ~values.isnan()).nonzero().flatten()


def scale_range(scaling: Scaling) -> tuple[float, float]:
    """Return the smallest and the largest scale above zero that a block can store."""
    scales = scalings.stored_scales(scaling)
    positive = scales[scales.isfinite() & (scales > 0)]
    return float(positive.min()), float(positive.max())


def whole_range(fmt: Format) -> tuple[float, float]:
    """Return the smallest and largest magnitude above zero, without the scale of the tensor."""
    values = positive_values(fmt.element)
    smallest, largest = float(values[0]), float(values[-1])
    if fmt.scaling is not None and fmt.block_size is not None:
        low, high = scale_range(fmt.scaling)
        return smallest * low, largest * high
    return smallest, largest


def scale_bits(fmt: Format) -> tuple[int, int]:
    """Return the stored bits of a block's scale, and the number of values that share it."""
    if fmt.block_size is None:
        return 0, 1
    shape = (fmt.block_size, fmt.block_size) if fmt.square else (fmt.block_size,)
    scales = quantize(torch.ones(shape), _nearest(fmt)).scales.block()
    return 8 * scales.nbytes, math.prod(shape)


def bits_a_value(fmt: Format) -> float:
    """Return the bits per value, with block scales but without the scale of the tensor."""
    bits, values = scale_bits(fmt)
    return fmt.element.bits + bits / values


def effect(fmt: Format, special: float) -> str:
    """Describe what a NaN or an Inf does to the value itself and to its neighbors."""
    size = fmt.block_size or 1
    x = torch.ones(2 * size, 2 * size)
    x[0, 0] = special
    y = fake_quantize(x, _nearest(fmt))
    if y.isnan().sum() > 1:
        assert int(y.isnan().sum()) == size * (size if fmt.square else 1)
        return "makes its block NaN"
    if y[0, 0].isfinite():
        return "becomes the largest number"
    return "stays NaN" if y[0, 0].isnan() else "stays Inf"


def _nearest(fmt: Format) -> Format:
    """Return the format with rounding to nearest, which needs no random numbers."""
    return replace(fmt, rounding="nearest")
