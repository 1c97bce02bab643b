"""Check the gain and the split of the squared error against exact rational arithmetic.

The quantized values come from `fake_quantize`, which has tests and oracles of its own, and the
clipped values from the oracle of `test_clipping`. All sums are exact, in integers.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.analysis.stats import direct, tensor
from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.format_groups import axes_of, group_formats
from megatron.analysis.stats.kernels.scalar_quantizer import number_of_codes
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.result import ERROR_SHARES
from megatron.analysis.stats.result_columns import arrays_of
from megatron.fake_quant import dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.formats import FORMATS
from tests.analysis.stats.clipping_oracle import NAMES, clipped, edges
from tests.analysis.stats.inputs import heavy

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Formats that are counted by class and have elements or scales that no named format has.
BY_CLASS = ("nv:int4:b16:e4m3", "nv:e1m2:b16:e4m3", "mx:int4:b32:floor", "mx:e4m3:b16:even:2d")
#: Formats with scales of other types, shapes and levels, which are measured value by value.
DIRECT = (
    "nv:e2m1:b16:ue5m3:outer-none",
    "nv:e2m1:b16:e4m3:4over6-mae",
    "nv:e2m1:b16:e4m3:4over6-mse",
    "nv:e4m3:b128:fp32",
    "nv:e4m3:b128x128:fp32",
    "nv:e4m3:row:fp32",
    "nv:e4m3:column:fp32",
    "mx:e4m3:tensor:floor",
    "nv:e2m1:b16:e4m3:outer-row",
    "nv:e2m1:b16:e4m3:outer-1x64",
    "nv:e2m1:b16:e4m3:head16/17:sr",
)
RANDOM = ("mxfp4:sr", "nvfp4:sr", "hifp8:sr", "hifp8:hr", "hifp4:sr", "fp8_e4m3:sr", "mxfp8:2d:sr")


def matrix_of(x: torch.Tensor):
    return matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")


def measured(x: torch.Tensor, name: str) -> Errors:
    """Return the errors of a format with blocks along rows."""
    _, found = tensor.measure(x, matrix_of(x), group_formats([name]))
    return found[name, "all" if (name, "all") in found else "row"]


#: exponent of the smallest positive float32; every finite value is a multiple of 2^SMALLEST
SMALLEST = -149


def multiples(x: torch.Tensor) -> list[int]:
    """Return the values as multiples of 2^SMALLEST; sums of these integers are exact."""
    found = []
    for value in x.double().flatten().tolist():
        above, below = value.as_integer_ratio()
        found.append((above << -SMALLEST) // below)
    return found


def hostile(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of many magnitudes, at both ends of the dtype, of zeros, and of equal values."""
    x = heavy((36, 80), torch.float32, seed=7)
    x *= torch.logspace(-12, 12, 36, base=2.0)[:, None]
    x[5], x[6] = 0.0, -0.0
    x[7], x[8, 40:] = 7.5, 0.0
    finest = torch.finfo(dtype)
    x[9] = finest.max * torch.linspace(-1, 1, 80)
    x[10] = finest.smallest_normal * torch.linspace(-1, 1, 80)
    return x.clamp(finest.min, finest.max).to(dtype)


