"""Test formats with one scale per tensor: Transformer Engine's FP8, and HiFloat8 with a target."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize, get_format, quantize
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scalings.tensor_scale import encode_scale, finite_amax
from megatron.fake_quant.special_scalings import TensorScaling
from tests.fake_quant import references
from tests.fake_quant.inputs import (
    assert_same,
    by_definition,
    every_bfloat16,
    every_float16,
    random_bit_patterns,
    random_bits_at_every_scale,
    rows_at_every_scale,
)
from tests.fake_quant.oracle_scaled import fake_quantize_per_tensor

FP8 = ["fp8_e4m3", "fp8_e4m3:pow2", "fp8_e5m2", "fp8_e5m2:pow2"]
NAMES = [*FP8, "hifp8:t15", "hifp8:t224", "hifp8:t15:pow2"]
names = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        # 448 / 448 is 1: the values of E4M3 stay, 17 is half-way from 16 to 18.
        ("fp8_e4m3", [448.0, 17.0, -19.0, 2**-10], [448.0, 16.0, -20.0, 0.0]),
        # 448 / 56 = 8: 1.0625 becomes 8.5, half-way from 8 to 9.
        ("fp8_e4m3", [56.0, 1.0625, 1.1875], [56.0, 1.0, 1.25]),
        # 448 / 512 = 0.875 loses its mantissa: 0.5. 512 becomes 256, and 17 becomes 8.5.
        ("fp8_e4m3:pow2", [512.0, 17.0], [512.0, 16.0]),
        # E5M2 has 4 steps per binade; 57344 / 57344 is 1.
        ("fp8_e5m2", [57344.0, 9.0, 11.0], [57344.0, 8.0, 12.0]),
        # 15 / 7.5 = 2: 8.5 becomes 17, of HiFloat8's 15, 16, 20; 0.53 becomes 1.06, of 1, 1.125.
        ("hifp8:t15", [7.5, 0.53, 0.54], [7.5, 0.5, 0.5625]),
        ("hifp8:t15:pow2", [7.5, 0.53, 0.54], [7.5, 0.5, 0.5625]),
        # 15 / 8 = 1.875 is rounded down to a power of two, 1.
        ("hifp8:t15:pow2", [8.0, 1.0625], [8.0, 1.125]),
        ("fp8_e4m3", [0.0, -0.0], [0.0, -0.0]),
        ("hifp8:t15", [0.0, -0.0], [0.0, 0.0]),
        # An Inf saturates and does not affect the scale; without a finite number, the scale is 1.
        ("fp8_e4m3", [448.0, np.inf, -np.inf, 17.0], [448.0, 448.0, -448.0, 16.0]),
        ("fp8_e4m3", [np.inf, 0.0], [448.0, 0.0]),
        ("hifp8:t15", [7.5, -np.inf], [7.5, -16384.0]),
        ("fp8_e4m3", [448.0, np.nan, 17.0], [448.0, np.nan, 16.0]),
    ],
)
def test_named_tensors(name, values, expected):
    x = torch.tensor(values)
    assert_same(fake_quantize(x, name), np.array(expected))


def test_the_scale_is_one_division_rounded_once():
    """torch divides a number by a tensor via the reciprocal, but 448 * (1 / 3) is not 448 / 3."""
    twice = 0
    for amax in np.arange(3, 99, dtype=np.float32):
        once = np.float32(448) / amax
        twice += np.float32(448) * (np.float32(1) / amax) != once
        assert encode_scale(torch.tensor(amax), TensorScaling(448.0)) == once
        assert quantize(torch.tensor([amax]), "fp8_e4m3").scales.whole() == np.float32(1) / once
    assert twice > 10


@pytest.mark.parametrize("name", FP8)
def test_scales_are_those_of_transformer_engine(name):
    amax = torch.from_numpy(references.SCALED["scale/amax"])
    scaling = get_format(name).scaling
    found = torch.stack([encode_scale(a, scaling) for a in amax])
    assert_same(found, references.SCALED[f"scale/{name}"])


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("kind", references.KINDS)
def test_codes_are_those_of_transformer_engine(kind, name):
    found = quantize(references.tensor(kind), name)
    np.testing.assert_array_equal(
        found.codes.numpy(), references.expected(kind, "float32", f"{name}/codes")
    )
    assert found.scales.whole() == references.expected(kind, "float32", f"{name}/scale")[0]


def check(x: torch.Tensor, name: str) -> None:
    fmt = get_format(name)
    scaling = fmt.scaling
    expected = fake_quantize_per_tensor(
        x.float().numpy(), fmt.element.name, scaling.target, pow2=scaling.power_of_two
    )
    expected = torch.from_numpy(expected).to(x.dtype).float().numpy()
    for found in (fake_quantize(x, name), by_definition(x, name)):
        assert found.dtype == x.dtype
        assert_same(found.float(), expected)


INPUTS = {
    "every bfloat16": every_bfloat16,
    "every float16": every_float16,
    "every bfloat16 below 1": lambda: every_bfloat16()[every_bfloat16().abs() < 1],
    "four million bit patterns": lambda: random_bit_patterns(1 << 22),
}


@names
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_it_matches_float32_arithmetic(make, name):
    check(make(), name)


@names
def test_tensors_over_every_binade_match_float32_arithmetic(name):
    """The inputs are 1024 tensors of 256 values, and rows at every scale."""
    for row in random_bits_at_every_scale(256, 1 << 18):
        check(row, name)
    for row in rows_at_every_scale():
        check(row, name)


@names
@pytest.mark.parametrize("value", [2.0**-149, 1e-40, 2.0**-126, 1e-36, 3e38, torch.finfo().max])
def test_the_ends_of_float32_match_float32_arithmetic(value, name):
    check(torch.tensor([value, -value / 2, value / 3, 0.0]), name)


@names
def test_a_tensor_without_dimensions_is_its_own_largest_magnitude(name):
    x = torch.tensor(3.0)
    assert torch.equal(fake_quantize(x, name), fake_quantize(x.view(1), name)[0])


def test_the_largest_finite_magnitude():
    assert finite_amax(torch.tensor([[1.0, -3.0], [torch.nan, -torch.inf]])) == 3
    assert finite_amax(torch.tensor([torch.nan, torch.inf])) == 0
    assert finite_amax(random_bit_patterns(1 << 16)) == max(
        abs(x) for x in random_bit_patterns(1 << 16).tolist() if np.isfinite(x)
    )


@pytest.mark.parametrize("target", [0.0, -1.0, np.inf, np.nan])
def test_a_target_that_is_no_positive_number_is_refused(target):
    with pytest.raises(ValueError, match=f"a scale to {target:g} is out of range; choose a target"):
        TensorScaling(target)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("target", [0.25, 1.0, 2.0])
def test_a_small_target_for_a_large_tensor_leaves_no_nan(target, power_of_two):
    """Without the clamp, target / amax would be subnormal or its inverse would overflow."""
    x = torch.tensor([torch.finfo().max, 1.0, 0.0])
    for fmt in (
        Format("raw", E4M3, TensorScaling(target, power_of_two)),
        Format("hif8", get_format("hifp8").element, TensorScaling(target, power_of_two)),
    ):
        assert not fake_quantize(x, fmt).isnan().any()
