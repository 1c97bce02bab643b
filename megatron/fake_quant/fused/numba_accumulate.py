"""CPU kernels that sum dot products as matrix units do, for `accumulated_matmul`.

`accumulate/scalar.py` defines the result for one dot product; the results of the kernels are
bit-identical. They compute in float64, which represents every intermediate number exactly: products
of float32 numbers and their scales, and integers below 2^53. `numba_float64.py` has the operations
on single numbers. `numba_panels.py` converts the operands to panels, whose columns are computed
together.
"""

from collections.abc import Callable
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
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_float64 import Kept, exponent, power, rounded, sum_to_odd
from megatron.fake_quant.fused.numba_panels import LANES, ROWS, UNROLLED, Panel, fill, kernel

#: Exponent below that of every product, even that of 0 * 0 with scales of 0.
LOWEST = np.int16(5 * ZERO_EXPONENT)
OVERFLOW = 2.0**OVERFLOW_EXPONENT
RUNNING_UNIT = 2.0 ** (STAGE_BITS - RUNNING_BITS)


class Rule(NamedTuple):
    """Constants of an accumulator; the class of the object selects the code of a step."""

    step: int  #: products per step, including padding
    part: int  #: products per part of a step, including padding
    align: int  #: fractional bits of a term below the largest exponent
    interval: int  #: steps between promotions; 0: no promotion
    keep: Kept  #: number type of the running sum
    promoted: Kept  #: number type of the second sum


class Fused(Rule):
    """Constants of the design "fused", if terms are truncated."""

    __slots__ = ()


class Chained(Rule):
    """Constants of the design "fused", if a step has one product and no term is truncated."""

    __slots__ = ()


class Grouped(Rule):
    """Constants of the design "grouped"."""

    __slots__ = ()


class TwoStage(Rule):
    """Constants of the design "two_stage"."""

    __slots__ = ()


class Scratch(NamedTuple):
    """Memory for one step, in arrays `[2, lane]`; a row usually belongs to one part of the step."""

    top: Any  #: int16: largest exponent of the terms
    scale: Any  #: float64: factor that turns the terms into integers
    total: Any  #: float64: sum of these integers
    extremes: Any  #: float64: largest and smallest product


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
    """Compute `scale` from the exponents in `top`, and set `total` to the truncated running sum."""
    top, scale, total = scratch.top[0], scratch.scale[0], scratch.total[0]
    for j in range(LANES):
        scale[j] = power(rule.align - np.int64(top[j]))
        total[j] = np.trunc(running[j] * scale[j])


@inlined
def end_total(running: Any, rule: Any, scratch: Any) -> None:
    """Set the running sum to `total`, scaled back and rounded to the number type of the sum."""
    top, total = scratch.top[0], scratch.total[0]
    for j in range(LANES):
        value = total[j] * power(np.int64(top[j]) - rule.align)
        running[j] = rounded(value, rule.keep) + 0.0  # turns -0 into +0


def add_step(
    rule: Any, left: Any, right: Any, row: Any, first: Any, running: Any, scratch: Any
) -> None:
    """Add the products of a step, which begins with product `first`, to the sums of a row."""
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
    """Add the sums of a step's parts to the running sums, and round the running sums."""
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
        # With two parts, a running sum that is too small counts as 0. Rounding down would turn a
        # negative one into -1 times the unit to which the running sum is rounded.
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
    """Add running sums times their scales to the second sums of a row; clear the running sums."""
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
        continued: True if the sums begin with the values in `out`, False if they begin with zero.
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
                    # Every NaN becomes the canonical NaN.
                    columns[top_row + row, j] = value if value == value else np.float32(np.nan)