def check_parts(errors: Errors, x: torch.Tensor, y: torch.Tensor, causes: dict[str, list[bool]]):
    """Compare the gain and the split with exact sums over the finite values."""
    both = (x.isfinite() & y.isfinite()).flatten().tolist()
    a = multiples(x.nan_to_num(0, 0, 0))
    b = multiples(y.nan_to_num(0, 0, 0))
    squared = [(q - p) ** 2 if ok else 0 for p, q, ok in zip(a, b, both, strict=True)]
    total = sum(squared)
    numbers = errors.numbers()
    assert numbers["compared"] == sum(both)
    if any(both):
        expected = float(Fraction(total) * Fraction(2) ** (2 * SMALLEST))
        assert numbers["mse"] * numbers["compared"] == pytest.approx(expected, rel=1e-12)
    signal = sum(p * p for p, ok in zip(a, both, strict=True) if ok)
    product = sum(p * q for p, q, ok in zip(a, b, both, strict=True) if ok)
    gain = float(Fraction(product, signal) - 1) if signal else math.nan
    assert numbers["gain"] == pytest.approx(gain, rel=1e-11, abs=1e-14, nan_ok=True)
    if not total:
        assert all(math.isnan(numbers[name]) for name in ERROR_SHARES)
        return
    assert sum(numbers[name] for name in ERROR_SHARES) == pytest.approx(1, abs=4e-16)
    assert min(numbers[name] for name in ERROR_SHARES) >= 0
    for name, of in causes.items():
        part = sum(e for e, chosen in zip(squared, of, strict=True) if chosen)
        assert numbers[name] == pytest.approx(float(Fraction(part, total)), rel=1e-11, abs=0), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_split_is_that_of_rational_arithmetic(name, dtype):
    some = edges(dtype, name)
    some = some[:: max(1, len(some) // 50)]
    for x in (torch.where(some.isfinite(), some, 0), heavy((20, 96), dtype)):
        y = fake_quantize(x, name)
        zero = (y == 0).flatten().tolist()
        beyond = [out and not gone for out, gone in zip(clipped(x, name), zero, strict=True)]
        grid = [not out and not gone for out, gone in zip(beyond, zero, strict=True)]
        causes = {"clipping_error": beyond, "underflow_error": zero, "grid_error": grid}
        check_parts(measured(x, name), x, y, causes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, *RANDOM, *BY_CLASS, *DIRECT])
def test_the_parts_of_every_format_add_up_on_hostile_tensors(name, dtype):
    x = hostile(dtype)
    for extreme in (False, True):
        if extreme:
            x[11, 3], x[12, 4], x[13, 70] = math.nan, math.inf, -math.inf
        fmt = get_format(name)
        if fmt.stochastic:
            y = dequantize(quantize(x, fmt, seed=direct.SEED))
        else:
            y = fake_quantize(x, fmt)
        check_parts(measured(x, name), x, y, {"underflow_error": (y == 0).flatten().tolist()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "fp16"), *BY_CLASS])
