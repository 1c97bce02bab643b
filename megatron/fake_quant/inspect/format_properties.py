"""The numbers that a format has, found out by asking the code that quantizes.

Values come from the tables of codes; what happens between and beyond them from rounding midpoints,
Inf and NaN; scales from scaling ones up by every stored scale. So what is printed or drawn from
here cannot drift from what `fake_quantize` does.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.fake_quant import hifloat4, mx, nvfp4, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.code_points import code_values
from megatron.fake_quant.formats import (
    BlockScaling,
    Cast,
    Element,
    Format,
    GroupScaling,
    HiFloat8,
    Scaling,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.packing import quantize
from megatron.fake_quant.quantize import fake_quantize
from megatron.fake_quant.rounding import INFINITY
from megatron.fake_quant.scales import Scales

Block = BlockScaling | TwoLevelScaling | GroupScaling


def exponent(value: float) -> int:
    """Of a finite number other than zero: 2^exponent is the largest power of two at or below it."""
    return math.frexp(value)[1] - 1


def all_values(element: Element) -> Tensor:
    """The float32 number that each code stands for, by code."""
    if not isinstance(element, Cast):
        return code_values(element)
    assert element.bits == torch.int16.itemsize * 8
    return torch.arange(1 << element.bits).to(torch.int16).view(element.dtype).float()


@functools.cache
def positive_values(element: Element) -> Tensor:
    """The finite numbers above zero, ascending."""
    values = all_values(element)
    return values[values.isfinite() & (values > 0)].sort().values


def smallest_normal(element: Element) -> float:
    """The smallest number with the full precision of its neighborhood."""
    if isinstance(element, Cast):
        return torch.finfo(element.dtype).tiny
    if isinstance(element, HiFloat8):
        # Below the normal ones are powers of two only, and normal exponents are symmetric.
        return 1 / float(positive_values(element)[-1])
    return math.ldexp(1, element.emin)


def round_nearest(x: Tensor, element: Element) -> Tensor:
    """Float32 `x`, without a scale, to the element's own nearest."""
    fmt = Format(element.name, element)
    return reference.fake_quantize(x, fmt, BlockLayout.of(tuple(x.shape), fmt, -1), None)


@dataclass(frozen=True, slots=True)
class Binades:
    """Neighboring binades [2^E, 2^(E+1)) with as many numbers each, equally spaced."""

    first: int  #: lowest E
    last: int  #: highest E
    count: int  #: of numbers in each
    relative: float | None  #: spacing over 2^E; None where there is nothing above to be spaced from


@functools.cache
def binades(element: Element) -> tuple[Binades, ...]:
    """All binades with positive numbers, from below."""
    values = positive_values(element)
    exponents = torch.frexp(values).exponent - 1
    found: list[Binades] = []
    for e in range(int(exponents[0]), int(exponents[-1]) + 1):
        inside = (exponents == e).nonzero().flatten()
        start, count = int(inside[0]), len(inside)
        # From the last number of a binade to the next binade it is one step as well.
        steps = values[start : start + count + 1].diff()
        relative = math.ldexp(float(steps[0]), -e) if len(steps) else None
        last = found[-1] if found else None
        if last is not None and (last.count, last.relative) == (count, relative):
            found[-1] = replace(last, last=e)
        else:
            found.append(Binades(e, e, count, relative))
    return tuple(found)


@functools.cache
def ties(element: Element) -> str:
    """Where the code that rounds to nearest takes the midpoints of neighboring values."""
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
    """Whether what is too large becomes the largest number; otherwise it becomes Inf."""
    return bool(round_nearest(torch.tensor([math.inf]), element).isfinite())


@functools.cache
def infinite_from(element: Element) -> float:
    """The smallest float32 that rounds to Inf; itself Inf if only that does, or if none does."""
    if saturates(element):
        return math.inf
    largest = positive_values(element)[-1:]
    return _first(lambda x: round_nearest(x, element).isinf(), int(largest.view(torch.int32)))


def _first(holds: Callable[[Tensor], Tensor], low: int) -> float:
    """The smallest float32, up to Inf, for which `holds`; it does not for that with bits `low`."""
    high = INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        bits = torch.tensor([middle], dtype=torch.int32)
        low, high = (low, middle) if holds(bits.view(torch.float32)).item() else (middle, high)
    return float(torch.tensor([high], dtype=torch.int32).view(torch.float32))


@functools.cache
def vanishes_from_half(element: Element) -> bool:
    """Whether half of the smallest number rounds to zero."""
    return not round_nearest(positive_values(element)[:1] / 2, element).any()


def never_produced(element: Element) -> Tensor:
    """Codes, ascending, of what no number rounds to, not even itself; without those of NaN."""
    values = all_values(element)
    fixed = round_nearest(values, element) == values
    return (~fixed & ~values.isnan()).nonzero().flatten()


def stored_scales(scaling: Block) -> Tensor:
    """What blocks can be multiplied by, by code of the scale: float32, one NaN or more among them.

    In NVFP4 without the tensor's scale. In HiFloat4 the second half of the codes is that with all
    bits of exponent set.
    """
    byte = torch.arange(256, dtype=torch.uint8)
    if isinstance(scaling, GroupScaling):
        extremes = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(256)
        stored = torch.stack([byte.repeat(2), *[extremes] * 3], dim=-1)
        return hifloat4.scale_up(torch.ones(512, scaling.size), Scales(stored))[:, 0]
    if isinstance(scaling, TwoLevelScaling):
        return nvfp4.scale_up(torch.ones(256, 1), Scales(byte, torch.ones(())))[:, 0]
    return mx.scale_up(torch.ones(256, 1), Scales(byte))[:, 0]


def scale_range(scaling: Block) -> tuple[float, float]:
    """The smallest and the largest of `stored_scales` above zero."""
    scales = stored_scales(scaling)
    positive = scales[scales.isfinite() & (scales > 0)]
    return float(positive.min()), float(positive.max())


def whole_range(fmt: Format) -> tuple[float, float]:
    """Smallest and largest magnitude above zero with the scales of blocks, not with a tensor's."""
    values = positive_values(fmt.element)
    smallest, largest = float(values[0]), float(values[-1])
    if isinstance(fmt.scaling, Block):
        low, high = scale_range(fmt.scaling)
        return smallest * low, largest * high
    return smallest, largest


def scale_bits(fmt: Format) -> tuple[int, int]:
    """Bits that the scale of a block takes in storage, and the number of values that share it."""
    if fmt.block_size is None:
        return 0, 1
    shape = (fmt.block_size, fmt.block_size) if fmt.square else (fmt.block_size,)
    scales = quantize(torch.ones(shape), _nearest(fmt)).scales.block()
    return 8 * scales.nbytes, math.prod(shape)


def bits_a_value(fmt: Format) -> float:
    """With the scales of blocks; the scale of a tensor is not counted."""
    bits, values = scale_bits(fmt)
    return fmt.element.bits + bits / values


def effect(fmt: Format, special: float) -> str:
    """What a NaN or an Inf does to the value itself and to those around it."""
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
    """Without random numbers, which would have to come from somewhere."""
    return replace(fmt, rounding="nearest")


def has_tensor_scale(scaling: Scaling | None) -> bool:
    """Whether a float32 for the whole tensor belongs to the format."""
    return isinstance(scaling, (TensorScaling, TwoLevelScaling))
