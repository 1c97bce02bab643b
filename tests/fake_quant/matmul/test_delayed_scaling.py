"""Amax histories of delayed scaling, against a simulation written from Transformer Engine's rules.

The simulation keeps the history as Transformer Engine does: position 0 collects the current amax,
and the oldest one is at position 1. It computes in rational numbers.
"""

import math

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.analysis.stats import tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.result_columns import format_numbers
from megatron.fake_quant import fake_quantize, get_format, quantize
from megatron.fake_quant.matmul.delayed_scaling import AmaxHistories, largest_magnitude

AMAXES = {
    "falling": [8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75],
    "spike": [1.0, 1.0, 512.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.3, 0.1],
    "zeros": [0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.7, 0.0, 0.2],
    "infinite": [2.0, math.inf, 1.0, 3.0, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1],
    "tiny": [1e-38, 1e-44, 2e-40, 0.0, 1e-37, 1e-45, 1e-45, 1e-45, 1.0, 1e-45],
}
LARGEST = {"fp8_e4m3": 448, "fp8_e5m2": 57344}


def nearest_float32(x: Fraction) -> np.float32:
    """Round a positive rational number to the nearest float32, ties to even, or to the largest."""
    exponent = max(math.frexp(float(x))[1], -125) if x < 2**128 else 129
    if exponent > 128:
        return np.finfo(np.float32).max
    ulp = Fraction(2) ** (exponent - 24)
    return min(np.float32(float(round(x / ulp) * ulp)), np.finfo(np.float32).max)


class Simulation:
    """Amax history and scale of one tensor in Transformer Engine."""

    def __init__(self, length: int, algorithm: str, scaled_max: Fraction):
        self.history, self.algorithm = [0.0] * length, algorithm
        self.scaled_max, self.scale = scaled_max, np.float32(1)

    def step(self, amax: float) -> None:
        if amax == 0:
            return
        self.history[0] = amax
        used = max(self.history) if self.algorithm == "max" else amax
        self.history = [0.0, *self.history[2:], self.history[0]][: len(self.history)]
        if math.isfinite(used):
            self.scale = nearest_float32(self.scaled_max / Fraction(float(np.float32(used))))


@pytest.mark.parametrize("kind", AMAXES)
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize(
    ("variant", "length", "algorithm"),
    [
        ("delayed1", 1, "max"),
        ("recent", 16, "recent"),
        ("delayed3", 3, "max"),
        ("delayed", 1024, "max"),
    ],
)
def test_ten_steps_are_those_of_transformer_engine(kind, margin, variant, length, algorithm):
    for name, largest in LARGEST.items():
        fmt = get_format(f"{name}:{variant}:margin{margin}")
        histories = AmaxHistories([fmt.scaling.history])
        simulation = Simulation(length, algorithm, Fraction(largest, 2**margin))
        for amax in AMAXES[kind]:
            x = torch.tensor([amax, -amax / 2])
            # The codes of this step have the scale of the steps before it.
            stored = quantize(torch.ones(3), fmt, amax=histories.amax[0]).scales.whole()
            assert stored == np.float32(1) / simulation.scale
            histories.record(0, x, fmt.scaling.history)
            histories.update()
            simulation.step(float(np.float32(amax)))


def test_what_is_recorded_between_two_updates_is_the_largest_magnitude():
    histories = AmaxHistories([4, 2])
    for x in ([1.0, -3.0], [2.0, math.nan], [], [math.nan]):
        histories.record(0, torch.tensor(x), 4)
    assert histories.amax.tolist() == [0, 0]
    histories.update()
    assert histories.amax.tolist() == [3, 0]
    assert histories.recorded.tolist() == [0, 0]
    histories.update()
    assert histories.history[0].tolist() == [3, 0, 0, 0]  # an amax of 0 adds no entry


def test_a_recipe_may_change_the_length_of_a_history():
    histories = AmaxHistories([4])
    for amax in (9.0, 1.0, 2.0):
        histories.record(0, torch.tensor([amax]), 2)
        histories.update()
    assert histories.amax == 2
    histories.record(0, torch.tensor([1.5]), 4)
    histories.update()
    assert histories.amax == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_counts_inf_and_leaves_nan_out(dtype):
    x = torch.tensor([[0.5, -3.0], [2.0, 1.0]], dtype=dtype)
    assert largest_magnitude(x) == 3
    x[0, 0] = math.nan
    assert largest_magnitude(x) == 3
    x[1, 1] = -math.inf
    assert largest_magnitude(x) == math.inf
    assert largest_magnitude(x).dtype == torch.float32
    assert largest_magnitude(x[:0]) == 0


def test_a_value_beyond_the_history_saturates():
    fmt = get_format("fp8_e4m3:delayed:margin1")
    found = fake_quantize(torch.tensor([1.0, 2.0, 5.0]), fmt, amax=torch.tensor(1.0))
    assert found.tolist() == [1, 2, 2]  # the margin leaves a factor of 2


def test_statistics_use_the_amax_of_the_measured_tensor():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    _, found = tensor.measure(x, matrix, group_formats(["fp8_e4m3", "fp8_e4m3:delayed:margin1"]))
    errors = [format_numbers(get_format(name), found[name, "all"])["mse"] for name, _ in found]
    expected = [
        float((fake_quantize(x, "fp8_e4m3", amax=x.abs().max() * factor) - x).square().mean())
        for factor in (1, 2)
    ]
    np.testing.assert_allclose(errors, expected, rtol=1e-5)