def test_values_by_class_and_one_by_one_get_the_same_split(name, dtype):
    fmt = get_format(name)
    for x in (heavy((66, 96), dtype), hostile(dtype)):
        found = {(name, axis): Errors(number_of_codes(fmt.element)) for axis in axes_of(fmt)}
        direct.measure_sampled(x, matrix_of(x), fmt, found)
        _, expected = tensor.measure(x, matrix_of(x), group_formats([name]))
        for key, errors in found.items():
            numbers, others = errors.numbers(), expected[key].numbers()
            np.testing.assert_array_equal(errors.binade_counts, expected[key].binade_counts)
            np.testing.assert_allclose(errors.binade_sums, expected[key].binade_sums, 1e-11)
            for column in ("saturated", *ERROR_SHARES):
                assert numbers[column] == pytest.approx(others[column], rel=1e-11, nan_ok=True)
            assert numbers["gain"] == pytest.approx(others["gain"], rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_with_each_cause(dtype):
    """At a scale of 1, E2M1 has steps of 0.5 below 2, of 1 below 4 and of 2 up to 6.

    7.5 and -7 are clipped to 6 (errors 1.5 and 1), 6.5 rounds to 6 (0.5), 4.5 to 4 (0.5), and 0.25
    is a tie that becomes 0; 1 has no error.
    """
    values = [7.5, -7.0, 6.5, 4.5, 0.25, 1.0]
    x = torch.tensor([[*values, *[0.0] * 26]]).to(dtype)
    for name in ("mxfp4", "mxfp4:2d"):
        numbers = measured(x, name).numbers()
        total = 2.25 + 1 + 0.25 + 0.25 + 0.0625
        assert numbers["mse"] * 32 == total
        assert numbers["clipping_error"] == 3.25 / total
        assert numbers["grid_error"] == 0.5 / total
        assert numbers["underflow_error"] == 0.0625 / total
        products = 45 + 42 + 39 + 18 + 0 + 1
        assert numbers["gain"] == products / sum(v * v for v in values) - 1
        assert numbers["saturated"] == 2 / 32


def test_a_value_above_the_largest_number_that_rounds_to_it_is_not_clipped():
    """In half of the blocks of nvfp4, the rounded scale puts the maximum above 6, but below 7."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = measured(x, "nvfp4")
    numbers = errors.numbers()
    assert errors.headroom[:8].sum() > 0.4 * errors.blocks[0]  # the headroom is negative
    assert (numbers["saturated"], numbers["clipping_error"]) == (0, 0)
    assert numbers["underflow_error"] + numbers["grid_error"] == pytest.approx(1, abs=1e-15)


def test_values_that_become_inf_are_clipped_but_have_no_finite_error():
    x = torch.tensor([[1.0625, 50000.0, -1e30, 2.0**-30]])
    numbers = {name: measured(x, name).numbers() for name in ("hifp8", "hifp8:inf")}
    assert all(of["saturated"] == 0.5 for of in numbers.values())
    assert (numbers["hifp8"]["compared"], numbers["hifp8:inf"]["compared"]) == (4, 2)
    assert numbers["hifp8"]["clipping_error"] == pytest.approx(1)
    assert numbers["hifp8:inf"]["clipping_error"] == 0
    parts = numbers["hifp8:inf"]["underflow_error"], numbers["hifp8:inf"]["grid_error"]
    assert sum(parts) == 1


def test_values_under_a_scale_of_zero_underflow():
    x = torch.ones(2, 16)
    x[1] = 1e-9
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("nvfp4", "nvfp4:sr"):
            numbers = measured(x.to(dtype), name).numbers()
            shares = [numbers[column] for column in ERROR_SHARES]
            assert shares == [0, 1, 0]


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf])
def test_without_a_value_that_is_not_zero_gain_and_split_are_undefined(value):
    x = torch.full((4, 64), value)
    for dtype in DTYPES:
        for name in ("mxfp4", "nvfp4", "hifp8", "hifp4", "mxfp4:sr", "fp16"):
            numbers = measured(x.to(dtype), name).numbers()
            assert math.isnan(numbers["gain"])
            assert all(math.isnan(numbers[column]) for column in ERROR_SHARES)


def test_a_format_without_an_error_has_a_gain_of_zero_and_no_split():
    x = heavy((64, 96), torch.bfloat16)
    exact = measured(x, "bf16").numbers()
    assert exact["gain"] == 0
    assert all(math.isnan(exact[column]) for column in ERROR_SHARES)
    ones = torch.ones(4, 64, dtype=torch.bfloat16)
    assert measured(ones, "mxfp4").numbers()["gain"] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxint8", "hifp8", "hifp4"])
def test_parts_of_a_tensor_add_up_to_the_whole(name, dtype):
    x = hostile(dtype)
    whole, total = measured(x, name), None
    for part in (x[:4], x[4:20], x[20:]):
        errors = measured(part.contiguous(), name)
        total = errors if total is None else total.__iadd__(errors)
    assert total is not None
    numbers, expected = total.numbers(), whole.numbers()
    np.testing.assert_array_equal(total.binade_counts, whole.binade_counts)
    for column in ("mse", *ERROR_SHARES):
        assert numbers[column] == pytest.approx(expected[column], rel=1e-12), column
    assert numbers["gain"] == pytest.approx(expected["gain"], rel=1e-11, abs=1e-14)


def test_the_split_by_binade_adds_up():
    x = hostile(torch.bfloat16)
    values, found = tensor.measure(x, matrix_of(x), group_formats(["mxfp4", "hifp8", "hifp4"]))
    for (name, axis), arrays in arrays_of(values, found).formats.items():
        parts = (arrays.clipping_error, arrays.underflow_error, arrays.grid_error)
        np.testing.assert_allclose(arrays.squared_error, sum(parts), 1e-15)
        numbers = found[name, axis].numbers()
        for column, part in zip(ERROR_SHARES, parts, strict=True):
            share = part.sum() / arrays.squared_error.sum()
            assert share == pytest.approx(numbers[column], rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["hifp8:inf", "hifp8", "bf16", "fp16", "mxfp8_e5m2", "fp8_e5m2", "mxfp4"]
)
def test_values_that_become_inf_are_counted_by_binade(name, dtype):
    x = hostile(dtype)
    x[3, :9] = torch.tensor([2**15, 1.25 * 2**15, 2**16, -(2**20), 65504, 65520, 65600, 1e5, 3e38])
    x[4, 3], x[5, 1] = math.nan, 3.4e38
    values, errors = tensor.measure(x, matrix_of(x), group_formats([name]))
    arrays = arrays_of(values, errors)
    for key, part in arrays.formats.items():
        y = fake_quantize(x, name, axis={"column": 0}.get(key[1], -1))
        chosen = x.isfinite() & (x != 0)
        exponents = torch.frexp(x.double()).exponent - 1
        for rows, result in ((part.overflow, y.isinf()), (part.values, y.isfinite())):
            binades = exponents[chosen & result].clamp(min=-127).tolist()
            assert {b: n for b, n in zip(arrays.exponents, rows, strict=True) if n} == Counter(
                binades
            )
        assert (part.overflow <= part.saturated).all()
