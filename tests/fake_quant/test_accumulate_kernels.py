"""The CPU kernels of accumulators return the bits of the scalar definition."""

import pytest
import torch
from torch import Tensor

from megatron.fake_quant.accumulate import (
    Accumulator,
    accumulated_matmul,
    get_accumulator,
    scalar,
)
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.fused import dispatch, numba_accumulate_launch

from .accumulator_operands import (
    ACCUMULATOR_NAMES,
    bits,
    by_reference,
    first_sums,
    operands,
    rows_of_every_kind,
)

names = pytest.mark.parametrize("name", ACCUMULATOR_NAMES)
multiply = numba_accumulate_launch.multiply


def defined(
    a: UnitOperand, b: UnitOperand, unit: Accumulator, start: Tensor | None = None
) -> Tensor:
    """Return the product of two matrices by the scalar definition."""
    result = torch.empty(a.elements.shape[0], b.elements.shape[0])
    smallest = (a.smallest_exponent, b.smallest_exponent)
    for i, x in enumerate(a.elements.tolist()):
        for j, y in enumerate(b.elements.tolist()):
            scales = None
            if a.scales is not None and b.scales is not None:
                scales = (a.scales[i].tolist(), b.scales[j].tolist())
            first = 0.0 if start is None else start[i, j].item()
            result[i, j] = scalar.dot(x, y, unit, smallest=smallest, scales=scales, start=first)
    return result


@names
def test_rows_of_every_kind_have_the_bits_of_the_definition(name):
    unit = get_accumulator(name)
    a, b = operands(unit, 2 * unit.step + 5 if unit.step > 1 else 30)
    b = b._replace(elements=b.elements[::2], scales=None if b.scales is None else b.scales[::2])
    found = multiply(a.flat(), b.flat(), unit)[0]
    assert torch.equal(bits(found), bits(defined(a, b, unit)))


@names
def test_sums_may_begin_with_any_float32_number(name):
    """Sums continue given numbers, even if the operands are exchanged, as in the last product."""
    unit = get_accumulator(name)
    a, b = (
        side._replace(
            elements=side.elements[rows], scales=None if side.scales is None else side.scales[rows]
        )
        for side, rows in zip(
            operands(unit, unit.step + 5 if unit.step > 1 else 12),
            (slice(None, None, 3), slice(1, None, 2)),
            strict=True,
        )
    )
    start = first_sums((a.elements.shape[0], b.elements.shape[0]))
    expected = bits(defined(a, b, unit, start))
    flat_a, flat_b, start = a.flat(), b.flat(), start[None]
    assert torch.equal(bits(by_reference(flat_a, flat_b, unit, start)[0]), expected)
    assert torch.equal(bits(multiply(flat_a, flat_b, unit, start=start)[0]), expected)
    assert torch.equal(bits(multiply(flat_b, flat_a, unit, start=start.mT)[0].T), expected)


@names
def test_every_tile_and_panel_has_the_bits_of_the_reference(name):
    """Sizes are not multiples of tiles, panels or promotion intervals; there are no scales."""
    unit = get_accumulator(name)
    depth = 3 * (unit.promote_every or unit.step) + 3
    generator = torch.Generator().manual_seed(5)
    a, b = (side._replace(scales=None) for side in operands(unit, depth))

    def picked(side: UnitOperand, rows: int) -> UnitOperand:
        chosen = torch.randint(len(side.elements), (2, rows), generator=generator)
        return side._replace(elements=side.elements[chosen])

    a, b = picked(a, 19), picked(b, 67)
    expected = bits(by_reference(a, b, unit))
    assert torch.equal(bits(multiply(a, b, unit)), expected)
    assert torch.equal(bits(multiply(b, a, unit)), expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["hopper_fp8_promote128", "blackwell_nvfp4"])
def test_threads_do_not_change_bits(name, monkeypatch):
    unit = get_accumulator(name)
    a, b = (side.flat() for side in operands(unit, 200))
    a = a._replace(elements=a.elements.repeat(1, 5, 1), scales=a.scales.repeat(1, 5, 1))
    b = b._replace(elements=b.elements.repeat(1, 9, 1), scales=b.scales.repeat(1, 9, 1))
    monkeypatch.setattr(numba_accumulate_launch, "_LEAST_PRODUCTS", 1)
    monkeypatch.setattr(numba_accumulate_launch, "_LEAST_ELEMENTS", 1)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(bits(multiply(a, b, unit)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 1, 1), (1, 70, 33), (70, 1, 33), (0, 5, 32), (5, 0, 32), (3, 4, 0), (130, 65, 7)],
)
@pytest.mark.parametrize("name", ["hopper_fp8", "hopper_fp8_promote128"])
def test_every_shape(name, rows, columns, depth):
    unit = get_accumulator(name)
    a, b = (torch.ones(2, 3, count, depth) for count in (rows, columns))
    found = multiply(UnitOperand(a).flat(), UnitOperand(b).flat(), unit)
    assert torch.equal(found, torch.full((6, rows, columns), float(depth)))


def test_operands_may_be_views_with_any_strides(monkeypatch):
    monkeypatch.setattr(dispatch, "_left", 0)
    x = rows_of_every_kind("e4m3", 40, 1)
    a, b = x[:12, :39], x[:12, 1:]
    expected = bits(accumulated_matmul(a.contiguous(), b.contiguous(), "hopper_fp8"))
    views = a.t().contiguous().t(), torch.stack([b, b], -1)[..., 0]
    assert torch.equal(bits(accumulated_matmul(*views, "hopper_fp8")), expected)
    leading = accumulated_matmul(a.expand(2, 3, -1, -1), b.expand(2, 3, -1, -1), "hopper_fp8")
    assert torch.equal(bits(leading), expected.expand(2, 3, -1, -1))


def test_the_kernel_is_what_large_products_get(monkeypatch):
    calls = []

    def recorded(*arguments, **settings):
        calls.append(arguments)
        return multiply(*arguments, **settings)

    monkeypatch.setattr(numba_accumulate_launch, "multiply", recorded)
    dispatch._cpu_multiplication.cache_clear()
    monkeypatch.setattr(dispatch, "_left", 0)
    a, b = (rows_of_every_kind(name, 40, 1) for name in ("e4m3", "e4m3"))
    with_kernel = accumulated_matmul(a, b, "hopper_fp8")
    assert len(calls) == 1
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    assert torch.equal(bits(accumulated_matmul(a, b, "hopper_fp8")), bits(with_kernel))
    assert len(calls) == 1
    dispatch._cpu_multiplication.cache_clear()
