"""Test how the difference of two tensors is measured."""

import math

import pytest
import torch

from megatron.analysis.diff import difference
from megatron.analysis.diff.difference import Tolerance, compare

EXACT = Tolerance()
NAN, INF = math.nan, math.inf


def tensors(*pairs, dtype=torch.bfloat16):
    return [torch.tensor(values, dtype=dtype) for values in zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("pair", "unequal", "special"),
    [
        ((0.0, -0.0), 0, 0),
        ((NAN, NAN), 0, 0),
        ((INF, INF), 0, 0),
        ((INF, -INF), 1, 1),
        ((NAN, 1.0), 1, 1),
        ((1.0, INF), 1, 1),
        ((NAN, INF), 1, 1),
        ((1.0, 1.0078125), 1, 0),
    ],
)
def test_values_are_compared_as_numbers(pair, unequal, special):
    a, b = tensors((2.0, 2.0), pair, (3.0, 3.0))
    found = compare(a, b, EXACT)
    assert (found.unequal, found.special) == (unequal, special)
    assert found.within(EXACT) == (not unequal)
    assert not special or not found.within(Tolerance(relative=1e9, rtol=1e9, atol=INF))
    if unequal:
        assert found.at == (1,)
        assert found.values == pytest.approx(pair, nan_ok=True)
    if special:
        assert found.relative_error == INF
        assert found.norm == 0, "only finite values count"


def test_bits_are_a_separate_result():
    x = torch.tensor([0.0, 1.0, NAN])
    other_nan = x.view(torch.int32).clone()
    other_nan[2] += 1
    assert compare(x, x.clone(), EXACT).same_bits
    for y in (torch.tensor([-0.0, 1.0, NAN]), x.bfloat16(), other_nan.view(torch.float32)):
        found = compare(x, y, EXACT)
        assert not found.same_bits
        assert not found.unequal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_are_those_of_naive_formulas(monkeypatch, dtype):
    """The tensors have several pieces, the last of which is not full."""
    monkeypatch.setattr(difference, "PIECE", 7)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(5, 6, generator=generator).to(dtype)
    b = (a + 0.1 * torch.randn(5, 6, generator=generator)).to(dtype)
    found = compare(a, b, Tolerance(rtol=0.05, atol=0.02))
    x, y = a.double(), b.double()
    assert found.count == 30
    assert found.unequal == int((x != y).sum())
    assert found.beyond == int(((y - x).abs() > 0.02 + 0.05 * x.abs()).sum())
    assert 0 < found.beyond < 30
    assert found.relative_error == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-6)
    assert found.cosine == pytest.approx(float((x * y).sum() / x.norm() / y.norm()), rel=1e-9)
    assert found.gain == pytest.approx(float((x * y).sum() / (x * x).sum()) - 1, abs=1e-7)
    worst = int((y - x).abs().argmax())
    assert found.at == (worst // 6, worst % 6)
    assert found.largest == pytest.approx(float((y - x).abs().max()), rel=1e-6)
    assert found.values == (float(x[found.at]), float(y[found.at]))


def test_all_given_limits_must_hold():
    a, b = tensors((1.0, 1.125), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    for limits, holds in (
        ({"relative": 0.07}, True),
        ({"relative": 0.06}, False),
        ({"rtol": 0.13}, True),
        ({"rtol": 0.1}, False),
        ({"rtol": 0.1, "atol": 0.03}, True),
        ({"relative": 0.07, "atol": 0.1}, False),
        ({}, False),
    ):
        tolerance = Tolerance(**limits)
        assert compare(a, b, tolerance).within(tolerance) == holds, limits


def test_odd_tensors():
    zero, one = torch.zeros(2), torch.ones(2)
    assert compare(zero, one, EXACT).relative_error == INF
    assert compare(torch.empty(0), torch.empty(0), EXACT).same_bits
    assert compare(torch.tensor(1), torch.tensor(2), EXACT).at == ()
    huge = torch.full((2,), 1e300, dtype=torch.float64)
    assert compare(huge, -huge, EXACT).relative_error == INF
    codes = torch.arange(256, dtype=torch.uint8)
    assert compare(codes, codes.flip(0), EXACT).unequal == 256
    eights = [torch.tensor(values).to(torch.float8_e4m3fn) for values in ([1.0, 2.0], [1.0, 3.0])]
    assert compare(*eights, EXACT).largest == 1
    with pytest.raises(ValueError, match=r"shape \[3\] in B, but \[2\] in A"):
        compare(zero, torch.zeros(3), EXACT)
