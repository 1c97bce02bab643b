"""Launch the CPU kernels that sum dot products as matrix units do.

This module chooses the operand that is converted to panels, the kernel's constants and the number
of threads.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import (
    IGNORED_EXPONENT,
    ZERO_EXPONENT,
    Accumulator,
    SumType,
)
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.fused import numba_threads
from megatron.fake_quant.fused.numba_accumulate import (
    Chained,
    Fused,
    Grouped,
    Rule,
    TwoStage,
    sums,
)
from megatron.fake_quant.fused.numba_float64 import Kept
from megatron.fake_quant.fused.numba_panels import LANES, ROWS, UNROLLED, Packing, Panel, pack
from megatron.fake_quant.fused.tensor_memory import bits_in_memory

_LEAST_PRODUCTS = 1 << 20  #: number of products that makes an additional thread worthwhile
_LEAST_ELEMENTS = 1 << 15  #: elements to convert that make an additional thread worthwhile

_RULES: dict[str, type[Rule]] = {"fused": Fused, "grouped": Grouped, "two_stage": TwoStage}
Floats = NDArray[np.float32]


def multiply(
    a: UnitOperand, b: UnitOperand, accumulator: Accumulator, *, start: Tensor | None = None
) -> Tensor:
    """Return A B^T + `start`, `[batch, M, N]`, for operands `[batch, M, K]` and `[batch, N, K]`.

    The result is that of `accumulate/reference.py`, bit for bit.
    """
    batches, rows, depth = a.elements.shape
    columns = b.elements.shape[1]
    if _better_as_panels(rows, columns):
        start = None if start is None else start.transpose(1, 2)
        return multiply(b, a, accumulator, start=start).transpose(1, 2).contiguous()
    out = torch.empty(batches, rows, columns, dtype=torch.float32, device="cpu")
    if start is not None:
        out.copy_(start)
    if out.numel() == 0:
        return out
    rule = make_rule(accumulator)
    panels = _panels(b, rule, accumulator)
    tiles = batches * -(-rows // ROWS)
    width = -(-columns // LANES)
    spans = min(width, -(-torch.get_num_threads() * numba_threads.PARTS // tiles))
    per_item = min(rows, ROWS) * -(-width // spans) * LANES * max(depth, 1)
    work = functools.partial(
        sums,
        rule,
        _array(a.elements),
        _inner_scales(a, accumulator),
        _packing(a, rule, accumulator),
        panels,
        (_factors(a, accumulator), _factors(b, accumulator)),
        _array(out),
        start is not None,
        spans,
    )
    numba_threads.run(work, tiles * spans, -(-_LEAST_PRODUCTS // per_item))
    return out


def _better_as_panels(rows: int, columns: int) -> bool:
    """Return whether to convert A `[rows, K]` to panels, rather than B `[columns, K]`.

    Panels should be full. Of two operands with full panels, the smaller one needs less memory.
    """
    return rows > columns if columns < LANES else LANES <= rows < columns


def make_rule(accumulator: Accumulator) -> Rule:
    """Return the constants of an accumulator."""
    assert accumulator.simulated, accumulator.name
    step, parts = accumulator.step, accumulator.interleave
    if accumulator.align_bits is None:
        assert (accumulator.design, step) == ("fused", 1), accumulator.name
        kind: type[Rule] = Chained
        part = 1
    else:
        kind = _RULES[accumulator.design]
        part = -(-step // (parts * UNROLLED)) * UNROLLED
    assert parts <= 2, accumulator.name
    every = accumulator.promote_every
    assert every in (None, accumulator.scale_block), accumulator.name
    return kind(
        step=part * parts,
        part=part,
        align=accumulator.align_bits or 0,
        interval=0 if every is None else every // step,
        keep=_kept(accumulator.keep),
        promoted=_kept(accumulator.promote_to),
    )


def _kept(kept: SumType) -> Kept:
    if kept.rounding not in ("rz", "rne"):
        raise AssertionError(f"no rule for the rounding {kept.rounding!r}")
    return Kept(
        mantissa=kept.mantissa_bits,
        smallest=kept.smallest_exponent,
        limit=2.0 ** (kept.largest_exponent + 1),
        nearest=kept.rounding == "rne",
    )


def _packing(operand: UnitOperand, rule: Rule, accumulator: Accumulator) -> Packing:
    inner = operand.scales is not None and accumulator.scales in ("exponents", "significands")
    return Packing(
        step=accumulator.step,
        parts=accumulator.interleave,
        padded_step=rule.step,
        padded_part=rule.part,
        smallest=operand.smallest_exponent,
        block=(accumulator.scale_block or 0) if inner else 0,
        smallest_scale=accumulator.smallest_scale if inner else 0,
        scale_alone=accumulator.design == "grouped",
        zero=IGNORED_EXPONENT if accumulator.design == "fused" else ZERO_EXPONENT,
    )


def _panels(operand: UnitOperand, rule: Rule, accumulator: Accumulator) -> Panel:
    """Convert an operand to panels."""
    batches, rows, depth = operand.elements.shape
    count = batches * -(-rows // LANES)
    shape = (count, -(-depth // accumulator.step) * rule.step, LANES)
    panels = Panel(np.empty(shape), np.empty(shape, np.int16))
    elements, scales = _array(operand.elements), _inner_scales(operand, accumulator)
    work = functools.partial(pack, elements, scales, _packing(operand, rule, accumulator), panels)
    numba_threads.run(work, count, -(-_LEAST_ELEMENTS // (LANES * max(depth, 1))))
    return panels


def _inner_scales(operand: UnitOperand, accumulator: Accumulator) -> Floats:
    """Return the scales that the unit itself applies; an empty array if there are none."""
    if operand.scales is None or accumulator.scales == "promotion":
        return np.empty((*operand.elements.shape[:2], 0), np.float32)
    return _array(operand.scales)


def _factors(operand: UnitOperand, accumulator: Accumulator) -> Floats:
    """Return the operand's scales that each promotion applies, `[batch, interval, row]`."""
    every = accumulator.promote_every
    if every is None:
        return np.empty((0, 0, 0), np.float32)
    batches, rows, depth = operand.elements.shape
    if operand.scales is None:
        return np.ones((batches, -(-depth // every), rows), np.float32)
    return _array(operand.scales.transpose(1, 2))


def _array(x: Tensor) -> Floats:
    """Return the values of a float32 tensor as an array; the memory of a dense tensor is shared."""
    dense = x.detach().contiguous()
    if dense.numel() == 0:
        return np.empty(dense.shape, np.float32)
    array: Floats = bits_in_memory(dense.view(-1)).view(np.float32)
    return array.reshape(dense.shape)
