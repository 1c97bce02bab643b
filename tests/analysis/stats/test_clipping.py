"""Check what `saturated` counts against the exact oracle of clipping_oracle.py."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.analysis.stats import direct, tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.fake_quant import dequantize, get_format, quantize
from tests.analysis.stats.clipping_oracle import NAMES, edges, oracle
from tests.analysis.stats.inputs import heavy


def measured(x: torch.Tensor, name: str) -> float:
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    _, found = tensor.measure(x, matrix, group_formats([name]))
    axis = "all" if (name, "all") in found else "row"
    numbers = found[name, axis].numbers()
    assert numbers["poisoned"] == 0
    return numbers["saturated"] * x.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_saturated_counts_what_clipping_changes(name, dtype):
    for x in (edges(dtype, name), heavy((64, 96), dtype), 1000 * heavy((16, 80), dtype, 3)):
        x = torch.where(x.isfinite(), x, 0)
        assert measured(x, name) == pytest.approx(oracle(x, name), abs=1e-6)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxint8", "hifp8", "hifp8:inf", "hifp4"])
def test_the_cases_hold_clipped_values_and_values_that_round_down_to_the_largest(name):
    x = edges(torch.float32, name)
    assert 0 < oracle(x, name) < x.numel() / 2


@pytest.mark.parametrize(
    ("name", "kept", "clipped"),
    [  # ties go to even; in HiFloat8 and HiFloat4, away from zero
        ("mxfp4", 6.75, 7.0),
        ("mxfp8", 464.0, 466.0),
        ("mx:e5m2:b32:floor", 61184.0, 61440.0),
        ("mxint8", 1.9921875 - 2**-18, 1.9921875),
        ("hifp8", 40928.0, 40960.0),
        ("fp16", 65519.0, 65520.0),
    ],
)
def test_the_rounding_edge_of_each_element(name, kept, clipped):
    for value, count in ((kept, 0), (clipped, 1), (-clipped, 1)):
        assert measured(torch.tensor([[value, *[0.0] * 31]]), name) == count


def test_nvfp4_clips_nothing_of_usual_values():
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert measured(x, "nvfp4") == oracle(x, "nvfp4") == 0


def test_values_under_a_scale_of_zero_underflow_and_are_not_clipped():
    x = torch.ones(2, 16)
    x[1] = 1e-9
    matrix = matrix_view_of((2, 16), layer_type="linear", tensor_name="input")
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("nvfp4", "nvfp4:sr"):
            _, found = tensor.measure(x.to(dtype), matrix, group_formats([name]))
            numbers = found[name, "row"].numbers()
            assert (numbers["underflow"], numbers["saturated"]) == (0.5, 0)


def test_stochastic_rounding_clips_what_its_draw_takes_up():
    """The probability of rounding up is the distance from the largest number, in steps."""
    x = torch.full((512, 32), 6.5)
    x[:, 0] = 7.9
    clipped = measured(x, "mxfp4:sr")
    expected = 512 * (31 * 0.25 + 0.95)
    assert abs(clipped - expected) < 5 * math.sqrt(512 * 32 * 0.2)
    assert measured(torch.full((4, 32), 6.0), "mxfp4:sr") == 0
    large = torch.tensor([[16384.0, 49152.0, 1e9, 1.0]])
    assert measured(large, "hifp8:hr") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "mxfp4:sr",
            "mxfp8:2d:sr",
            "mxint8:sr",
            "mx:e3m4:b16:rceil:sr",
            "nvfp4:sr",
            "nvfp4:2d:sr",
        ),
        *("hifp8:hr", "hifp8:hr:inf", "hifp8:sr", "hifp8:sr:inf", "hifp8:t60000:sr"),
        *("hifp4", "hifp4:sr", "fp8_e4m3:sr"),
    ],
)
def test_values_that_are_looked_at_one_by_one_get_the_codes_of_quantize(name, dtype):
    """The statistics round once, without an upper limit, and clip the result afterwards."""
    x = heavy((70, 100), dtype, seed=5)
    x[:3] = torch.tensor([-0.0, math.inf, -math.inf, math.nan, 60000.0]).to(dtype).repeat(3, 20)
    x[3:36] *= torch.logspace(-9, 4, 33).unsqueeze(1).to(dtype)
    for axis in (0, 1):
        packed, _ = direct._quantized(x, get_format(name), axis)
        expected = quantize(x, name, axis, seed=direct.SEED)
        assert torch.equal(packed.codes, expected.codes)
        for ours, theirs in zip(
            packed.scales.parts().values(), expected.scales.parts().values(), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert torch.equal(dequantize(packed).nan_to_num(1.5), dequantize(expected).nan_to_num(1.5))
