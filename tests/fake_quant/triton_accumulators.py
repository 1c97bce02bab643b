"""The part of triton_worker.py that deals with accumulators."""

import itertools
import re
from typing import Any

import torch

from megatron.fake_quant.accumulate import Accumulator, get_accumulator
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.fused import triton_accumulate, triton_accumulate_launch

from .accumulator_operands import ACCUMULATOR_NAMES, bits, by_reference, first_sums, operands

#: Accumulators that are compiled: every design, with promotions, which need unfused operations.
COMPILED = (
    *("hopper_fp8_promote128", "hopper_bf16", "blackwell_mx", "blackwell_nvfp4", "cdna3_fp8"),
    *("fda:l1:fx:e4m3:rz:p24:pe5m2", "fda:l1:f36:m23:rne"),
)


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
    names = ("TILE", "NARROWEST", "WIDEST")
    before = [getattr(triton_accumulate_launch, name) for name in names]
    for name, size in zip(names, (32, 8, 8), strict=True):
        setattr(triton_accumulate_launch, name, size)
    try:
        return differing(UnitOperand(sides[0]), UnitOperand(sides[1]), unit)
    finally:
        for name, size in zip(names, before, strict=True):
            setattr(triton_accumulate_launch, name, size)


def compiled(forbidden: str) -> dict[str, Any]:
    """Compile kernels for sm_90 and return their instructions that match `forbidden`, by name."""
    values, integers = torch.empty(64), torch.empty(64, dtype=torch.int32)
    numbers = (100, 200, 300, 3, -6, -6)
    found = {}
    for name in COMPILED:
        unit = get_accumulator(name)
        scales = values if unit.scales in ("after", "promotion") else integers
        tensors = (*[values] * 4, integers, integers, scales, scales, integers, integers, values)
        matches = []
        launch = triton_accumulate_launch
        widths = launch.NARROWEST, launch.WIDEST
        for kernel, width in itertools.product(launch.kernels(unit), widths):
            binary = triton_accumulate.sums.warmup(
                *tensors,
                *numbers,
                grid=(1,),
                **triton_accumulate_launch.constants(unit),
                **triton_accumulate_launch.OPTIONS,
                **kernel,
                CONTINUED=True,
                TILE_M=launch.TILE // width,
                TILE_N=width,
            )
            assert binary.asm["cubin"].startswith(b"\x7fELF")
            assert ".target sm_90" in binary.asm["ptx"]
            matches += re.findall(forbidden, binary.asm["ptx"])
        found[name] = {"forbidden": matches, "operations": []}
    return found
