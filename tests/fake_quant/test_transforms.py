"""Quantization under `torch.func`, forward-mode derivatives and tensors of unusual kinds."""

import itertools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from megatron.fake_quant import Hadamard, dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.matmul.gemm import quantized_matmul

from .inputs import by_definition
from .kernel_inputs import NAMES, SEED, bits
from .tracing import GEMMS, KINDS, dtypes, kinds, quantizer, seed_of, special, tensor

#: Formats whose blocks extend over a whole axis.
WHOLE = ["nv:e2m1:column:e4m3", "mx:e4m3:tensor:even", "mx:e2m1:tensor:rceil:sr"]
names = pytest.mark.parametrize("name", [*NAMES, *WHOLE])


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


# vmap


@names
@dtypes
def test_vmap_is_a_loop_over_samples(name, dtype):
    """Each sample has a scale of its own: their largest magnitudes differ a thousandfold."""
    x = special(tensor(4, 5, 70)).to(dtype) * torch.logspace(-2, 1, 4).view(4, 1, 1).to(dtype)
    for dim, axis in itertools.product((0, 1, 2, -1), (-1, 0)):
        batch = x.movedim(0, dim)
        found = torch.vmap(quantizer(name, axis), in_dims=dim)(batch)
        loop = [by_definition(sample, name, axis, seed_of(name)) for sample in x]
        assert_same_bits(found, torch.stack(loop))


@names
def test_vmap_of_large_tensors_is_a_loop_over_samples(name):
    x = tensor(256, 3, 300)
    found = torch.vmap(quantizer(name, 0), in_dims=1, out_dims=2)(x)
    for i in range(3):
        assert_same_bits(found[:, :, i], by_definition(x[:, i], name, 0, seed_of(name)))


@kinds
def test_vmap_can_be_nested(name):
    x = tensor(2, 5, 70, 3) * torch.tensor([1.0, 30.0, 1e3])
    outer = torch.vmap(torch.vmap(quantizer(name)), in_dims=3)(x)
    other = torch.vmap(torch.vmap(quantizer(name, 0), in_dims=1), in_dims=0)(x[..., 0, None])
    for i, j in itertools.product(range(2), range(3)):
        if not get_format(name).square:
            expected = by_definition(x[i, :, :, j], name, -1, seed_of(name))
            assert_same_bits(outer[j, i], expected)
    for i, j in itertools.product(range(2), range(70)):
        expected = by_definition(x[i, :, j, 0, None], name, 0, seed_of(name))
        assert_same_bits(other[i, j], expected)


@kinds
def test_vmap_of_nothing_gives_nothing(name):
    assert torch.vmap(quantizer(name))(torch.zeros(3, 0, 4)).shape == (3, 0, 4)


def test_vmap_of_numbers_has_no_axis_to_quantize_along():
    found = torch.vmap(quantizer("hifp8"))(tensor(70))
    assert_same_bits(found, fake_quantize(tensor(70), "hifp8"))
    assert torch.equal(torch.vmap(quantizer("fp8_e4m3"))(tensor(70)).sign(), tensor(70).sign())
    with pytest.raises(ValueError, match="the tensor has no dimensions"):
        torch.vmap(quantizer("mxfp8"))(tensor(70))
    with pytest.raises(ValueError, match="axis 1 is out of range for a tensor of shape"):
        torch.vmap(lambda x: fake_quantize(x, "mxfp8", 1))(tensor(70, 2))


def test_random_numbers_are_drawn_as_vmap_was_told():
    """All samples share a seed or each has its own, as `randomness` sets; it must be set."""
    x = tensor(8, 64).expand(3, 8, 64)

    def rounded(**randomness: str) -> Tensor:
        torch.manual_seed(11)
        return torch.vmap(lambda x: fake_quantize(x, "mxfp4:sr"), **randomness)(x)

    with pytest.raises(RuntimeError, match="randomness"):
        rounded()
    same, different = rounded(randomness="same"), rounded(randomness="different")
    torch.manual_seed(11)
    loop = torch.stack([fake_quantize(x[0], "mxfp4:sr") for _ in range(3)])
    assert_same_bits(different, loop)
    assert_same_bits(same, loop[:1].expand(3, 8, 64))
    assert not torch.equal(different[0], different[1])


def test_a_closed_over_tensor_can_be_rounded_differently_for_each_sample():
    weight, x = tensor(4, 64), tensor(3, 64)
    torch.manual_seed(1)
    found = torch.vmap(lambda x: fake_quantize(weight, "mxfp4:sr") * x, randomness="different")(x)
    torch.manual_seed(1)
    seeds = torch.randint(0, 1 << 62, (3,))
    for i in range(3):
        expected = fake_quantize(weight, "mxfp4:sr", seed=int(seeds[i])) * x[i]
        assert torch.equal(found[i], expected)


@names
def test_codes_and_scales_under_vmap_are_those_of_a_loop(name):
    x = tensor(4, 6, 70) * torch.logspace(-2, 1, 4).view(4, 1, 1)

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        packed = quantize(x, name, axis=0, seed=seed_of(name))
        return packed.codes, dequantize(packed), *packed.scales.parts().values()

    found = torch.vmap(parts, in_dims=1)(x.transpose(0, 1))
    for i, sample in enumerate(x):
        for ours, expected in zip(found, parts(sample), strict=True):
            assert torch.equal(ours[i], expected)


