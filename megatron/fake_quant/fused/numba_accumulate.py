"""CPU kernels that sum dot products as matrix units do, for `accumulated_matmul`.

`accumulate/scalar.py` defines the result for one dot product; the kernels return the same bits.
They compute in float64, which represents every intermediate number exactly: products of float32
numbers and their scales, and integers below 2^53. A number is truncated to a multiple of 2^e by
multiplying it by 2^-e, removing the fraction, and multiplying it by 2^e. NaN and Inf need no code
of their own.

A vector register holds the sums of several columns of the result. The rows of B that belong to
LANES columns form a panel: two arrays `[k, lane]`, one with values and one with exponents. A tile
of ROWS rows of A is converted in the same way. Each step is padded with zeros to a multiple of
UNROLLED products. A padded product has the exponent of two zeros. That is below the exponent of
every running sum, so it does not change the result.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from megatron.fake_quant.accumulate.accumulator import (
    GROUP,
    OVERFLOW_EXPONENT,
    RUNNING_BITS,
    STAGE_BITS,
    ZERO_EXPONENT,
)
from megatron.fake_quant.fused.numba_compile import called, inlined, kernel_compiler

LANES = 64  #: columns of the result per panel
ROWS = 16  #: rows of the result per tile
UNROLLED = 4  #: products of a dot product that are added together
ZERO = np.int16(ZERO_EXPONENT)
#: Exponent that no product has; below that of two zeros with scales that are zero, too.
LOWEST = np.int16(5 * ZERO_EXPONENT)
#: Exponent that stands for that of an infinite or undefined element, and of such a sum.
INFINITE_ELEMENT, INFINITE_SUM = 128, 600
OVERFLOW = 2.0**OVERFLOW_EXPONENT
RUNNING_UNIT = 2.0 ** (STAGE_BITS - RUNNING_BITS)


class Kept(NamedTuple):
    """Type of a sum."""

    mantissa: int  #: number of stored mantissa bits
    smallest: int  #: exponent of the smallest normal number
    limit: float  #: power of two at which the sum overflows
    nearest: bool  #: True to round to nearest even, False to round toward zero


class Rule(NamedTuple):
    """Constants of an accumulator; the class of the object selects the code of a step."""

    step: int  #: products per step, padded
    part: int  #: products per part of a step, padded
    align: int  #: fractional bits of a term below the largest exponent
    interval: int  #: steps between promotions; 0: no promotion
    keep: Kept  #: type of the running sum
    promoted: Kept  #: type of the second sum


class Fused(Rule):
    """Constants of the design "fused" whose terms are truncated."""

    __slots__ = ()


class Chained(Rule):
    """Constants of the design "fused" with one product per step and no truncation of terms."""

    __slots__ = ()


class Grouped(Rule):
    """Constants of the design "grouped"."""

    __slots__ = ()


class TwoStage(Rule):
    """Constants of the design "two_stage"."""

    __slots__ = ()


class Packing(NamedTuple):
    """Constants by which elements and scales are converted and placed in a panel."""

    step: int  #: products per step
    parts: int  #: parts into which the products of a step are divided
    padded_step: int  #: products per step, padded
    padded_part: int  #: products per part, padded
    smallest: int  #: exponent of the smallest normal number of the element type
    block: int  #: elements per scale that the unit itself applies; 0 if there are none
    smallest_scale: int  #: exponent of the smallest normal scale
    scale_alone: bool  #: True if the exponent of a scale alone is that of its products


class Panel(NamedTuple):
    """Rows of an operand, converted; both arrays have the shape `[k, row]`."""

    values: Any  #: elements times their scales, float64
    exponents: Any  #: exponents of elements and scales, int16


class Scratch(NamedTuple):
    """Memory for one step; all arrays have the shape `[2, lane]`, for up to two parts of a step."""

    top: Any  #: largest exponent of the terms, int16
    scale: Any  #: factor that turns the terms into integers, float64
    total: Any  #: sum of the terms as integers, float64
    extremes: Any  #: largest and smallest product, float64


def _sources() -> list[Path]:
    """Return the source files from which the kernels are compiled."""
    here = Path(__file__)
    accumulator = here.parents[1] / "accumulate" / "accumulator.py"
    return [here, here.with_name("numba_compile.py"), accumulator]


kernel = kernel_compiler("accumulate", Path(__file__).parent, _sources)


# LLVM inlines the following functions into loops. If numba inlined them, compilation would take a
# third longer.


@called
def power(exponent: Any) -> Any:
    """Return 2^exponent for exponents from -1022 to 1023."""
    return np.int64(np.int64(exponent + 1023) << 52).view(np.float64)


@called
def exponent_field(x: Any) -> Any:
    """Return the exponent of a normal float64 number; 0 has -1023, and Inf and NaN have 1024."""
    return np.int64((np.float64(x).view(np.int64) >> 52) & 2047) - 1023


@called
def exponent(x: Any, smallest: Any) -> Any:
    """Return the exponent of an element, a scale or a running sum."""
    bounded = min(max(exponent_field(x), smallest), INFINITE_SUM)
    return np.int16(bounded) if x != 0 else ZERO


@called
def rounded(value: Any, kept: Any) -> Any:
    """Return a number, rounded to the type of a sum; see `scalar._rounded`."""
    bounded = min(max(exponent_field(value), kept.smallest), INFINITE_SUM)
    scaled = value * power(kept.mantissa - bounded)
    whole = np.rint(scaled) if kept.nearest else np.trunc(scaled)
    result = whole * power(bounded - kept.mantissa)
    return result if abs(result) < kept.limit else result * np.inf


@called
def sum_to_odd(x: Any, y: Any) -> Any:
    """Return x + y; if it is inexact, return that neighbor whose last bit is 1.

    Rounding the result to at most 51 bits is the same as rounding the exact sum.
    """
    total = x + y
    other = total - x
    error = (x - (total - other)) + (y - other)
    bits = np.float64(total).view(np.int64)
    away = np.int64(1) if (error > 0) == (total > 0) else np.int64(-1)
    # The error of a sum that is Inf or NaN is NaN.
    inexact = abs(error) > 0 and bits & 1 == 0
    return np.int64(bits + away if inexact else bits).view(np.float64)


@called
def fill(panel: Any, rows: Any, scales: Any, packing: Any) -> None:
    """Convert rows of an operand; columns of the panel that have no row are zero."""
    panel.values[:] = 0
    panel.exponents[:] = ZERO
    factors, shifts = np.ones(len(rows)), np.zeros(len(rows), np.int16)
    for k in range(rows.shape[1]):
        if packing.block > 0 and k % packing.block == 0:
            for r in range(len(rows)):
                scale = np.float64(scales[r, k // packing.block])
                factors[r] = scale
                shifts[r] = min(exponent(scale, packing.smallest_scale), INFINITE_ELEMENT)
        step = k // packing.step
        inside = k - step * packing.step
        place = inside // packing.parts + inside % packing.parts * packing.padded_part
        place += step * packing.padded_step
        values, exponents = panel.values[place], panel.exponents[place]
        for r in range(len(rows)):
            x = np.float64(rows[r, k])
            values[r] = x * factors[r]
            own = min(exponent(x, packing.smallest), INFINITE_ELEMENT)
            exponents[r] = shifts[r] if packing.scale_alone else np.int16(own + shifts[r])


@kernel
def pack(elements: Any, scales: Any, packing: Any, panels: Any, start: Any, stop: Any) -> None:
    """Convert the operand `elements` `[batch, N, K]` to the panels `start` to `stop - 1`."""
    per_matrix = -(-elements.shape[1] // LANES)
    for item in range(start, stop):
        batch = item // per_matrix
        first = (item - batch * per_matrix) * LANES
        rows, row_scales = elements[batch, first : first + LANES], scales[batch, first:]
        fill(Panel(panels.values[item], panels.exponents[item]), rows, row_scales, packing)


@inlined
def raise_top(left: Any, right: Any, row: Any, first: Any, last: Any, top: Any) -> None:
    """Raise `top` to the largest exponent of the products `first` to `last - 1`."""
    for k in range(first, last, UNROLLED):
        x0, x1 = left.exponents[k, row], left.exponents[k + 1, row]
        x2, x3 = left.exponents[k + 2, row], left.exponents[k + 3, row]
        y0, y1 = right.exponents[k], right.exponents[k + 1]
        y2, y3 = right.exponents[k + 2], right.exponents[k + 3]
        for j in range(LANES):
            even = max(np.int16(x0 + y0[j]), np.int16(x1 + y1[j]))
            odd = max(np.int16(x2 + y2[j]), np.int16(x3 + y3[j]))
            top[j] = max(top[j], max(even, odd))


@inlined
def start_total(running: Any, rule: Any, scratch: Any) -> None:
    """Set `scale` for the largest exponents in `top`, and `total` to the truncated running sum."""
    top, scale, total = scratch.top[0], scratch.scale[0], scratch.total[0]
    for j in range(LANES):
        scale[j] = power(rule.align - np.int64(top[j]))
        total[j] = np.trunc(running[j] * scale[j])


@inlined
def end_total(running: Any, rule: Any, scratch: Any) -> None:
    """Set the running sum to `total`, rounded."""
    top, total = scratch.top[0], scratch.total[0]
    for j in range(LANES):
        value = total[j] * power(np.int64(top[j]) - rule.align)
        running[j] = rounded(value, rule.keep) + 0.0  # turns -0 into +0


def add_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    """Add a step's products, from number `first` on, to the running sums of a row."""
    raise NotImplementedError("only in compiled code")


