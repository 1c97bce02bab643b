"""Sum many dot products as an accumulator does, in plain torch operations.

The result equals `scalar.dot` bit for bit, on every device. Numbers are float64, which holds each
intermediate result exactly: a truncated term, divided by the unit to which it is truncated, is an
integer of at most 40 bits. Only the sum of a product and an addend (`_sum_rounded_to_odd`) may need
more bits; rounding it to odd keeps the next rounding correct.

Shape suffixes: M for the rows of A, N for the rows of B, L for the terms of a step.
"""

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import (
    GROUP,
    IGNORED_EXPONENT,
    OVERFLOW_EXPONENT,
    RUNNING_BITS,
    STAGE_BITS,
    ZERO_EXPONENT,
    Accumulator,
    SumType,
)
from megatron.fake_quant.accumulate.unit_operand import UnitOperand

#: largest number of products that are formed at once
_PRODUCTS_AT_ONCE = 1 << 20
_FLOAT64_BIAS, _FLOAT64_MANTISSA_BITS = 1023, 52


def summed(
    a: UnitOperand, b: UnitOperand, accumulator: Accumulator, *, start: Tensor | None = None
) -> Tensor:
    """Return A B^T + `start`, `[M, N]` in float32, for operands `[M, K]` and `[N, K]`."""
    rows, columns = a.elements.shape[0], b.elements.shape[0]
    result = a.elements.new_zeros(rows, columns)
    at_once = max(1, _PRODUCTS_AT_ONCE // max(1, columns * accumulator.step))
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        scales = None if a.scales is None else a.scales[part]
        left = a._replace(elements=a.elements[part], scales=scales)
        addends = result if start is None else start
        result[part] = _summed_rows(left, b, accumulator, start=addends[part])
    return result


def _summed_rows(
    a: UnitOperand, b: UnitOperand, accumulator: Accumulator, *, start: Tensor
) -> Tensor:
    """Return `start` + A B^T in float64, computing all rows of A at once."""
    length, interval = a.elements.shape[1], accumulator.promote_every
    promoted = start.double()
    running = torch.zeros_like(promoted) if interval else promoted
    for first in range(0, length, accumulator.step):
        last = min(first + accumulator.step, length)
        running = _step((a, b), range(first, last), running, accumulator)
        if interval and (last % interval == 0 or last == length):
            scale = _scale_of_promotion(a, b, first // interval)
            promoted = _multiplied_and_added(running, scale, promoted, accumulator.promote_to)
            running = torch.zeros_like(running)
    return promoted if interval else running


def _step(
    sides: tuple[UnitOperand, UnitOperand],
    columns: range,
    running: Tensor,
    accumulator: Accumulator,
) -> Tensor:
    """Return the running sum after the products of the given columns are added."""
    terms, exponents = (
        _groups(sides, columns, accumulator)
        if accumulator.design == "grouped"
        else _products(sides, columns, accumulator)
    )
    # A finite sum of float64 terms does not overflow; NaN and Inf follow the rules of IEEE 754.
    special = terms.sum(-1) + running
    start = (running, _exponent(running, accumulator.keep.smallest_exponent))
    bits = accumulator.align_bits
    if accumulator.design == "two_stage":
        large = torch.where(terms.abs() >= 2.0**OVERFLOW_EXPONENT, terms * torch.inf, 0.0)
        special = torch.where(special.isfinite(), large.sum(-1), special)
        total = _two_stages(terms, exponents, start, accumulator)
    elif accumulator.design not in ("fused", "grouped"):
        raise AssertionError(f"no rule for the design {accumulator.design!r}")
    elif bits is None:
        total = _sum_rounded_to_odd(terms.squeeze(-1), running)
    else:
        if accumulator.design == "fused":
            exponents = torch.where(terms == 0, IGNORED_EXPONENT, exponents)
        largest = torch.maximum(exponents.amax(-1), start[1])
        total = _aligned_sum(terms, largest, bits) + _truncated(running, largest - bits)
    rounded = _rounded(total, accumulator.keep)
    if accumulator.design != "two_stage":
        rounded = rounded + 0.0  # turns -0 into +0
    return torch.where(special.isfinite(), rounded, special)


def _products(
    sides: tuple[UnitOperand, UnitOperand], columns: range, accumulator: Accumulator
) -> tuple[Tensor, Tensor]:
    """Return the products of L columns and the products' exponents, both `[M, N, L]`."""
    part = slice(columns.start, columns.stop)
    elements = [side.elements[:, part].double() for side in sides]
    exponents = [
        _exponent(values, side.smallest_exponent)
        for values, side in zip(elements, sides, strict=True)
    ]
    if accumulator.scales == "exponents":
        for index, side in enumerate(sides):
            if side.scales is not None:
                scales = _scales_of(side.scales, columns, accumulator)
                elements[index] = elements[index] * scales
                exponents[index] = exponents[index] + _exponent(scales, accumulator.smallest_scale)
    return _outer(*elements), exponents[0].unsqueeze(1) + exponents[1].unsqueeze(0)


def _groups(
    sides: tuple[UnitOperand, UnitOperand], columns: range, accumulator: Accumulator
) -> tuple[Tensor, Tensor]:
    """Return the sums of L groups of products and the sums' exponents, both `[M, N, L]`."""
    sums, exponents = [], []
    for first in range(columns.start, columns.stop, GROUP):
        part = slice(first, min(first + GROUP, columns.stop))
        total = _outer(*(side.elements[:, part].double() for side in sides)).sum(-1)
        exponent = torch.zeros_like(total, dtype=torch.int64)
        for side, axis in zip(sides, (1, 0), strict=True):
            if side.scales is not None:
                scale = _scales_of(side.scales, range(first, first + 1), accumulator).squeeze(-1)
                total = total * scale.unsqueeze(axis)
                exponent = exponent + _exponent(scale, accumulator.smallest_scale).unsqueeze(axis)
        sums.append(total)
        exponents.append(exponent)
    return torch.stack(sums, -1), torch.stack(exponents, -1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b.unsqueeze(0)


def _scales_of(scales: Tensor, columns: range, accumulator: Accumulator) -> Tensor:
    """Return the block scales of all rows in the given columns, in float64."""
    assert accumulator.scale_block is not None, accumulator.name
    blocks = [column // accumulator.scale_block for column in columns]
    return scales[:, blocks].double()


def _scale_of_promotion(a: UnitOperand, b: UnitOperand, block: int) -> Tensor | float:
    """Return the products of A's and B's scales of a block, rounded to float32, as float64.

    Return 1.0 if the operands have no scales.
    """
    assert (a.scales is None) == (b.scales is None), "only one operand has scales"
    if a.scales is None or b.scales is None:
        return 1.0
    return _outer(a.scales[:, block], b.scales[:, block]).double()


def _two_stages(
    terms: Tensor, exponents: Tensor, start: tuple[Tensor, Tensor], accumulator: Accumulator
) -> Tensor:
    """Return the terms' sum plus the running sum in the design "two_stage", before rounding."""
    bits, parts = accumulator.align_bits, accumulator.interleave
    assert bits is not None
    running, running_exponent = start
    largest = [exponents[..., part::parts].amax(-1) for part in range(min(parts, terms.shape[-1]))]
    top = torch.stack(largest).amax(0)
    total = torch.zeros_like(running)
    for part, exponent in enumerate(largest):
        total = total + _floor(_aligned_sum(terms[..., part::parts], exponent, bits), top - bits)
    both = torch.maximum(top, running_exponent)
    kept = _floor(running, both - RUNNING_BITS)
    if parts > 1:
        kept = torch.where(running_exponent < both - RUNNING_BITS - 1, 0.0, kept)
    return _floor(total, both - STAGE_BITS) + kept


def _aligned_sum(terms: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the sum of terms, each truncated to `bits` bits below the exponent `largest`."""
    return _truncated(terms, (largest - bits).unsqueeze(-1)).sum(-1)


def _multiplied_and_added(
    x: Tensor, scale: Tensor | float, addend: Tensor, kept: SumType
) -> Tensor:
    """Return `x * scale + addend` with a single rounding (FMA)."""
    special = x * scale + addend
    return torch.where(
        special.isfinite(), _rounded(_sum_rounded_to_odd(x * scale, addend), kept), special
    )


def _sum_rounded_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Return `x + y`; round an inexact sum to the float64 neighbor whose last bit is 1.

    Rounding the result to fewer bits then gives what rounding the exact sum gives.
    """
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    inexact = (error != 0) & (total.view(torch.int64) & 1 == 0)
    return torch.where(inexact, torch.nextafter(total, error * torch.inf), total)


def _exponent(x: Tensor, smallest: int) -> Tensor:
    """Return the exponents (int64) of `x`, at least `smallest`; `ZERO_EXPONENT` for 0, Inf, NaN."""
    finite = torch.where(x.isfinite(), x, 0.0).double()
    exponent = (torch.frexp(finite).exponent.long() - 1).clamp(min=smallest)
    return torch.where(finite == 0, ZERO_EXPONENT, exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _FLOAT64_BIAS) << _FLOAT64_MANTISSA_BITS).view(torch.float64)


def _floor(x: Tensor, exponent: Tensor) -> Tensor:
    """Return `x`, rounded down to a multiple of 2^exponent."""
    return torch.floor(x * _power_of_two(-exponent)) * _power_of_two(exponent)


def _truncated(x: Tensor, exponent: Tensor) -> Tensor:
    """Return `x`, rounded toward zero to a multiple of 2^exponent."""
    return torch.trunc(x * _power_of_two(-exponent)) * _power_of_two(exponent)


def _rounded(x: Tensor, kept: SumType) -> Tensor:
    """Return a sum, rounded to the number type `kept`; a negative sum may become -0."""
    unit = _exponent(x, kept.smallest_exponent) - kept.mantissa_bits
    if kept.rounding == "rz":
        rounded = _truncated(x, unit)
    elif kept.rounding == "rne":
        rounded = torch.round(x * _power_of_two(-unit)) * _power_of_two(unit)
    else:
        raise AssertionError(f"no rule for the rounding {kept.rounding!r}")
    overflow = rounded.abs() >= 2.0 ** (kept.largest_exponent + 1)
    return torch.where(overflow, x * torch.inf, rounded)
