"""Test the mergeable statistics against the plain formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.analysis.stats import chunks, tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.histogram import BINS, Grid, Histogram
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.moments import Moments, merge

NAN, INF = math.nan, math.inf


def measure(x: torch.Tensor) -> tuple[Moments, Histogram]:
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    values, found = tensor.measure(x, matrix, group_formats(()))
    assert found == {}
    return values.moments, values.histogram


def summarize(x: torch.Tensor) -> Moments:
    return measure(x)[0]


def naive(values: list[float]) -> dict[str, float]:
    """Return every statistic by its definition, with Python's exact sums."""
    finite = [value for value in values if math.isfinite(value)]
    found: dict[str, float] = {
        "count": len(values),
        "nan": sum(math.isnan(value) for value in values),
        "inf": sum(math.isinf(value) for value in values),
        "zeros": sum(value == 0 for value in finite),
        "negative_zeros": sum(value == 0 and math.copysign(1, value) < 0 for value in finite),
        "l1": math.fsum(map(abs, finite)),
    }
    if not finite:
        names = ("min", "max", "mean", "std", "rms", "amax", "smallest", "skewness", "kurtosis")
        return found | dict.fromkeys(names, NAN)
    mean = math.fsum(finite) / len(finite)
    powers = [math.fsum((value - mean) ** k for value in finite) / len(finite) for k in range(5)]
    spread = powers[2] > 0
    return found | {
        "smallest": min((abs(value) for value in finite if value), default=NAN),
        "skewness": powers[3] / powers[2] ** 1.5 if spread else NAN,
        "kurtosis": powers[4] / powers[2] ** 2 if spread else NAN,
        "min": min(finite),
        "max": max(finite),
        "mean": mean,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite)),
        "rms": math.sqrt(math.fsum(value**2 for value in finite) / len(finite)),
        "amax": max(map(abs, finite)),
    }