def fused_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    top, scale, total = scratch.top[0], scratch.scale[0], scratch.total[0]
    for j in range(LANES):
        top[j] = exponent(running[j], rule.keep.smallest)
    raise_top(left, right, row, first, first + rule.step, top)
    start_total(running, rule, scratch)
    for k in range(first, first + rule.step, UNROLLED):
        x0, x1 = left.values[k, row], left.values[k + 1, row]
        x2, x3 = left.values[k + 2, row], left.values[k + 3, row]
        y0, y1, y2, y3 = (
            right.values[k],
            right.values[k + 1],
            right.values[k + 2],
            right.values[k + 3],
        )
        for j in range(LANES):
            factor = scale[j]
            even = np.trunc((x0 * y0[j]) * factor) + np.trunc((x1 * y1[j]) * factor)
            odd = np.trunc((x2 * y2[j]) * factor) + np.trunc((x3 * y3[j]) * factor)
            total[j] = total[j] + (even + odd)
    end_total(running, rule, scratch)


def chained_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    x, y = left.values[first, row], right.values[first]
    for j in range(LANES):
        running[j] = rounded(sum_to_odd(running[j], x * y[j]), rule.keep) + 0.0


def grouped_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    top, scale, total, group = scratch.top[0], scratch.scale[0], scratch.total[0], scratch.total[1]
    for j in range(LANES):
        top[j] = exponent(running[j], rule.keep.smallest)
    for k in range(first, first + rule.step, GROUP):
        x, y = left.exponents[k, row], right.exponents[k]
        for j in range(LANES):
            top[j] = max(top[j], np.int16(x + y[j]))
    start_total(running, rule, scratch)
    for start in range(first, first + rule.step, GROUP):
        for j in range(LANES):
            group[j] = 0
        for k in range(start, start + GROUP, UNROLLED):
            x0, x1 = left.values[k, row], left.values[k + 1, row]
            x2, x3 = left.values[k + 2, row], left.values[k + 3, row]
            y0, y1 = right.values[k], right.values[k + 1]
            y2, y3 = right.values[k + 2], right.values[k + 3]
            for j in range(LANES):
                group[j] = group[j] + ((x0 * y0[j] + x1 * y1[j]) + (x2 * y2[j] + x3 * y3[j]))
        for j in range(LANES):
            total[j] = total[j] + np.trunc(group[j] * scale[j])
    end_total(running, rule, scratch)


