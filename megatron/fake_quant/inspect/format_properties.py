"""Properties of number formats, measured by running the quantization code.

The values come from the tables of codes. The behavior between and beyond the values is found by
rounding midpoints, Inf and NaN; the scales are found by applying every stored scale to ones. Tables
and pictures that use these functions therefore always agree with `fake_quantize`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.fake_quant import reference, scalings
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.code_points import code_values
from megatron.fake_quant.elements import Element
from megatron.fake_quant.float32_bits import INFINITY
from megatron.fake_quant.formats import Format, Scaling
from megatron.fake_quant.packing import quantize
from megatron.fake_quant.quantize import fake_quantize


def exponent(value: float) -> int:
    """Return the exponent E of a finite nonzero number, whose magnitude is in [2^E, 2^(E+1))."""
    return math.frexp(value)[1] - 1


def all_values(element: Element) -> Tensor:
    """Return the float32 values of all codes of an element type, in the order of the codes."""
    if not element.is_cast:
        return code_values(element)
    assert element.bits == torch.int16.itemsize * 8
    return torch.arange(1 << element.bits).to(torch.int16).view(element.dtype).float()


@functools.cache
def positive_values(element: Element) -> Tensor:
    """Return the finite positive values of an element type, in ascending order."""
    values = all_values(element)
    return values[values.isfinite() & (values > 0)].sort().values


def round_nearest(x: Tensor, element: Element) -> Tensor:
    """Round float32 `x` to the nearest values of an element type, without scaling `x`."""
    fmt = Format(element.name, element)
    return reference.fake_quantize(x, fmt, BlockLayout.of(tuple(x.shape), fmt, -1), None)


@dataclass(frozen=True, slots=True)
class Binades:
    """Consecutive binades [2^E, 2^(E+1)) with the same number and relative spacing of values."""

    first: int  #: lowest E
    last: int  #: highest E
    count: int  #: number of values in each binade
    #: distance between neighboring values divided by 2^E; None for a binade that contains only the
    #: largest value
    relative: float | None


@functools.cache
def binades(element: Element) -> tuple[Binades, ...]:
    """Return the binades of an element type's positive values, in ascending order.

    Consecutive binades with the same number and relative spacing of values are merged.
    """
    values = positive_values(element)
    exponents = torch.frexp(values).exponent - 1
    result: list[Binades] = []
    for e in range(int(exponents[0]), int(exponents[-1]) + 1):
        inside = (exponents == e).nonzero().flatten()
        start, count = int(inside[0]), len(inside)
        # Include the first value of the next binade, which is one step above this binade's last.
        steps = values[start : start + count + 1].diff()
        relative = math.ldexp(float(steps[0]), -e) if len(steps) else None
        last = result[-1] if result else None
        if last is not None and (last.count, last.relative) == (count, relative):
            result[-1] = replace(last, last=e)
        else:
            result.append(Binades(e, e, count, relative))
    return tuple(result)


@functools.cache
def has_normal_numbers(element: Element) -> bool:
    """Return whether an element type distinguishes normal from subnormal numbers.

    Integers and tables do not.
    """
    return not element.is_table and getattr(element, "exponent_bits", 2) > 1


def ties(element: Element) -> str:
    """Describe how rounding to nearest resolves ties, in words such as "away from zero"."""
    if element.is_table:
        values = all_values(element)
        lower = round_nearest((values[1:].double() + values[:-1]).div(2).float(), element)
        assert torch.equal(lower, values[:-1]), f"{element} rounds midpoints in no known way"
        return "to the lower number"
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
    """Return whether values beyond the largest number saturate instead of becoming Inf."""
    return bool(round_nearest(torch.tensor([math.inf]), element).isfinite())


@functools.cache
def infinite_from(element: Element) -> float:
    """Return the smallest float32 that rounds to Inf, or Inf if no finite number rounds to Inf."""
    if saturates(element):
        return math.inf
    largest = positive_values(element)[-1:]
    return _first(lambda x: round_nearest(x, element).isinf(), int(largest.view(torch.int32)))


def _first(holds: Callable[[Tensor], Tensor], low: int) -> float:
    """Return the smallest float32 for which the condition `holds` is true, or Inf if there is none.

    The search is a bisection, so the condition must be true for all larger numbers, too. `low` is
    the float32 bits of a smaller number, for which the condition is false.
    """
    high = INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        bits = torch.tensor([middle], dtype=torch.int32)
        low, high = (low, middle) if holds(bits.view(torch.float32)).item() else (middle, high)
    return float(torch.tensor([high], dtype=torch.int32).view(torch.float32))


@functools.cache
def vanishes_from_half(element: Element) -> bool:
    """Return whether half of an element type's smallest positive value rounds to zero."""
    return not round_nearest(positive_values(element)[:1] / 2, element).any()


