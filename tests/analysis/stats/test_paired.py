"""Test statistics of paired runs against published tables, and against SciPy if installed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megatron.analysis.stats.paired import (
    Interval,
    mean_interval,
    ranks,
    spearman,
    standard_error,
    student_probability,
    student_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [
        # Two-sided quantiles as in any table of Student's distribution
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.95, 2.776),
        (5, 0.95, 2.571),
        (9, 0.95, 2.262),
        (30, 0.95, 2.042),
        (120, 0.95, 1.980),
        (1, 0.99, 63.657),
        (4, 0.99, 4.604),
        (10, 0.8, 1.372),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees, confidence, expected):
    assert student_quantile(degrees, confidence) == pytest.approx(expected, abs=6e-4)


def test_the_distribution_has_its_closed_forms():
    for t in (0.0, 0.5, 3.0):
        assert student_probability(t, 1) == pytest.approx(2 / math.pi * math.atan(t))
        assert student_probability(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))
    assert student_probability(1.96, 100_000) == pytest.approx(0.95, abs=1e-4)


def test_no_degree_of_freedom_is_refused():
    with pytest.raises(ValueError, match="at least 1 degree and"):
        student_quantile(0)


def test_the_interval_of_a_mean():
    interval = mean_interval([1.0, 2.0, 3.0])
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert interval.value == 2
    assert interval.high - 2 == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert not interval.excludes_zero
    assert mean_interval([1.0, 1.1, 0.9]).excludes_zero
    alone = mean_interval([1.0])
    assert alone.value == 1
    assert math.isnan(alone.low)
    assert not alone.excludes_zero
    assert math.isnan(mean_interval([]).value)


def test_equal_values_share_their_mean_rank():
    values = np.array([[3.0, 1.0, 3.0, 2.0], [math.inf, -1.0, 0.0, 5.0]])
    assert ranks(values).tolist() == [[3.5, 1, 3.5, 2], [4, 1, 2, 3]]


def test_the_rank_correlation_without_ties_is_spearmans_formula():
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 50.0]
    # 1 - 6 sum(d^2) / (n (n^2 - 1)) with d = -1, 1, -1, 1, 0
    assert spearman(x, y).value == pytest.approx(1 - 6 * 4 / 120)
    more = [*x, 6.0]
    assert spearman(more, [-value for value in more]) == Interval(-1.0, -1.0, -1.0)
    few = spearman(x, [-value for value in x])
    assert few.value == -1
    assert math.isnan(few.low), "one of 120 orders of five unrelated pairs is perfect"
    assert spearman(x, [1.0, 2.0, 3.0, 4.0, math.inf]).value == 1


def test_the_interval_of_a_correlation_contains_it_and_narrows_with_more_pairs():
    generator = np.random.default_rng(1)
    widths = []
    for count in (10, 60):
        x = generator.normal(size=count)
        interval = spearman(x, x + generator.normal(size=count))
        assert -1 <= interval.low < interval.value < interval.high <= 1
        widths.append(interval.high - interval.low)
    assert widths[1] < widths[0]


def test_pairs_without_a_correlation():
    assert math.isnan(spearman([1.0, 2.0], [1.0, 2.0]).value)
    assert math.isnan(spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).value)
    with pytest.raises(ValueError, match="NaN, which has no rank"):
        spearman([1.0, math.nan, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="give two vectors of equal length"):
        spearman([1.0, 2.0, 3.0], [1.0, 2.0])


def test_they_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for degrees, confidence in itertools.product((1, 2, 3, 4, 7, 50), (0.5, 0.9, 0.99)):
        expected = stats.t.ppf((1 + confidence) / 2, degrees)
        assert student_quantile(degrees, confidence) == pytest.approx(expected, rel=1e-9)
    generator = np.random.default_rng(2)
    x, y = generator.integers(0, 6, (2, 20)).astype(float)
    assert spearman(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic)