def check(summary: Moments, values: list[float]) -> None:
    for name, expected in naive(values).items():
        found = getattr(summary, name)
        # large sums cancel in the third moment of symmetric values
        close = {"skewness": (1e-9, 1e-9), "kurtosis": (1e-9, 0)}.get(name, (1e-12, 0))
        assert found == pytest.approx(expected, rel=close[0], abs=close[1], nan_ok=True), name


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="empty"),
        pytest.param([3.0], id="one element"),
        pytest.param([-0.0], id="one negative zero"),
        pytest.param([0.0, -0.0, 1.0], id="zeros of both signs"),
        pytest.param([NAN, NAN], id="all NaN"),
        pytest.param([INF, -INF], id="all Inf"),
        pytest.param([NAN, INF, -INF, 1.0, -2.0], id="some of each"),
        pytest.param([1e-40, -1e-40], id="subnormal in float32"),
        pytest.param([1e8 + 1, 1e8 + 2, 1e8 + 3], id="small spread, large mean"),
        pytest.param([5.0] * 1000, id="constant"),
    ],
)
def test_special_sets_match_the_definitions(values):
    check(summarize(torch.tensor(values, dtype=torch.float64)), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_random_values_of_every_dtype_match_the_definitions(dtype):
    x = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(summarize(x), x.double().flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_real_dtypes_are_read_by_value(dtype):
    x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    check(summarize(x), [0.0, 1.0, 1.0, 0.0, 1.0])


def test_complex_values_are_refused():
    with pytest.raises(TypeError, match=r"complex64"):
        measure(torch.zeros(2, dtype=torch.complex64))


def test_a_view_counts_its_own_elements_only():
    base = torch.arange(12.0).reshape(3, 4)
    check(summarize(base[:, 1]), [1.0, 5.0, 9.0])


def test_large_sums_do_not_lose_small_values():
    # in bfloat16 or float32 the sum of 2**24 ones stops growing; here it does not
    assert summarize(torch.ones(1 << 16, dtype=torch.bfloat16)).mean == 1.0
    x = torch.full((1 << 20,), 0.1, dtype=torch.float32)
    assert summarize(x).mean == pytest.approx(float(np.float32(0.1)), rel=1e-14)


def test_pieces_merge_to_the_whole(monkeypatch):
    x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(2))
    x[::17], x[5], x[700] = 0.0, NAN, INF
    whole = measure(x)
    monkeypatch.setattr(chunks, "PIECE", 64)
    parts = measure(x)
    check(whole[0], x.double().flatten().tolist())
    check(parts[0], x.double().flatten().tolist())
    np.testing.assert_array_equal(whole[1].counts, parts[1].counts)


def test_merging_is_commutative_and_has_a_neutral_element():
    a = summarize(torch.tensor([1.0, 2.0, NAN]))
    b = summarize(torch.tensor([-4.0, 0.0, INF, 8.0]))
    check(a + b, [1.0, 2.0, NAN, -4.0, 0.0, INF, 8.0])
    check(b + a, [1.0, 2.0, NAN, -4.0, 0.0, INF, 8.0])
    assert a + Moments() == Moments() + a == a
    assert merge([]).count == 0
    assert math.isnan(merge([]).mean)
    only_nan = summarize(torch.tensor([NAN]))
    assert (a + only_nan).mean == a.mean
    assert (only_nan + a).nan == 2


def test_every_bfloat16_falls_into_the_bin_of_its_own_pattern():
    patterns = torch.arange(BINS, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16)
    _, histogram = measure(x)
    expected = x.isfinite().to(torch.int64).numpy()
    np.testing.assert_array_equal(histogram.counts, expected)


def test_float32_is_rounded_toward_zero_to_its_bin():
    x = torch.tensor([1.0, 1.0078124, -1.0078124, 1.0078125])  # one step of bfloat16 is 2**-7
    _, histogram = measure(x)
    assert histogram.counts[0x3F80] == 2
    assert histogram.counts[0xBF80] == 1
    assert histogram.counts[0x3F81] == 1


def test_float64_beyond_float32_is_counted_in_the_last_bin_and_not_as_infinite():
    summary, histogram = measure(torch.tensor([1e300, -1e300], dtype=torch.float64))
    assert (summary.inf, summary.max) == (0, 1e300)
    assert histogram.counts[0x7F7F] == histogram.counts[0xFF7F] == 1


@pytest.mark.parametrize("scale", [1e-30, 3e-5, 1.0, 7.7, 1e20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rebinning_is_exact(scale, dtype):
    x = (torch.randn(20000, generator=torch.Generator().manual_seed(3)) * scale).to(dtype)
    x[:5] = torch.tensor([0.0, -0.0, 0.0, scale, -scale])
    _, histogram = measure(x)
    grid = Grid.reaching(2.5 * scale)
    values = x.double().numpy()
    edges = grid.edges()
    middle = grid.bins_per_side
    # a value on an edge belongs to the bin farther from zero, whatever its sign
    inside = np.abs(values) < grid.limit
    right, _ = np.histogram(values[inside & (values >= 0)], edges[middle:])
    left, _ = np.histogram(-values[inside & (values < 0)], edges[middle:])
    np.testing.assert_array_equal(histogram.rebin(grid), np.concatenate([left[::-1], right]))


@pytest.mark.parametrize("magnitude", [1.0, 0.999, 1.001, 448.0, 6.0, 1e-7, 3e38, 65504.0])
def test_a_grid_contains_its_magnitude_and_wastes_little(magnitude):
    grid = Grid.reaching(magnitude)
    assert magnitude < grid.limit <= 1.25 * magnitude
    assert 40 <= grid.bins_per_side <= 64
    assert math.frexp(grid.width)[0] == 0.5  # a power of two


@pytest.mark.parametrize("magnitude", [0.0, NAN, INF])
def test_a_grid_exists_where_there_is_nothing_to_draw(magnitude):
    assert Grid.reaching(magnitude).limit > 0
    assert Histogram.empty().rebin(Grid.reaching(magnitude)).sum() == 0


def test_quantiles_of_the_magnitude():
    _, histogram = measure(torch.tensor([-8.0, 4.0, 2.0, 1.0] * 25))
    assert histogram.magnitude_quantile(0.25) == 1.0
    assert histogram.magnitude_quantile(0.5) == 2.0
    assert histogram.magnitude_quantile(1.0) == 8.0
    assert math.isnan(Histogram.empty().magnitude_quantile(0.5))


def test_binades_count_magnitudes_by_power_of_two():
    _, histogram = measure(torch.tensor([1.0, -1.5, 1.99, 2.0, 0.0, -0.0, 0.25, 1e-40]))
    binades = histogram.binades()
    found = {int(index) - 127: int(binades[index]) for index in np.flatnonzero(binades)}
    assert found == {0: 3, 1: 1, -2: 1, -127: 1}
