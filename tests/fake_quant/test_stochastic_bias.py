"""Test that stochastic rounding is unbiased, by counts and by a statistic that detects a bias."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.elements import S1P2, HiFloat8
from megatron.fake_quant.names import get_element
from megatron.fake_quant.rounding import round_to

from . import oracle


def stochastic(x: torch.Tensor, name: str) -> torch.Tensor:
    return fake_quantize(x, name, generator=torch.Generator().manual_seed(20250101))


# Counts over all 2^24 random numbers, in one tensor.


@pytest.mark.parametrize(
    ("element", "x", "way"),
    [
        ("e2m1", 0.125, 0.25),  # from 0 to 0.5
        ("e2m1", 2.25, 0.25),  # from 2 to 3
        ("e2m1", 5.5, 0.75),
        ("e2m1", 4.0, 0.0),
        ("e2m1", 7.0, 1.0),  # saturates
        ("e2m1", 1e-5, 2e-5),
        ("e4m3", 17.5, 0.75),  # from 16 to 18
        ("e4m3", 447.0, 31 / 32),
        ("e4m3", 2.0**-11, 0.25),
        ("int8", 1.3 / 64, 0.3),
        ("e5m2", 1.0 + 2.0**-23, 2.0**-21),
        ("s1p2", 0.3, 0.2),  # from 0.25 to 0.5
        ("s1p2", 0.24, 0.96),
        ("hif8", 17.0, 0.25),
        ("hif8", 1.0 + 2.0**-23, 2.0**-20),
        ("hif8", 300.0, 44 / 128),
        ("hif8", 2.0**-23, 0.5),  # from 0 to 2^-22
        ("hif8", 2.0**-24 * 1.1, 0.275),
        ("hif8", 2.0**-40, 2.0**-18),
        ("hif8", 36864.0, 0.25),  # from 32768 to the code of Inf, 49152
    ],
)
def test_it_goes_up_with_the_probability_of_the_way_to_the_next_number(element, x, way):
    """There is no bias: the mean over all random numbers is x, to 2^-24 of a step."""
    random = torch.arange(1 << 24, dtype=torch.int32)
    value = torch.tensor(x)
    if element == "hif8":
        y = round_to(value.expand(1 << 24), HiFloat8("inf"), "stochastic", random=random)
    else:
        fmt = S1P2 if element == "s1p2" else get_element(element)
        y = round_to(value.expand(1 << 24).contiguous(), fmt, "stochastic", random=random)
    below, above = float(y.min()), float(y.max())
    if way in (0, 1):
        assert below == above == (x if way == 0 else get_element(element).max)
        return
    far = 49152.0 if above == torch.inf else above
    probability = (float(value) - below) / (far - below)
    assert abs(probability - way) < 1e-6
    ups = int((y == above).sum())
    assert ups == int(probability * 2**24)
    assert int((y == below).sum()) == (1 << 24) - ups


# A statistic that does not depend on the random bits, and the biases that it detects.


def bias(y: np.ndarray, x: np.ndarray, below: np.ndarray, above: np.ndarray) -> tuple[float, float]:
    """Return by how many standard deviations values go up too often: in total, and at worst.

    `[draws, values]` against the `[values]` that were rounded.
    """
    probability = (x - below) / (above - below)
    ups = (y == above).sum(axis=0)
    variance = len(y) * probability * (1 - probability)
    surplus = ups - len(y) * probability
    return surplus.sum() / np.sqrt(variance.sum()), np.abs(surplus / np.sqrt(variance)).max()


LIMITS = (4.0, 5.0)
#: A largest value at which the scale is 1 (448 in nvfp4); HiFloat8's step is 1 up to 15.
GRID_TOPS = {
    "mxfp4:sr": 6.0,
    "mxfp8:sr": 448.0,
    "hifp8:sr": 15.0,
    "nvfp4:sr": 2688.0,
    "fp8_e4m3:sr": 448.0,
    "mxint8:sr": 127 / 64,
}


def grid(name: str) -> np.ndarray:
    if name == "hifp8:sr":
        codes = oracle.hifloat8_codes()
        return np.sort(codes[np.isfinite(codes) & (codes >= 0) & (codes <= 15)])
    table = oracle.code_points(get_format(name).element.name)
    return table * 448 if name == "nvfp4:sr" else table


def draws(name: str) -> tuple[np.ndarray, ...]:
    """Return values between numbers of the format, up to the largest, and their two neighbors."""
    table, top = grid(name), GRID_TOPS[name]
    assert table[-1] == top
    x = np.random.default_rng(18).uniform(0.01, 1, 15) * top
    x = x.astype(np.float32).astype(np.float64)
    index = np.searchsorted(table, x)
    return x, table[index - 1], table[index]


def repeated(x: np.ndarray, top: float, count: int = 1 << 14) -> torch.Tensor:
    return torch.from_numpy(np.append(x, top)).float().expand(count, 16)


@pytest.mark.parametrize("name", GRID_TOPS)
def test_means_have_no_bias(name):
    x, below, above = draws(name)
    y = stochastic(repeated(x, GRID_TOPS[name]), name)[:, :-1].double().numpy()
    assert ((y == below) | (y == above)).all()
    together, worst = bias(y, x, below, above)
    assert abs(together) < LIMITS[0]
    assert worst < LIMITS[1]


@pytest.mark.parametrize("name", GRID_TOPS)
def test_a_biased_rounding_would_be_seen(name):
    """Detect rounding to nearest, a bias of 1 % of a step, and random numbers used twice."""
    x, below, above = draws(name)
    nearest = fake_quantize(repeated(x, GRID_TOPS[name]), name.replace(":sr", ""))
    assert bias(nearest[:, :-1].double().numpy(), x, below, above)[1] > LIMITS[1]
    uniform = np.random.default_rng(19).random((1 << 14, 15))
    way = (x - below) / (above - below)
    fair, unfair = (np.where(way + extra > uniform, above, below) for extra in (0, 0.01))
    assert abs(bias(fair, x, below, above)[0]) < LIMITS[0]
    assert abs(bias(unfair, x, below, above)[0]) > LIMITS[0]
    shared = np.where(way > uniform.repeat(2, axis=0)[: 1 << 14], above, below)
    assert correlation(shared, x) > 0.5
    assert abs(correlation(fair, x)) < 0.02


def correlation(y: np.ndarray, x: np.ndarray) -> float:
    """Return the correlation of the errors of consecutive draws."""
    error = (y - y.mean(axis=0)) / (y.std(axis=0) + 1e-30)
    return float((error[0::2] * error[1::2]).mean())


@pytest.mark.parametrize("name", GRID_TOPS)
def test_draws_are_independent(name):
    x, _, _ = draws(name)
    y = stochastic(repeated(x, GRID_TOPS[name]), name)[:, :-1].double().numpy()
    assert abs(correlation(y, x)) < 0.02
