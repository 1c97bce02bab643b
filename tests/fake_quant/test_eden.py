"""MS-EDEN rounding, compared with its definition in float64 and with means of many draws."""

import numpy as np
import pytest
import torch

from megatron.analysis.stats import direct, tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.fake_quant import Hadamard, dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.code_points import code_values, decode
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.inspect.format_report import describe
from megatron.fake_quant.inspect.rounding_bias import rounding_bias
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.matmul.operand import Operand

from .uses import check_commands

NEAREST = "nvfp4:bound255.99"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def normal(*shape, seed=4):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wanted_scales(x):
    """Return the corrected scales of a matrix in float64, by the definition."""
    packed = quantize(x, NEAREST)
    scales = decode(packed.scales.block(), E4M3).double().numpy()
    whole = float(packed.scales.whole())
    values = x.double().numpy().reshape(*scales.shape, 16) / (scales[..., None] * whole)
    codes = E2M1[np.abs(np.abs(values)[..., None] - E2M1).argmin(-1)] * np.sign(values)
    rows = len(x)
    square = (values * values).reshape(rows, -1, 128).sum(-1)
    product = (values * codes).reshape(rows, -1, 128).sum(-1)
    return scales * (square / product).repeat(8, axis=-1)


def draws(x, count):
    parts = [quantize(x, "nvfp4:eden", seed=seed) for seed in range(count)]
    return torch.stack([decode(part.scales.block(), E4M3) for part in parts]).double().numpy()


def test_codes_and_the_tensor_scale_are_those_of_rounding_to_nearest():
    x = normal(64, 256)
    found, nearest = quantize(x, "nvfp4:eden", seed=7), quantize(x, NEAREST)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.equal(found.scales.whole(), nearest.scales.whole())
    assert torch.equal(dequantize(found), fake_quantize(x, "nvfp4:eden", seed=7))
    assert not torch.equal(found.scales.block(), nearest.scales.block())


def test_scales_are_the_corrected_ones_rounded_to_a_neighbor_at_random():
    x = normal(8, 256)
    wanted, found = wanted_scales(x), draws(x, 1000)
    grid = np.unique(code_values(E4M3).numpy())
    grid = grid[np.isfinite(grid) & (grid >= 0)]
    index = np.searchsorted(grid, wanted)
    low, high = grid[index - 1], grid[index]
    assert ((found == low) | (found == high)).all()
    # the mean of 1000 draws, in standard deviations of a draw between two neighbors
    deviation = (high - low) / 2 / 1000**0.5
    assert (np.abs(found.mean(0) - wanted) < 5 * deviation).all()
    assert abs(((found.mean(0) - wanted) / deviation).mean()) < 0.3


@pytest.mark.parametrize("axis", [0, 1])
def test_a_group_is_128_neighbors_along_the_axis(axis):
    """A change of one value leaves the scales of the other groups unchanged."""
    x = normal(256, 256)
    x[0, 0] = x.abs().max()
    changed = x.clone()
    changed[3, 5] += 0.3
    first, second = (
        fake_quantize(each, "nvfp4:eden", axis, seed=1).movedim(axis, -1) for each in (x, changed)
    )
    place = (5, 0) if axis == 0 else (3, 0)
    differs = (first != second).view(256, 2, 128).any(-1).nonzero().tolist()
    assert differs in ([], [list(place)])
    several = [
        fake_quantize(changed + normal(256, 256, seed=i) * 0, "nvfp4:eden", axis, seed=i)
        for i in range(9)
    ]
    assert any(not torch.equal(several[0], other) for other in several[1:])


def test_a_ragged_axis_has_a_shorter_group():
    x = normal(4, 200)
    alone = fake_quantize(torch.cat([x, torch.zeros(4, 56)], 1), "nvfp4:eden", seed=3)
    scales = [
        decode(quantize(each, "nvfp4:eden", seed=3).scales.block(), E4M3)
        for each in (x, torch.cat([x, torch.zeros(4, 8)], 1))
    ]
    assert torch.equal(scales[0], scales[1])
    assert alone[:, 200:].eq(0).all()
    assert fake_quantize(x, "nvfp4:eden", seed=3).isfinite().all()


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_special_value_affects_its_block_alone(special):
    x = normal(2, 256)
    expected = fake_quantize(x, "nvfp4:eden", seed=3)
    x[0, 20] = special
    found = fake_quantize(x, "nvfp4:eden", seed=3)
    assert found.isnan().nonzero().tolist() == [[0, i] for i in range(16, 32)]
    assert torch.equal(found[1], expected[1])