def two_stage_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    parts, largest, smallest = rule.step // rule.part, scratch.extremes[0], scratch.extremes[1]
    for j in range(LANES):
        largest[j], smallest[j] = 0, 0
    for part in range(parts):
        top, scale, total = scratch.top[part], scratch.scale[part], scratch.total[part]
        start = first + part * rule.part
        for j in range(LANES):
            top[j] = LOWEST
        raise_top(left, right, row, start, start + rule.part, top)
        for j in range(LANES):
            scale[j] = power(rule.align - np.int64(top[j]))
            total[j] = 0
        for k in range(start, start + rule.part, 2):
            x0, x1, y0, y1 = (
                left.values[k, row],
                left.values[k + 1, row],
                right.values[k],
                right.values[k + 1],
            )
            for j in range(LANES):
                even, odd = x0 * y0[j], x1 * y1[j]
                largest[j] = max(largest[j], max(even, odd))
                smallest[j] = min(smallest[j], min(even, odd))
                total[j] = total[j] + (np.trunc(even * scale[j]) + np.trunc(odd * scale[j]))
    end_stages(rule, parts, running, scratch)


@inlined
def end_stages(rule: Any, parts: Any, running: Any, scratch: Any) -> None:
    """Add the sums of the parts of a step and the running sums, and round the results."""
    top, total = scratch.top[0], scratch.total[0]
    largest, smallest = scratch.extremes[0], scratch.extremes[1]
    for part in range(1, parts):
        other, addend = scratch.top[part], scratch.total[part]
        for j in range(LANES):
            both = max(top[j], other[j])
            first = np.floor(total[j] * power(np.int64(top[j]) - np.int64(both)))
            total[j] = first + np.floor(addend[j] * power(np.int64(other[j]) - np.int64(both)))
            top[j] = both
    for j in range(LANES):
        products, own = np.int64(top[j]), np.int64(exponent(running[j], rule.keep.smallest))
        both = max(products, own)
        kept = np.floor(running[j] * power(RUNNING_BITS - both))
        # With two parts, a running sum that is too small is lost, also if it is negative.
        kept = np.float64(0) if parts > 1 and own < both - RUNNING_BITS - 1 else kept
        value = np.floor(total[j] * power(STAGE_BITS - rule.align + products - both))
        value = (value + kept * RUNNING_UNIT) * power(both - STAGE_BITS)
        # Infinite elements and running sums take precedence over products that overflow.
        up = np.inf if largest[j] >= OVERFLOW else 0.0
        down = -np.inf if smallest[j] <= -OVERFLOW else 0.0
        running[j] = rounded(value + (up + down) if abs(value) < np.inf else value, rule.keep)