def never_produced(element: Element) -> Tensor:
    """Return the codes whose value is not rounded to itself, excluding NaN codes."""
    values = all_values(element)
    fixed = round_nearest(values, element) == values
    return (~fixed & ~values.isnan()).nonzero().flatten()


def scale_range(scaling: Scaling) -> tuple[float, float]:
    """Return the smallest and the largest positive scale that can be stored for a block."""
    scales = scalings.stored_scales(scaling)
    positive = scales[scales.isfinite() & (scales > 0)]
    return float(positive.min()), float(positive.max())


def whole_range(fmt: Format) -> tuple[float, float]:
    """Return the smallest and the largest positive product of an element and its block scale.

    The scale of the tensor is not included.
    """
    values = positive_values(fmt.element)
    smallest, largest = float(values[0]), float(values[-1])
    if fmt.scaling is not None and fmt.block_size is not None:
        low, high = scale_range(fmt.scaling)
        return smallest * low, largest * high
    return smallest, largest


def scale_bits(fmt: Format) -> tuple[int, int]:
    """Count the scale bits and the values of a block, or of the blocks that share an outer scale.

    Scales of a whole row, column or tensor are not included.
    """
    size = fmt.block_size
    if size is None or WHOLE_AXIS in (size, fmt.height):
        return 0, 1
    if fmt.outer_size is not None and fmt.outer_size < WHOLE_AXIS:
        size = fmt.outer_size
    shape = (fmt.height, size) if fmt.height > 1 else (size,)
    scales = quantize(torch.ones(shape), _nearest(fmt)).scales
    bits = 8 * scales.block().nbytes
    if size == fmt.outer_size:
        bits += 8 * scales.whole().nbytes
    return bits, math.prod(shape)


def bits_a_value(fmt: Format) -> float:
    """Return the stored bits per value, including block scales but not row or tensor scales."""
    bits, values = scale_bits(fmt)
    return fmt.element.bits + bits / values


def bits_in_matrix(fmt: Format, rows: int, columns: int) -> float:
    """Return the stored bits per value of a matrix, including block, row and column scales.

    Scales of the whole tensor are not included. Blocks extend along the rows of the matrix, each of
    which has `columns` values.
    """
    bits = bits_a_value(fmt)
    if fmt.block_size == WHOLE_AXIS and not fmt.one_block:
        bits += 8 * fmt.scale_bytes / columns
    if fmt.columns:
        bits += 8 * fmt.scale_bytes / rows
    if fmt.outer_size == WHOLE_AXIS:
        bits += 32 / columns
    return bits


def effect(fmt: Format, special: float) -> str:
    """Describe what quantization does to `special`, a NaN or an Inf, and to its block."""
    block = [2 if side == WHOLE_AXIS else side for side in (fmt.height, fmt.block_size or 1)]
    whole = [side == WHOLE_AXIS for side in (fmt.height, fmt.block_size)]
    x = torch.ones([side if all_ else 2 * side for side, all_ in zip(block, whole, strict=True)])
    x[0, 0] = special
    y = fake_quantize(x, _nearest(fmt))
    if y.isnan().sum() > 1:
        assert int(y.isnan().sum()) == math.prod(block)
        return "makes its block NaN"
    if y[0, 0].isfinite():
        return "becomes the largest number"
    return "stays NaN" if y[0, 0].isnan() else "stays Inf"


def _nearest(fmt: Format) -> Format:
    """Return the format with rounding to nearest, and with scales computed from the tensor."""
    return replace(fmt.with_own_amax(), rounding="nearest")