def test_zeros_stay_zeros():
    assert torch.equal(fake_quantize(torch.zeros(4, 256), "nvfp4:eden"), torch.zeros(4, 256))
    x = normal(4, 256)
    x[1, 128:] = 0
    assert fake_quantize(x, "nvfp4:eden")[1, 128:].eq(0).all()


def test_names():
    fmt = get_format("nvfp4:eden")
    assert fmt.name == "nvfp4:bound255.99:eden"
    assert get_format(fmt.name) == fmt
    assert get_format("nvfp4:eden:bound128").name == "nvfp4:bound128:eden"
    assert get_format("nvfp4:bound448:eden").name == "nvfp4:bound448:eden"
    assert get_format("nvfp4:eden:outer-none").name == "nvfp4:outer-none:eden"
    for name in ("nvfp4:2d:eden", "mxfp4:eden", "hifp8:eden", "nv:e2m1:b16:ue5m3:eden"):
        with pytest.raises(ValueError, match="does not take 'eden'"):
            get_format(name)
    with pytest.raises(ValueError, match="sets the rounding a second time"):
        get_format("nvfp4:sr:eden")


def heavy(rows, columns, seed):
    """Return values with heavy tails and a mean, which a rotation makes almost normal."""
    x = normal(rows, columns, seed=seed)
    return x / normal(rows, columns, seed=seed + 100).abs().clamp(min=0.2) + 0.5


def test_after_random_rotations_the_mean_of_products_is_right():
    """The error of a mean falls as 1 / sqrt(n) down to the gain that `describe` states."""
    a, b = heavy(192, 384, 1), heavy(128, 384, 2)
    exact = a.double() @ b.double().t()

    def errors(name, counts):
        operand = Operand(get_format(name), Hadamard(128, "random"))
        total, found = torch.zeros_like(exact), []
        for draw in range(max(counts)):
            total += quantized_matmul(a, b, GemmFormats(operand, operand), seed=draw)
            if draw + 1 in counts:
                found.append(float((total / (draw + 1) - exact).norm() / exact.norm()))
        return float((total / max(counts) * exact).sum() / exact.square().sum()) - 1, found

    gain, found = errors("nvfp4:eden", (1, 64))
    assert abs(gain) < 1.5e-3
    assert found[1] / found[0] == pytest.approx(1 / 8, rel=0.1)
    nearest, _ = errors("nvfp4", (16,))
    assert nearest < -7e-3


def test_describe_states_the_gain():
    bias = rounding_bias(get_format("nvfp4:eden"))
    assert -1e-3 < bias.gain < -4e-4
    assert not bias.unbiased
    text = " ".join(describe(get_format("nvfp4:eden")).split())
    assert "bias biased: the mean of a product of normal values has the gain -0.0" in text
    assert "a correction that blocks with different scales share" in text
    x = normal(512, 1024, seed=0).double()
    mean = sum(fake_quantize(x.float(), "nvfp4:eden", seed=i) for i in range(16)).double() / 16
    gain = float((mean * x).sum() / (x * x).sum())
    assert gain**2 - 1 == pytest.approx(bias.gain, abs=1e-4)


def test_statistics_are_those_of_the_values_and_the_commands_describe_it():
    x = normal(33, 300).exp()
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    name = get_format("nvfp4:eden").name
    _, found = tensor.measure(x, matrix, group_formats([name]))
    for dim, axis in ((-1, "row"), (0, "column")):
        error = fake_quantize(x, name, dim, seed=direct.SEED) - x.double()
        np.testing.assert_allclose(found[name, axis].numbers()["mse"], error.square().mean())
    check_commands(name)
