"""The part of triton_worker.py that deals with accumulators."""

import re
from typing import Any

import torch

from megatron.fake_quant.accumulate import Accumulator, get_accumulator
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.fused import triton_accumulate, triton_accumulate_launch

from .accumulator_operands import ACCUMULATOR_NAMES, bits, by_reference, first_sums, operands

#: Accumulator that is compiled: with a promotion, which needs unfused operations.
COMPILED = "hopper_fp8_promote128"


def differing(
    a: UnitOperand, b: UnitOperand, unit: Accumulator, start: torch.Tensor | None = None
) -> int:
    ours = triton_accumulate_launch.multiply(a, b, unit, start=start)
    return int((bits(ours) != bits(by_reference(a, b, unit, start))).sum())


def differences() -> dict[str, int]:
    """Return the number of differing results for each accumulator, in Triton's interpreter.

    The sums begin with zero and with other numbers. The kernel computes operands without special
    and far elements in another way, so that they are compared separately.
    """
    counts = {}
    for name in ACCUMULATOR_NAMES:
        unit = get_accumulator(name)
        depth = unit.step + 5 if unit.step > 1 else 12
        counts[name] = 0
        for special in (True, False):
            a, b = operands(unit, depth, special=special)
            if not special:
                a, b = near(a), near(b)
            start = first_sums((1, a.elements.shape[0], b.elements.shape[0]))
            counts[name] += differing(a.flat(), b.flat(), unit, start)
    return counts | {"several tiles and batches": _tiled()}


def near(operand: UnitOperand) -> UnitOperand:
    """Replace elements that `near_step` does not accept by zero."""
    x = operand.elements
    low, high = triton_accumulate_launch.NEAR
    return operand._replace(elements=x.masked_fill((x.abs() > high) | (x.abs() < low), 0.0))


def _tiled() -> int:
    """Compare a product of several batches, tiles and promotion intervals, without scales."""
    unit = get_accumulator("fda:l4:f13:m13:rz:p8")
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(2, rows, 13, generator=generator).bfloat16().float() for rows in (5, 9)]
    before = triton_accumulate_launch.TILE_M, triton_accumulate_launch.TILE_N
    triton_accumulate_launch.TILE_M, triton_accumulate_launch.TILE_N = 4, 8
    try:
        return differing(UnitOperand(sides[0]), UnitOperand(sides[1]), unit)
    finally:
        triton_accumulate_launch.TILE_M, triton_accumulate_launch.TILE_N = before


def compiled(forbidden: str) -> dict[str, Any]:
    """Compile a kernel for sm_90 and return the instructions that match `forbidden`."""
    values, integers = torch.empty(64), torch.empty(64, dtype=torch.int32)
    numbers = (100, 200, 300, 3, -6, -6)
    tensors = (values, values, integers, integers, values, values, integers, integers, values)
    binary = triton_accumulate.sums.warmup(
        *tensors,
        *numbers,
        grid=(1,),
        **triton_accumulate_launch.constants(get_accumulator(COMPILED)),
        **triton_accumulate_launch.OPTIONS,
        CONTINUED=True,
    )
    assert binary.asm["cubin"].startswith(b"\x7fELF")
    assert ".target sm_90" in binary.asm["ptx"]
    return {"forbidden": re.findall(forbidden, binary.asm["ptx"]), "operations": []}
