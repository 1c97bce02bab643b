"""Scales of whole tensors that are computed from an amax which the caller gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.fake_quant import (
    dequantize,
    fake_quantize,
    get_format,
    operators,
    quantize,
    reference,
)
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.format_text import from_text, to_text
from megatron.fake_quant.fused import numba_launch
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.scalings import kernel_roundings
from megatron.fake_quant.scalings.tensor_scale import local_amax

from .kernel_inputs import bits

FORMATS = (
    "fp8_e4m3",
    "fp8_e5m2:pow2",
    "hifp8:t15",
    "hifp8:t224:inf",
    "fp8_e4m3:sr",
    "nvfp4",
    "nvfp4:2d:sr",
    "nvfp4:eden",
    "nvfp4:4over6-mae",
    "nvint4",
    "nv:e2m1:b16:ue5m3",
    "if4",
)


def assert_same(found, expected):
    assert torch.equal(bits(found), bits(expected))


def demanding(name):
    """Return the named format, changed so that it requires an amax from the caller."""
    fmt = get_format(name)
    return replace(fmt, name="demanding", scaling=replace(fmt.scaling, amax="global"))


@pytest.fixture
def x():
    return torch.randn(32, 48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_the_reference_and_the_codes_agree_on_a_given_amax(name, x):
    fmt, layout = get_format(name), BlockLayout.of(tuple(x.shape), get_format(name), -1)
    seed = 3 if fmt.stochastic else None
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    for share in (1.0, 0.25, 3.0, 2.0**-140, 0.0):
        amax = local_amax(x) * share
        expected = reference.fake_quantize(x, fmt, layout, seed, amax=amax)
        if fmt.rounding in kernel_roundings(fmt, "cpu"):
            assert_same(numba_launch.fake_quantize(x, fmt, layout, seed, amax=amax), expected)
        assert_same(dequantize(quantize(x, fmt, seed=seed, amax=amax)), expected)
        if share == 1.0:
            assert_same(fake_quantize(x, fmt, seed=seed), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_demands_an_amax_has_no_other_scale(name, x):
    fmt = demanding(name)
    for use in (fake_quantize, quantize):
        with pytest.raises(ValueError, match="from a global amax, which the tensor"):
            use(x, fmt)
    with pytest.raises(ValueError, match="pass the amax"):
        reference.scale_down(x, fmt, BlockLayout.of(tuple(x.shape), fmt, -1))
    amax = torch.tensor(2.5)
    seed = 5 if fmt.stochastic else None
    same = fake_quantize(x, get_format(name), seed=seed, amax=amax)
    assert_same(fake_quantize(x, from_text(to_text(fmt)), seed=seed, amax=amax), same)


def test_values_beyond_the_amax_saturate():
    x = torch.tensor([-3.0, 0.5, 1.0, 2.0, 1e38])
    assert fake_quantize(x, "fp8_e4m3", amax=torch.tensor(1.0)).tolist() == [-1, 0.5, 1, 1, 1]
    # HiFloat8 maps the amax to 15 and ends at 32768.
    largest = float(np.float32(32768) / (np.float32(15) / np.float32(1)))
    found = fake_quantize(x, "hifp8:t15", amax=torch.tensor(1.0))
    assert found[-1] == pytest.approx(largest, rel=1e-6)
    # The block scale of nvfp4 ends at 448, and the element at 6.
    found = fake_quantize(torch.full((16,), 100.0), "nvfp4", amax=torch.tensor(1.0))
    assert found[0] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("value", [1e10, 1e30, 3e38])
def test_scaled_values_that_overflow_saturate(value):
    x, amax = torch.full((2, 128), -value), torch.tensor(1e-30)
    for name, target in (("nvfp4", 448), ("nvfp4:eden", 255.99)):
        found = fake_quantize(x, name, seed=3 if "eden" in name else None, amax=amax)
        assert found.numpy() == pytest.approx(np.float32(-1e-30 * 448 / target), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "amax", "message"),
    [
        ("mxfp8", torch.tensor(1.0), "mxfp8 has no scale for the whole tensor"),
        ("hifp8", torch.tensor(1.0), "leave `amax` out"),
        ("nvfp4:outer-row", torch.tensor(1.0), "no scale for the whole tensor"),
        ("fp8_e4m3", torch.tensor([1.0]), r"shape \(1,\); pass one"),
        ("fp8_e4m3", torch.tensor(1.0, dtype=torch.float64), "dtype torch.float64"),
        ("fp8_e4m3", 1.5, r"the amax is 1.5; pass a tensor, such as torch.tensor\(1.5\)"),
        ("fp8_e4m3", torch.tensor(-1.0), "the amax is -1; pass a finite number of 0 or more"),
        ("nvfp4", torch.tensor(torch.nan), "the amax is nan; pass a finite number"),
        ("if4", torch.tensor(torch.inf), "the amax is inf; pass a finite number"),
    ],
)
def test_an_amax_that_does_not_fit_is_refused(name, amax, message, x):
    with pytest.raises(ValueError, match=message):
        fake_quantize(x, name, amax=amax)
    if isinstance(amax, torch.Tensor):
        fmt, layout = get_format(name), BlockLayout.of(tuple(x.shape), get_format(name), -1)
        with pytest.raises(ValueError, match=message):
            numba_launch.fake_quantize(x, fmt, layout, None, amax=amax)


def test_block_scales_have_a_global_amax_only_under_a_tensor_scale():
    with pytest.raises(ValueError, match="outer scale is row; choose outer-tensor"):
        BlockScaling(16, scale="e4m3", outer="row", amax="global")
    with pytest.raises(ValueError, match="one scale per tensor and no block scales"):
        BlockScaling(16, scale="e4m3", outer="tensor", amax="delayed")


def test_the_local_amax_is_the_one_that_a_tensor_s_own_scale_uses(x):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for special in (None, torch.inf, torch.nan):
            case = x.to(dtype)
            if special is not None:
                case[0, 0] = -special
            amax = local_amax(case)
            assert amax == case[case.isfinite()].abs().max()
            assert_same(fake_quantize(case, "fp8_e4m3", amax=amax), fake_quantize(case, "fp8_e4m3"))
    assert local_amax(torch.empty(0, 3)) == 0
    assert local_amax(torch.full((3,), torch.nan)) == 0


def test_operators_and_vmap_take_an_amax(x):
    fmt, amax = demanding("fp8_e4m3"), torch.tensor(0.7)
    expected = fake_quantize(x, fmt, amax=amax)
    assert_same(operators.fake_quantize(x, to_text(fmt), -1, None, 0, amax), expected)
    several = torch.tensor([0.7, 2.0, 0.0])
    found = torch.func.vmap(lambda a: fake_quantize(x, fmt, amax=a))(several)
    loop = torch.stack([fake_quantize(x, fmt, amax=a) for a in several])
    assert_same(found, loop)
    codes = torch.func.vmap(lambda a: quantize(x, fmt, amax=a).codes)(several)
    assert torch.equal(codes, torch.stack([quantize(x, fmt, amax=a).codes for a in several]))
    compiled = torch.compile(lambda x, a: fake_quantize(x, fmt, amax=a), backend="eager")
    assert_same(compiled(x, amax), expected)


def test_a_matmul_asks_for_the_amax_of_each_operand_that_demands_one():
    fmt = demanding("fp8_e4m3")
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    seen, observed = [], {}

    def amax_of(slot, x, of_slot):
        assert of_slot is fmt
        seen.append(slot)
        return local_amax(x) / 2

    def observe(slot, x, operand, axis, seed, amax):
        observed[slot] = amax

    formats = GemmFormats.uniform(fmt)
    c = quantized_matmul(a, b, formats, amax_of=amax_of, observe=observe)
    c.sum().backward()
    assert sorted(seen) == sorted(SLOTS)
    halves = [fake_quantize(x, fmt, amax=local_amax(x) / 2) for x in (a, b)]
    assert torch.equal(c, halves[0] @ halves[1].T)
    assert observed["fprop_b"] == b.abs().max() / 2
    with pytest.raises(ValueError, match="`amax_of` of quantized_matmul"):
        quantized_matmul(a, b, formats)
