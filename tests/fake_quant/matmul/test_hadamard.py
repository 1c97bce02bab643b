"""Hadamard transforms against Transformer Engine, Kronecker powers in float64 and hand cases."""

import re

import numpy as np
import pytest
import torch

from megatron.fake_quant import Hadamard, quantize

from .. import references
from ..inputs import assert_same

SIZES = [2, 4, 8, 16, 32, 64, 128, 256]
SIGNS = ["none", 0, 1234]
sizes = pytest.mark.parametrize("size", SIZES)
signs = pytest.mark.parametrize("signs", SIGNS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def sylvester(size: int) -> np.ndarray:
    """Return a Kronecker power of [[1, 1], [1, -1]]."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1.0, 1.0], [1.0, -1.0]])
    return matrix


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize(
    ("size", "values", "expected"),
    [
        # 1 / sqrt(4) is exact: sums and differences, halved.
        (4, [1.0, 2.0, 3.0, 4.0], [5.0, -1.0, -2.0, 0.0]),
        (4, [8.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 4.0]),  # an outlier is spread
        (4, [0.0, 0.0, 0.0, 8.0], [4.0, -4.0, -4.0, 4.0]),
        (4, [1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0], [0.5] * 4 + [4.0, 0.0, 0.0, 0.0]),
        (16, [4.0] + [0.0] * 15, [1.0] * 16),
    ],
)
def test_named_vectors(size, values, expected):
    assert Hadamard(size).apply(torch.tensor(values)).tolist() == expected


@sizes
def test_the_matrix_is_sylvester_s(size):
    assert_same(Hadamard(size).matrix(), sylvester(size))


@sizes
@pytest.mark.parametrize("seed", [0, 1234])
def test_a_seed_gives_signs_to_the_inputs(size, seed):
    matrix = Hadamard(size, seed).matrix().numpy()
    np.testing.assert_array_equal(matrix, matrix[:, :1] * sylvester(size))
    assert set(np.abs(matrix).flatten()) == {1.0}
    np.testing.assert_array_equal(matrix, Hadamard(size, seed).matrix())


def test_seeds_differ_and_signs_are_even():
    drawn = torch.stack([Hadamard(64, seed).matrix()[:, 0] for seed in range(64)])
    assert len(drawn.unique(dim=0)) == 64
    assert abs(drawn.sum()) < 4 * 64  # four standard deviations of 4096 signs
    before = torch.get_rng_state()
    Hadamard(16, 5).matrix()
    assert torch.equal(torch.get_rng_state(), before)


@sizes
@signs
def test_it_matches_float64(size, signs):
    """Each of d additions in float32 errs by half an ulp of a sum of at most d terms."""
    transform = Hadamard(size, signs)
    x = normal(8, 3 * size)
    blocks = x.double().numpy().reshape(8, 3, size)
    matrix = transform.matrix().double().numpy()
    exact = (blocks @ matrix / np.sqrt(size)).reshape(8, 3 * size)
    bound = (size + 1) * 2.0**-24 * np.abs(blocks).sum(2).max() / np.sqrt(size)
    assert np.abs(transform.apply(x).numpy() - exact).max() <= bound
    assert bound < 0.001 * np.abs(exact).max()


@sizes
@signs
def test_sums_are_rounded_to_float32_from_the_first_to_the_last(size, signs):
    """The order is part of the definition, so that the result is the same everywhere."""
    transform = Hadamard(size, signs)
    x = torch.ldexp(normal(64, size), torch.arange(64).remainder(7).view(-1, 1))
    matrix = transform.matrix().numpy()
    total = np.zeros((64, size), np.float32)
    for i in range(size):
        total = total + x.numpy()[:, i : i + 1] * matrix[i]
    expected = total * np.float32(1 / np.sqrt(size))
    assert_same(transform.apply(x), expected + 0.0)
    large = x.repeat(1 + (1 << 16) // x.numel(), 1)  # a fused kernel computes these
    assert_same(transform.apply(large)[-64:], expected + 0.0)


@sizes
@signs
@pytest.mark.parametrize("axis", [0, -1])
def test_it_is_undone_and_keeps_products(size, signs, axis):
    transform = Hadamard(size, signs)
    a, b = normal(2 * size, 2 * size), normal(2 * size, 2 * size).flip(0)
    ya, yb = transform.apply(a, axis), transform.apply(b, axis)
    assert not torch.allclose(ya, a, atol=0.1)
    torch.testing.assert_close(transform.invert(ya, axis), a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        transform.apply(transform.invert(a, axis), axis), a, rtol=0, atol=1e-5
    )
    product, transformed = (a.t() @ b, ya.t() @ yb) if axis == 0 else (a @ b.t(), ya @ yb.t())
    torch.testing.assert_close(transformed, product, rtol=1e-4, atol=1e-3)


def test_a_size_of_four_powers_is_its_own_inverse_without_signs():
    x = torch.arange(64.0).view(4, 16)
    assert torch.equal(Hadamard(16).apply(Hadamard(16).apply(x)), x)
    assert torch.equal(Hadamard(16).invert(x), Hadamard(16).apply(x))


@dtypes
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_any_axis_dtype_and_layout(dtype, axis):
    transform = Hadamard(16, 3)
    x = normal(32, 48, 16).to(dtype)
    expected = transform.apply(x.movedim(axis, -1).contiguous()).movedim(-1, axis)
    y = transform.apply(x, axis)
    assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, x.shape, True)
    assert torch.equal(y, expected)
    assert torch.equal(y, transform.apply(x.float(), axis).to(dtype))
    strided = torch.stack([x, x], dim=-1)[..., 1]
    assert torch.equal(transform.apply(strided, axis), y)
    assert torch.equal(transform.invert(strided, axis), transform.invert(x, axis))


def test_the_input_stays_and_no_gradient_flows():
    x = normal(4, 16).requires_grad_()
    before = x.detach().clone()
    y = Hadamard(16).apply(x)
    assert not y.requires_grad
    y.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_special_value_spreads_over_its_block_and_no_further(special):
    x = torch.ones(3, 16)
    x[1, 5] = special
    finite = Hadamard(16).apply(x.flatten()).view(3, 16).isfinite()
    assert finite.all(1).tolist() == [True, False, True]
    assert not finite[1].any()


# Signs that are drawn for each call.


@pytest.mark.parametrize("seed", [0, 5, (1 << 62) - 1])
def test_random_signs_are_those_of_the_call_s_seed(seed):
    x, random = normal(16, 32), Hadamard(16, "random")
    assert torch.equal(random.apply(x, seed=seed), Hadamard(16, seed).apply(x))
    assert torch.equal(random.apply(x, seed=torch.tensor(seed)), Hadamard(16, seed).apply(x))
    assert torch.equal(random.invert(x, 0, seed=seed), Hadamard(16, seed).invert(x, 0))
    assert random.drawn(seed) == Hadamard(16, seed)
    assert Hadamard(16).drawn(seed) == Hadamard(16)


def test_random_signs_need_the_seed_of_the_call():
    with pytest.raises(ValueError, match=r"signs of a random .* give the call's seed"):
        Hadamard(16, "random").apply(normal(4, 16))


@pytest.mark.parametrize("inverse", [False, True])
def test_random_signs_under_vmap_are_those_of_each_sample_s_seed(inverse):
    x, seeds, random = normal(3, 5, 32), torch.tensor([4, 9, 4]), Hadamard(16, "random")
    function = random.invert if inverse else random.apply

    def transformed(x, seed):
        return function(x, seed=seed)

    for in_dims in ((0, 0), (0, None), (None, 0)):
        given = (x if in_dims[0] == 0 else x[1], seeds if in_dims[1] == 0 else seeds[0])
        found = torch.vmap(transformed, in_dims)(*given)
        for i in range(3):
            of_x = given[0][i] if in_dims[0] == 0 else given[0]
            of_seed = int(given[1][i] if in_dims[1] == 0 else given[1])
            assert torch.equal(found[i], function(of_x, seed=of_seed))


# TransformerEngine.


def test_the_signs_of_nvfp4_are_transformer_engine_s():
    """+ + + - + - - - - - - + - + - -, as in the paper's recipe (FORMATS)."""
    column = Hadamard(16, "nvfp4").matrix()[:, 0]
    assert "".join("+" if sign > 0 else "-" for sign in column) == "+++-+------+-+--"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transform_is_transformer_engine_s(dtype):
    """Transformer Engine transforms the transposed tensor, for wgrad."""
    x = references.tensor("normal", dtype)
    found = Hadamard(16, "nvfp4").apply(x, axis=0).t()
    assert_same(found.float(), references.expected("normal", dtype, "rht/values"))


@pytest.mark.parametrize("kind", references.KINDS)
def test_transformed_and_quantized_it_has_the_codes_of_transformer_engine(kind):
    x = references.tensor(kind)
    found = quantize(Hadamard(16, "nvfp4").apply(x, axis=0), "nvfp4", axis=0)
    codes = references.expected(kind, "float32", "rht/codes")
    np.testing.assert_array_equal(found.codes.numpy(), codes)
    scales = references.expected(kind, "float32", "rht/scales")
    np.testing.assert_array_equal(found.scales.block().numpy(), scales)


# Errors.


@pytest.mark.parametrize("size", [0, 1, 3, 24, 512, -16])
def test_a_size_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(ValueError, match=f"of size {size}; choose a power of two from 2 to 256"):
        Hadamard(size)


@pytest.mark.parametrize("signs", ["mixed", True, -1, 1 << 62, 1.0, ["none"]], ids=str)
def test_unknown_signs_are_refused(signs):
    message = f"unknown signs {re.escape(repr(signs))}; choose none, nvfp4, random or a seed from 0"
    with pytest.raises(ValueError, match=message):
        Hadamard(16, signs)


def test_signs_of_another_size_are_refused():
    with pytest.raises(ValueError, match="signs 'nvfp4' are for size 16, not 32; give a seed"):
        Hadamard(32, "nvfp4")


@pytest.mark.parametrize(("shape", "axis"), [((16, 40), 1), ((8, 16), 0), ((15,), -1)])
def test_a_size_that_does_not_divide_the_axis_is_refused(shape, axis):
    message = (
        rf"size 16 does not divide axis {axis} of a tensor of shape .*; choose a size that does"
    )
    with pytest.raises(ValueError, match=message):
        Hadamard(16).apply(torch.ones(shape), axis)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range_is_refused(axis):
    message = rf"axis {axis} is out of range for a tensor of shape \(16, 16\); choose one from -2"
    with pytest.raises(ValueError, match=message):
        Hadamard(16).apply(torch.ones(16, 16), axis)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"cannot transform a tensor of {dtype}; give one of"):
        Hadamard(16).apply(torch.ones(16, dtype=dtype))


def test_a_number_without_dimensions_is_refused():
    with pytest.raises(ValueError, match="runs along an axis, and the tensor has none"):
        Hadamard(16).apply(torch.tensor(1.0))