_STEPS: dict[type[Rule], Callable[..., None]] = {
    Fused: fused_step,
    Chained: chained_step,
    Grouped: grouped_step,
    TwoStage: two_stage_step,
}


@overload(add_step, inline="always", strict=False)
def _add_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> Any:
    return _STEPS[rule.instance_class]


@inlined
def promote(running: Any, second: Any, left: Any, right: Any, kept: Any) -> None:
    """Add running sums times their scales to the second sums of a row, and clear them."""
    for j in range(len(right)):
        product = np.float64(running[j]) * np.float64(np.float32(left * right[j]))
        second[j] = rounded(sum_to_odd(product, second[j]), kept)
    for j in range(LANES):
        running[j] = 0


@kernel
def sums(
    rule: Any,
    elements: Any,
    scales: Any,
    packing: Any,
    panels: Any,
    factors: Any,
    out: Any,
    continued: Any,
    spans: Any,
    start: Any,
    stop: Any,
) -> None:
    """Compute the parts `start` to `stop - 1` of `out` `[batch, M, N]`.

    A part is a tile of rows and one of `spans` ranges of panels.

    Args:
        elements: operand A `[batch, M, K]`.
        scales: scales of A that the unit itself applies, `[batch, M, blocks]`.
        panels: operand B, converted.
        factors: scales of both operands for each promotion, `[batch, interval, row]`.
        continued: True if the sums begin with the values in `out`, False if with zero.
    """
    height, depth = elements.shape[1], panels.values.shape[1]
    tiles, width = -(-height // ROWS), -(-out.shape[2] // LANES)
    left = Panel(np.empty((depth, ROWS)), np.empty((depth, ROWS), np.int16))
    floats = np.empty((3, 2, LANES))
    scratch = Scratch(np.empty((2, LANES), np.int16), floats[0], floats[1], floats[2])
    running, second = np.empty((ROWS, LANES)), np.empty((ROWS, LANES))
    filled = -1
    for item in range(start, stop):
        tile = item // spans
        batch, span = tile // tiles, item - tile * spans
        top_row = (tile - batch * tiles) * ROWS
        rows = min(height - top_row, ROWS)
        if tile != filled:
            source, row_scales = elements[batch, top_row : top_row + rows], scales[batch, top_row:]
            fill(left, source, row_scales, packing)
            filled = tile
        for number in range(width * span // spans, width * (span + 1) // spans):
            panel = batch * width + number
            right = Panel(panels.values[panel], panels.exponents[panel])
            columns = out[batch, :, number * LANES : (number + 1) * LANES]
            running[:] = 0
            second[:] = 0
            result = second if rule.interval > 0 else running
            if continued:
                for row in range(rows):
                    for j in range(columns.shape[1]):
                        result[row, j] = columns[top_row + row, j]
            steps, interval = 0, 0
            for first in range(0, depth, rule.step):
                for row in range(rows):
                    add_step(rule, left, right, row, first, running[row], scratch)
                steps += 1
                if steps == rule.interval or (rule.interval > 0 and first + rule.step == depth):
                    shared = factors[1][batch, interval, number * LANES : (number + 1) * LANES]
                    for row in range(rows):
                        factor = factors[0][batch, interval, top_row + row]
                        promote(running[row], second[row], factor, shared, rule.promoted)
                    steps, interval = 0, interval + 1
            for row in range(rows):
                for j in range(columns.shape[1]):
                    value = np.float32(result[row, j])
                    # All NaNs become the same NaN.
                    columns[top_row + row, j] = value if value == value else np.float32(np.nan)
