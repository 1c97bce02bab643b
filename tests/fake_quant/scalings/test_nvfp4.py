"""NVFP4 against Transformer Engine's reference, exact arithmetic and cases worked out by hand."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize, quantize
from megatron.fake_quant.code_points import decode, unpack_nibbles
from megatron.fake_quant.elements import E2M1, E4M3
from megatron.fake_quant.scalings.float8_types import E4M3_NAN
from tests.fake_quant import oracle, references
from tests.fake_quant.inputs import (
    assert_same,
    by_definition,
    every_bfloat16,
    every_float16,
    next_to,
    random_bit_patterns,
    random_bits_at_every_scale,
    rows_at_every_scale,
    with_special_blocks,
)
from tests.fake_quant.oracle_scaled import fake_quantize_nvfp4, nvfp4_blocks, to_blocks

variants = pytest.mark.parametrize("name", ["nvfp4", "nvfp4:2d"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
kinds = pytest.mark.parametrize("kind", references.KINDS)


@pytest.mark.parametrize(
    ("values", "scales", "expected"),
    [
        # One block: encode = 2688 / 2688 = 1, the scale is 2688 / 6 = 448, values are multiples of
        # 448 by E2M1. 1120 = 2.5 * 448 is half-way from 2 to 3, and goes to the even code, 2.
        ([2688.0, 448.0, 1120.0, 224.0, -112.0], [448.0], [2688.0, 448.0, 896.0, 224.0, -0.0]),
        # Two blocks: 6 needs a scale of 1 under the same tensor scale, and keeps all of E2M1.
        (
            [2688.0] + [0.0] * 15 + [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.25],
            [448.0, 1.0],
            [2688.0] + [0.0] * 15 + [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0],
        ),
        # 17 * 6 = 102: a scale of 17 is half-way from 16 to 18 in E4M3, to even 16: 102 / 16 is
        # 6.375 and saturates at 6 * 16.
        ([2688.0] + [0.0] * 15 + [102.0], [448.0, 16.0], [2688.0] + [0.0] * 15 + [96.0]),
        # 2^-10 is half of the smallest scale and becomes 0, and so does 6 * 2^-10 under it.
        ([2688.0] + [0.0] * 15 + [6 * 2.0**-10], [448.0, 0.0], [2688.0] + [0.0] * 16),
        # 3 * 2^-10 is half-way from 2^-9 to 2^-8, to even 2^-8; 18 * 2^-10 is 4.5 times that, and
        # becomes 4.
        (
            [2688.0] + [0.0] * 15 + [18 * 2.0**-10],
            [448.0, 2.0**-8],
            [2688.0] + [0.0] * 15 + [4 * 2.0**-8],
        ),
        # A tensor of zeros, with signs.
        ([0.0, -0.0], [0.0], [0.0, -0.0]),
    ],
)
def test_named_blocks(values, scales, expected):
    x = torch.tensor(values)
    quantized = quantize(x, "nvfp4")
    assert decode(quantized.scales.block(), E4M3).tolist() == scales
    assert quantized.scales.whole() == 1
    assert_same(fake_quantize(x, "nvfp4"), np.array(expected))


def test_the_tensor_scale_takes_the_maximum_to_the_largest_number():
    """The scale is 1 / (2688 / amax), with both divisions rounded to float32."""
    decode_scale = quantize(torch.ones(16), "nvfp4").scales.whole()
    assert decode_scale == np.float32(1) / np.float32(2688)
    x = torch.tensor([3.0, 0.5])
    assert quantize(x, "nvfp4").scales.whole() == np.float32(1) / (np.float32(2688) / np.float32(3))
    # The maximum becomes 6 * 448 * decode, which differs from 3 by an ulp.
    expected = np.float32(2688) * (np.float32(1) / (np.float32(2688) / np.float32(3)))
    assert fake_quantize(x, "nvfp4")[0] == expected


@kinds
@dtypes
@variants
def test_codes_and_scales_are_those_of_transformer_engine(kind, dtype, name):
    found = quantize(references.tensor(kind, dtype), name)
    np.testing.assert_array_equal(
        references.nibbles(found.codes), references.expected_nibbles(kind, dtype, name)
    )
    np.testing.assert_array_equal(
        found.scales.block().numpy(), references.expected(kind, dtype, f"{name}/scales")
    )


def check(x: torch.Tensor, name: str) -> None:
    expected = fake_quantize_nvfp4(x.float().numpy(), square="2d" in name)
    assert_same(fake_quantize(x.float(), name), expected)
    assert_same(by_definition(x.float(), name), expected)
    if x.dtype != torch.float32:
        found = fake_quantize(x, name)
        assert found.dtype == x.dtype
        assert_same(found.float(), torch.from_numpy(expected).to(x.dtype).float().numpy())


@variants
@pytest.mark.parametrize("make", [every_bfloat16, every_float16], ids=["bfloat16", "float16"])
def test_every_half_precision_value_matches_float32_arithmetic(make, name):
    """Values are in order, so that most blocks have one exponent; shuffled; and all below 2^12."""
    x = make()
    check(x.view(256, -1), name)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))]
    check(shuffled.view(256, -1), name)
    moderate = torch.where(x.abs() < 2.0**12, x, 1.0)  # keeps the tensor's maximum near
    check(moderate.view(256, -1), name)


@variants
def test_four_million_bit_patterns_match_float32_arithmetic(name):
    check(random_bit_patterns(1 << 22).view(2048, -1), name)


@variants
def test_random_mantissas_over_every_binade_match_float32_arithmetic(name):
    """The inputs are 786 tensors of 16 rows, each over eight binades with its own tensor scale."""
    x = random_bits_at_every_scale(64)[: 262 * 48].view(48, 262, 64).transpose(0, 1)
    for tensor in x.reshape(-1, 16, 64):
        check(tensor, name)


@variants
def test_rows_at_every_scale_match_float32_arithmetic(name):
    """Rows are quantized in one tensor, where most scales underflow, and 16 at a time."""
    x = with_special_blocks(rows_at_every_scale(64))
    check(x, name)
    for rows in x.split(16):
        check(rows, name)


@variants
def test_block_maxima_next_to_the_ties_of_scales_match_float32_arithmetic(name):
    """Maxima are one and two ulps around each number of E4M3 and each half-way case.

    There are many tensor scales: fl(encode * fl(1/6)) and fl(encode / 6) differ in some.
    """
    scales = oracle.code_points("e4m3")
    scales = np.concatenate([scales, (scales[1:] + scales[:-1]) / 2])
    for largest in np.linspace(2688, 5376, 60, dtype=np.float32):
        encode = np.float32(2688) / largest
        amax = next_to(scales / (np.float64(encode) / 6))
        amax = np.append(amax[amax < largest], largest)
        x = np.linspace(-1, 1, 16, dtype=np.float32) * amax[:, None]
        x = np.repeat(x, 16, axis=0) if name.endswith("2d") else x
        check(torch.from_numpy(x), name)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (17, 3), (33, 40), (16, 31)])
@variants
def test_ragged_ends_match_float32_arithmetic(shape, name):
    check(torch.randn(shape, generator=torch.Generator().manual_seed(6)), name)


@variants
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_special_value_makes_its_block_nan_and_leaves_the_tensor_scale(special, name):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(7))
    x[1, 17] = special
    expected = x.clone()
    expected[0 if "2d" in name else 1 : 16 if "2d" in name else 2, 16:32] = torch.nan
    y = fake_quantize(x, name)
    assert torch.equal(y.isnan(), expected.isnan())
    x[1, 17] = 0.0
    assert torch.equal(fake_quantize(x, name)[y.isfinite()], y[y.isfinite()])
    scales = quantize(torch.tensor([1.0, special]), "nvfp4").scales
    assert (scales.block() == E4M3_NAN).all()


@pytest.mark.parametrize("value", [2.0**-149, 1e-40, 2.0**-126, 3e38, torch.finfo().max])
def test_the_ends_of_float32_match_float32_arithmetic(value):
    """A tensor scale beyond the largest float32 is clamped to it."""
    check(torch.tensor([[value, -value / 2, value / 3, 0.0]]), "nvfp4")


def test_square_blocks_of_the_transposed_are_the_transposed():
    x = random_bits_at_every_scale(64, 1 << 16)[256:320]
    y = fake_quantize(x, "nvfp4:2d")
    assert torch.equal(fake_quantize(x.t(), "nvfp4:2d"), y.t())
    assert torch.equal(fake_quantize(x, "nvfp4:2d", axis=0), y)
    assert not torch.equal(fake_quantize(x, "nvfp4", axis=0), fake_quantize(x, "nvfp4"))


def test_elements_and_scales_match_float32_arithmetic():
    """Elements and scales are compared, because a product may hide a difference."""
    x = rows_at_every_scale(64)[1200:1400]
    elements, scales, whole = nvfp4_blocks(to_blocks(x.numpy(), 16))
    found = quantize(x, "nvfp4")
    codes = unpack_nibbles(found.codes, 64)
    assert_same(decode(codes, E2M1).view(-1, 16), elements)
    assert_same(decode(found.scales.block(), E4M3).flatten(), scales)
    assert found.scales.whole() == whole
    assert (scales == 0).any()