@pytest.mark.parametrize("rows", [5, 400])
def test_a_hadamard_transform_under_vmap_is_that_of_a_loop(rows):
    x, transform = tensor(rows, 64, 3), Hadamard(32, 9)
    for dim in (0, 2):
        found = torch.vmap(lambda x: transform.apply(x, 0 if x.shape[0] == 64 else 1), dim)(x)
        for i, sample in enumerate(x.unbind(dim)):
            axis = 0 if sample.shape[0] == 64 else 1
            assert_same_bits(found[i], transform.apply(sample.contiguous(), axis))


# Derivatives


@kinds
@pytest.mark.parametrize("shape", [(3, 64), (256, 300)])
def test_its_derivative_is_zero_forward_and_backward(name, shape):
    function, x = quantizer(name), tensor(*shape)
    zero = torch.zeros_like(x)
    assert torch.equal(torch.func.grad(lambda x: function(x).sum() + x.sum())(x), zero + 1)
    value, pullback = torch.func.vjp(function, x)
    assert_same_bits(value, function(x))
    assert torch.equal(pullback(x)[0], zero)
    value, tangent = torch.func.jvp(function, (x,), (x,))
    assert_same_bits(value, function(x))
    assert torch.equal(tangent, zero)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        primal, tangent = forward_ad.unpack_dual(function(dual))
        assert_same_bits(primal, function(x))
        assert tangent is None or not tangent.any()
    assert not function(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("name", KINDS)
def test_jacobians_are_zero(name):
    x = tensor(2, 64)
    assert not torch.func.jacrev(quantizer(name))(x).any()
    assert not torch.func.jacfwd(quantizer(name))(x).any()


@pytest.mark.parametrize("transform", [Hadamard(16).apply, Hadamard(16).invert])
@pytest.mark.parametrize("rows", [3, 4096])
def test_no_derivative_passes_through_a_hadamard_transform(transform, rows):
    x = tensor(rows, 16)
    assert not torch.func.jvp(transform, (x,), (x,))[1].any()
    assert not torch.func.grad(lambda x: transform(x).sum())(x).any()


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("rows", [32, 256])
def test_matmuls_and_gradients_under_vmap_are_those_of_a_loop(name, rows):
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return quantized_matmul(a, b, GEMMS[name], seed=SEED).sin().sum()

    a, b = torch.randn(2, 3, rows, 256, generator=torch.Generator().manual_seed(1))
    gradient = torch.func.grad_and_value(loss, argnums=(0, 1))
    (of_a, of_b), values = torch.vmap(gradient, in_dims=(0, 1))(a, b.transpose(0, 1))
    for i in range(3):
        one, other = (x[i].clone().requires_grad_() for x in (a, b))
        expected = loss(one, other)
        expected.backward()
        torch.testing.assert_close(values[i], expected.detach(), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(of_a[i], one.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_b[i], other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GEMMS)
def test_the_gradients_of_a_matmul_by_func_are_those_of_backward(name):
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return quantized_matmul(a, b, GEMMS[name], seed=SEED).sin().sum()

    a, b = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    found = torch.func.grad(loss, argnums=(0, 1))(a, b)
    loss(a.requires_grad_(), b.requires_grad_()).backward()
    assert torch.equal(found[0], a.grad)
    assert torch.equal(found[1], b.grad)


def test_a_matmul_has_no_forward_derivative():
    x = tensor(4, 64)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda a: quantized_matmul(a, x, GEMMS["mxfp8"]), (x,), (x,))


# Unusual tensors


class Own(torch.Tensor):
    """A tensor subclass without rules of its own."""


@kinds
@pytest.mark.parametrize("shape", [(6, 70), (260, 300)])
def test_a_lazy_negation_and_a_subclass_give_the_bits_of_plain_tensors(name, shape):
    x = tensor(*shape)
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    assert_same_bits(quantizer(name)(negated), quantizer(name)(-x))
    packed = quantize(negated, name, seed=seed_of(name))
    assert_same_bits(dequantize(packed), quantizer(name)(-x))
    own = quantizer(name)(x.as_subclass(Own))
    assert isinstance(own, Own)
    assert_same_bits(own.as_subclass(Tensor), quantizer(name)(x))


@pytest.mark.parametrize("entry", [lambda x: fake_quantize(x, "mxfp8"), Hadamard(8).apply])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.eye(16).to_sparse(), "sparse_coo tensor.*to_dense"),
        (lambda: torch.eye(16).to_sparse_csr(), "sparse_csr tensor.*to_dense"),
        (lambda: torch.nested.nested_tensor([torch.eye(16)]), "nested tensor.*unbind"),
        (
            lambda: torch.nested.nested_tensor([torch.eye(16)], layout=torch.jagged),
            "nested tensor.*unbind",
        ),
        (lambda: [1.0, 2.0], "a list; give a torch.Tensor"),
        (lambda: torch.eye(16).double(), "torch.float64; give one of float32"),
        (lambda: torch.eye(16).cfloat(), "torch.complex64; give one of float32"),
    ],
)
def test_what_is_no_dense_tensor_is_refused(entry, make, what):
    with pytest.raises(ValueError, match=what):
        entry(make())


def test_symbolic_tracing_is_told_what_to_use():
    with pytest.raises(ValueError, match=r"a Proxy; .*use torch\.export or make_fx"):
        torch.fx.symbolic_trace(lambda x: fake_quantize(x, "mxfp8"))
