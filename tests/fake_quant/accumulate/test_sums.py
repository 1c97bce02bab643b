"""Sums of matrix units: the scalar definition, the reference, rational arithmetic and hardware."""

import json
import math
import struct

import pytest
import torch
from torch import Tensor

from megatron.fake_quant import accumulated_matmul
from megatron.fake_quant.accumulate import ACCUMULATORS, get_accumulator, reference, scalar
from megatron.fake_quant.accumulate.element_types import smallest_exponent
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from tests.subprocesses import REPO

from .operands import KINDS, block_scales, operands
from .rational_sums import DEFINITIONS

SIMULATED = [name for name, accumulator in ACCUMULATORS.items() if accumulator.simulated]
VECTORS = json.loads((REPO / "tests/data/accumulator_vectors.json").read_text(encoding="utf-8"))


def element_pairs(name: str) -> list[tuple[str, str]]:
    accumulator = get_accumulator(name)
    types = accumulator.elements or ("e4m3", "float32")
    pairs = [(one, one) for one in types]
    return [*pairs, types[:2]] if accumulator.mixes and len(types) > 1 else pairs


def same(x: float, y: float) -> bool:
    """Return whether two numbers have the same bits, or both are NaN."""
    return (math.isnan(x) and math.isnan(y)) or struct.pack("d", x) == struct.pack("d", y)


def scalar_dot(name: str, a: list[float], b: list[float], pair: tuple[str, str], scales=None):
    smallest = (smallest_exponent(pair[0]), smallest_exponent(pair[1]))
    return scalar.dot(a, b, get_accumulator(name), smallest=smallest, scales=scales)


def products(name: str, a: Tensor, b: Tensor, pair: tuple[str, str], scales=None) -> list[Tensor]:
    """Return A B^T from the reference, and from `accumulated_matmul`, which may run a kernel."""
    sides = [
        UnitOperand(x, smallest_exponent(element), scale)
        for x, element, scale in zip((a, b), pair, scales or (None, None), strict=True)
    ]
    by_reference = reference.summed(*sides, get_accumulator(name))
    return [by_reference, accumulated_matmul(a, b, name, elements=pair, scales=scales)]


def test_every_simulated_accumulator_has_a_rational_definition():
    assert set(SIMULATED) <= set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_sums_equal_rational_arithmetic(name):
    """The compared implementations are independent; sums are negative, tiny, canceled or zero."""
    random = torch.Generator().manual_seed(3)
    accumulator = get_accumulator(name)
    length = max(2 * accumulator.step + 5, 150 if accumulator.promote_every else 11)
    for pair in element_pairs(name):
        for kind in KINDS:
            if kind == "spread" and accumulator.keep.exponent_bits < 8:
                continue  # the sum would overflow
            shape = (2, length)
            a, b = operands(kind, pair, shape, random)
            parts = [block_scales(accumulator, shape, random) for _ in "ab"]
            scales = None if kind == "random" or parts[0] is None else tuple(parts)
            results = products(name, a, b, pair, scales)
            for i in range(2):
                for j in range(2):
                    row = None if scales is None else (scales[0][i].tolist(), scales[1][j].tolist())
                    x, y = a[i].tolist(), b[j].tolist()
                    expected = float(DEFINITIONS[name](x, y, row, pair))
                    assert scalar_dot(name, x, y, pair, row) == expected, (kind, pair)
                    assert [c[i, j].item() for c in results] == [expected] * 2, (kind, pair)


@pytest.mark.parametrize("name", SIMULATED)
def test_sums_equal_the_scalar_definition_with_special_values(name):
    random = torch.Generator().manual_seed(4)
    accumulator = get_accumulator(name)
    for pair in element_pairs(name):
        shape = (5, 40)
        a, b = operands("zeros", pair, shape, random)
        a[1], a[2, 30], a[4, 0] = -0.0, math.nan, -a[4, 0]
        if pair[0] in ("e5m2", "bfloat16", "float16", "float32"):
            a[2, 0], a[3, 1], a[4, :2] = math.inf, -math.inf, torch.tensor([math.inf, -math.inf])
        if pair[0] == "bfloat16":
            a[0, ::9] = torch.finfo(torch.bfloat16).max
            b[0, ::9] = -torch.finfo(torch.bfloat16).max
        parts = [block_scales(accumulator, shape, random) for _ in "ab"]
        scales = None
        if parts[0] is not None:
            parts[1][3, 0], parts[1][4] = math.nan, 0.0 if accumulator.scale_type == "e4m3" else 1.0
            scales = tuple(parts)
        results = products(name, a, b, pair, scales)
        for i in range(5):
            for j in range(5):
                row = None if scales is None else (scales[0][i].tolist(), scales[1][j].tolist())
                expected = scalar_dot(name, a[i].tolist(), b[j].tolist(), pair, row)
                assert all(same(c[i, j].item(), expected) for c in results), (pair, i, j)


def bits(text: str) -> float:
    return struct.unpack(">f", bytes.fromhex(text))[0]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_vectors_measured_on_hardware_or_by_another_model(case):
    """The file names the source of each vector; the results are compared bit for bit."""
    accumulator = get_accumulator(case["accumulator"])
    a, b = ([bits(word) for word in case[side].split()] for side in "ab")
    scales = None
    if "scales" in case:
        scales = tuple([bits(word) for word in side.split()] for side in case["scales"])
    smallest = tuple(smallest_exponent(name) for name in case["elements"])
    result = scalar.dot(
        a, b, accumulator, smallest=smallest, scales=scales, start=bits(case.get("start", "0" * 8))
    )
    assert struct.pack(">f", result).hex() == case["result"]
