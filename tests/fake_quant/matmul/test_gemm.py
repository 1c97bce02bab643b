"""The six operand slots, compared with float64 products of operands quantized one by one.

The tests also hold the axis along which each operand is quantized.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.fake_quant import Hadamard, fake_quantize, get_format
from megatron.fake_quant.matmul import gemm
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.mean_split import SplitMatrix
from megatron.fake_quant.matmul.operand import Operand

M, N, K = 40, 72, 96  # 40 and 72 leave a ragged last block of 32

MXFP8 = get_format("mxfp8")


def operands(*batch: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    a, b, dc = (
        torch.randn(*batch, *shape, generator=generator, dtype=dtype)
        for shape in ((M, K), (N, K), (M, N))
    )
    return a.requires_grad_(), b.requires_grad_(), dc


def run(a, b, dc, formats, alpha=1.0):
    c = quantized_matmul(a, b, formats, alpha=alpha)
    return c.detach(), *torch.autograd.grad(c, (a, b), dc)


def by_hand(a, b, dc, formats, alpha=1.0):
    """Return C, dA and dB in float64 from operands that are quantized here, one by one."""

    def q(x, slot, axis):
        fmt = getattr(formats, slot).format
        x = x.detach()
        return (x if fmt is None else fake_quantize(x, fmt, axis=axis)).double()

    c = alpha * q(a, "fprop_a", -1) @ q(b, "fprop_b", -1).mT
    da = alpha * q(dc, "dgrad_c", -1) @ q(b, "dgrad_b", -2)
    db = alpha * q(dc, "wgrad_c", -2).mT @ q(a, "wgrad_a", -2)
    return c, da, db


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("alpha", [1.0, 0.25, 0.3])
@pytest.mark.parametrize("slots", [(), *itertools.combinations(SLOTS, 1), tuple(SLOTS)])
def test_each_slot_alone_and_all_together_equal_the_hand_computed_product(slots, alpha, batch):
    formats = replace(GemmFormats(), **dict.fromkeys(slots, Operand(get_format("mxfp4"))))
    a, b, dc = operands(*batch)
    for ours, exact in zip(
        run(a, b, dc, formats, alpha), by_hand(a, b, dc, formats, alpha), strict=True
    ):
        # fp32 accumulation over at most 96 terms: 96 * 2^-24 of the sum of magnitudes
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_changes_the_one_product_it_belongs_to(slot):
    a, b, dc = operands()
    plain = run(a, b, dc, GemmFormats())
    one = run(a, b, dc, replace(GemmFormats(), **{slot: Operand(MXFP8)}))
    changed = [not torch.equal(x, y) for x, y in zip(plain, one, strict=True)]
    assert changed == [slot.startswith(gemm_) for gemm_ in ("fprop", "dgrad", "wgrad")]


def test_every_operand_is_quantized_from_the_high_precision_tensor_along_its_own_axis(monkeypatch):
    seen = []

    def spy(parts, fmt, axis, **_):
        seen.append((parts.values, axis))
        return SplitMatrix(fake_quantize(parts.values, fmt, axis=axis))

    monkeypatch.setattr(gemm, "quantize_parts", spy)
    a, b, dc = operands()
    run(a, b, dc, GemmFormats.uniform(MXFP8))
    expected = [(a, -1), (b, -1), (dc, -1), (b, -2), (dc, -2), (a, -2)]
    assert [axis for _, axis in seen] == [axis for _, axis in expected]
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(seen, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_formats_it_is_the_plain_matmul_bit_for_bit(dtype):
    a, b, dc = operands(dtype=dtype)
    plain = torch.matmul(a, b.t())
    expected = (plain.detach(), *torch.autograd.grad(plain, (a, b), dc))
    for ours, theirs in zip(run(a, b, dc, GemmFormats()), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_result_keeps_the_dtype_and_a_frozen_operand_gets_no_gradient():
    a, b, dc = operands(dtype=torch.bfloat16)
    c = quantized_matmul(a, b.detach(), GemmFormats.uniform(MXFP8))
    assert c.dtype == torch.bfloat16
    c.backward(dc)
    assert a.grad is not None


def test_a_transposed_view_is_quantized_like_its_copy():
    """PV passes V^T as a view."""
    a, b, dc = operands(2)
    view = b.detach().mT.contiguous().mT.requires_grad_()
    formats = GemmFormats.uniform(MXFP8)
    for x, y in zip(run(a, b, dc, formats), run(a, view, dc, formats), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_right_where_the_format_is_exact():
    """Small integers are exact in MXFP8, so the quantized gradients are the true ones."""
    generator = torch.Generator().manual_seed(1)
    a, b, dc = (
        torch.randint(-4, 5, shape, generator=generator).float()
        for shape in ((M, K), (N, K), (M, N))
    )
    a, b = a.requires_grad_(), b.requires_grad_()
    _, da, db = run(a, b, dc, GemmFormats.uniform(MXFP8))
    assert torch.equal(da, dc @ b)
    assert torch.equal(db, dc.t() @ a)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((4, 5), (4, 6), "do not fit"),
        ((5,), (4, 5), "do not fit"),
        ((2, 4, 5), (3, 4, 5), "leading dimensions differ"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        quantized_matmul(torch.zeros(a), torch.zeros(b), GemmFormats())


# The dequantized forward copy as the source of an operand of the backward pass.


def source(name, hadamard=None):
    return Operand(name and get_format(name), hadamard, "dequantized")


@pytest.mark.parametrize(
    ("dtype", "first"),
    # bfloat16 does not represent the values of nvfp4, which test_unrounded.py multiplies
    [(torch.float32, "nvfp4"), (torch.bfloat16, "mxfp6_e3m2")],
)
def test_an_operand_is_quantized_from_the_dequantized_forward_copy(dtype, first):
    """The copy is quantized along K, and the operand again along N or M."""
    a, b, dc = operands(2, dtype=dtype)
    of_a, mxfp4 = get_format(first), get_format("mxfp4")
    formats = GemmFormats(
        Operand(of_a), Operand(mxfp4), dgrad_b=source("mxfp8"), wgrad_a=source("mxfp4")
    )
    c, da, db = run(a, b, dc, formats)
    qa, qb = (fake_quantize(x, fmt) for x, fmt in ((a, of_a), (b, mxfp4)))
    assert torch.equal(c, qa @ qb.mT)
    assert torch.equal(da, dc @ fake_quantize(qb, "mxfp8", -2))
    assert torch.equal(db, dc.mT @ fake_quantize(qa, "mxfp4", -2))
    original = replace(formats, dgrad_b=Operand(get_format("mxfp8")))
    assert not torch.equal(da, run(a, b, dc, original)[1])


def test_without_a_format_the_forward_copy_is_multiplied_as_it_is():
    a, b, dc = operands()
    formats = GemmFormats.uniform(MXFP8)
    formats = replace(formats, dgrad_c=Operand(), dgrad_b=source(None), wgrad_a=source(None))
    _, da, db = run(a, b, dc, replace(formats, wgrad_c=Operand()))
    straight = GemmFormats(Operand(MXFP8), Operand(MXFP8), straight_through=True)
    _, *expected = run(a, b, dc, straight)
    assert torch.equal(da, expected[0])
    assert torch.equal(db, expected[1])


def test_a_stochastic_forward_copy_is_the_one_that_was_multiplied():
    a, b, _ = operands()
    eye = torch.eye(K, requires_grad=True)
    formats = GemmFormats(Operand(get_format("mxfp4:sr")), Operand(get_format("mxfp4:sr")))
    formats = replace(formats, dgrad_b=source(None), wgrad_a=source(None))
    qa, _, da_of_eye = run(a, eye, torch.eye(M, K), formats)
    assert not torch.equal(qa, fake_quantize(a.detach(), "mxfp4"))
    assert torch.equal(da_of_eye[:M], qa), "the identity is exact, so dB is the copy of A"
    qb, db_of_eye, _ = run(eye, b, torch.eye(K, N), formats)
    assert torch.equal(db_of_eye[:N], qb.mT)


def test_the_forward_transform_is_undone_in_the_forward_copy():
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    rotated = Operand(MXFP8, H16)
    formats = GemmFormats(
        rotated,
        rotated,
        dgrad_b=source(None),
        wgrad_c=Operand(None, H16),
        wgrad_a=source("mxfp8", H16),
    )
    _, da, db = run(a, b, dc, formats)
    copy_a, copy_b = (H16.invert(fake_quantize(H16.apply(x.detach()), MXFP8)) for x in (a, b))
    assert torch.equal(da, dc @ copy_b)
    qa = fake_quantize(H16.apply(copy_a, 0), MXFP8, 0)
    assert torch.equal(db, H16.apply(dc, 0).mT @ qa)
    torch.testing.assert_close(da, dc @ b, rtol=0.1, atol=2.0)


def test_the_forward_copy_of_unnormalized_probabilities_is_normalized():
    e, b, dc = operands()
    e = e.detach().exp()
    sums = e.sum(-1, keepdim=True)
    a = (e / sums).requires_grad_()
    formats = GemmFormats(Operand(MXFP8), Operand(MXFP8), wgrad_a=source(None), unnormalized=True)
    c = quantized_matmul(a, b, formats, unnormalized=(e, sums))
    (db,) = torch.autograd.grad(c, b, dc)
    assert torch.equal(db, dc.mT @ (fake_quantize(e, MXFP8) / sums))


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        ("fprop_a", r"fprop_a has the source dequantized, but the forward pass has no copy of it"),
        ("wgrad_c", "wgrad_c has .* no copy of it; only dgrad_b and wgrad_a have one"),
        ("dgrad_b", "forward pass does not quantize this operand; give fprop_b a format"),
        ("wgrad_a", "forward pass does not quantize this operand; give fprop_a a format"),
    ],
)
def test_a_source_without_a_forward_copy_is_refused(slot, message):
    with pytest.raises(ValueError, match=message):
        GemmFormats(**{slot: source("mxfp8")})


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match=r"unknown source 'copy' .*; choose original or dequ"):
        Operand(MXFP8, source="copy")


# Hadamard transforms.


H16 = Hadamard(16, "nvfp4")


def rotated_by_hand(x, axis):
    """Rotate in float64, with the matrix of the definition: H_ij = (-1)^(common one bits)."""
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    matrix = (signs.unsqueeze(1) * h).double() / 4
    blocks = x.detach().double().movedim(axis, -1).unflatten(-1, (-1, 16))
    return (blocks @ matrix).flatten(-2).movedim(-1, axis)


def test_a_transform_of_both_operands_leaves_the_product():
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    plain = run(a, b, dc, GemmFormats())
    rotated = run(a, b, dc, GemmFormats(*[Operand(None, H16)] * 6))
    for x, y in zip(plain, rotated, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert not torch.equal(x, y)


def test_transformed_operands_are_quantized_along_the_reduction_axis():
    """NVFP4's wgrad: dy and x along tokens, transformed and then quantized."""
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    fmt = get_format("mxfp4")
    formats = GemmFormats(wgrad_c=Operand(fmt, H16), wgrad_a=Operand(fmt, H16))
    _, _, db = run(a, b, dc, formats)
    qdc = fake_quantize(rotated_by_hand(dc, 0).float(), fmt, 0).double()
    qa = fake_quantize(rotated_by_hand(a, 0).float(), fmt, 0).double()
    # A sum that is rounded to the other side of a tie changes an element, but such sums are rare.
    close = torch.isclose(db.double(), qdc.mT @ qa, rtol=1e-4, atol=1e-4)
    assert close.float().mean() > 0.95


def test_a_transform_of_one_operand_alone_is_refused():
    message = r"wgrad_c has the Hadamard transform Hadamard\(.*\) and wgrad_a None; .* the same one"
    with pytest.raises(ValueError, match=message):
        GemmFormats(wgrad_c=Operand(None, H16))


@pytest.mark.parametrize("tokens", [1, 15, 40])
def test_tokens_are_filled_up_with_zeros_for_the_transform(tokens):
    """The number of tokens depends on the data: that of an expert changes between batches."""
    generator = torch.Generator().manual_seed(5)
    shapes = (tokens, 48), (64, 48), (tokens, 64)
    a, b, dc = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    a.requires_grad_(), b.requires_grad_()
    exact = (dc.double().mT @ a.detach().double()).float()
    _, _, unquantized = run(
        a, b, dc, GemmFormats(wgrad_c=Operand(None, H16), wgrad_a=Operand(None, H16))
    )
    torch.testing.assert_close(unquantized, exact, rtol=1e-4, atol=1e-4)

    formats = GemmFormats(wgrad_c=Operand(MXFP8, H16), wgrad_a=Operand(MXFP8, H16))
    _, _, db = run(a, b, dc, formats)

    def by_hand(x):
        zeros = torch.zeros(-tokens % 16, x.shape[1])
        rotated = rotated_by_hand(torch.cat([x.detach(), zeros]), 0)
        return fake_quantize(rotated.float(), MXFP8, 0).double()

    close = torch.isclose(db.double(), by_hand(dc).mT @ by_hand(a), rtol=1e-4, atol=1e-4)
    assert close.float().mean() > 0.95


def test_a_transform_that_does_not_divide_a_layer_s_size_is_refused():
    a, b, dc = operands()
    formats = GemmFormats(dgrad_c=Operand(MXFP8, H16), dgrad_b=Operand(MXFP8, H16))
    with pytest.raises(ValueError, match=r"size 16 does not divide axis -1 "):
        run(a, b, dc, formats)


def test_stochastic_rounding_follows_torch_s_seed():
    a, b, dc = operands()
    formats = GemmFormats.uniform(get_format("mxfp4:sr"))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(a, b, dc, formats))
    assert all(map(torch.equal, results[0], results[1]))
    assert not any(map(torch.equal, results[0], results[2]))


# Signs that are drawn for each call.


RANDOM = Hadamard(16, "random")


def rotated_with(seen):
    """Return an observer that adds each operand's slot, transformed tensor and axis to `seen`."""
    return lambda slot, x, operand, axis, *_: seen.update({slot: (operand, x, axis)})


def test_random_signs_are_shared_by_a_gemm_s_operands_and_differ_between_gemms_and_calls():
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    formats = GemmFormats(*[Operand(MXFP8, RANDOM)] * 6)
    tensors = {"fprop_a": a, "fprop_b": b, "dgrad_c": dc, "dgrad_b": b, "wgrad_c": dc, "wgrad_a": a}
    calls = []
    for seed in (3, 3, 4, None, None):
        seen = {}
        c = quantized_matmul(a, b, formats, seed=seed, observe=rotated_with(seen))
        results = c, *torch.autograd.grad(c, (a, b), dc)
        for x, exact in zip(results, (a @ b.mT, dc @ b, dc.mT @ a), strict=True):
            torch.testing.assert_close(x, exact, rtol=0.1, atol=2.0)
        signs = [seen[slot][0].hadamard.signs for slot in SLOTS]
        assert signs[::2] == signs[1::2]
        assert len(set(signs)) == 3
        for slot, (operand, x, axis) in seen.items():
            assert torch.equal(x, operand.hadamard.apply(tensors[slot].detach(), axis))
        calls.append((signs, results))
    assert calls[0][0] == calls[1][0]
    assert all(map(torch.equal, calls[0][1], calls[1][1]))
    assert len({tuple(signs) for signs, _ in calls}) == 4


def test_random_signs_follow_torch_s_seed():
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    formats = GemmFormats(*[Operand(get_format("mxfp4"), RANDOM)] * 6)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(a, b, dc, formats))
    assert all(map(torch.equal, results[0], results[1]))
    assert not any(map(torch.equal, results[0], results[2]))


def test_random_signs_are_undone_in_a_straight_through_gradient_and_in_a_forward_copy():
    a, b, dc = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    a.requires_grad_(), b.requires_grad_()
    rotated = Operand(get_format("mxint8"), RANDOM)
    _, *exact = run(a, b, dc, GemmFormats())
    for formats in (
        GemmFormats(rotated, rotated, straight_through=True),
        GemmFormats(rotated, rotated, dgrad_b=source(None), wgrad_a=source(None)),
    ):
        _, *gradients = run(a, b, dc, formats)
        for ours, expected in zip(gradients, exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.3)


def test_samples_have_signs_of_their_own_under_vmap_if_randomness_differs():
    a, b = torch.randn(3, 32, 48), torch.randn(64, 48)
    formats = GemmFormats(*[Operand(get_format("mxfp4"), RANDOM)] * 6)

    def gradient(a, seed=None):
        return torch.func.grad(lambda a: quantized_matmul(a, b, formats, seed=seed).sum())(a)

    seeds = torch.tensor([4, 9, 4])
    found = torch.vmap(gradient)(a, seeds)
    for i in range(3):
        assert torch.equal(found[i], gradient(a[i], int(seeds[i])))
    repeated = a[:1].expand(3, 32, 48)
    same = torch.vmap(gradient, randomness="same")(repeated)
    different = torch.vmap(gradient, randomness="different")(repeated)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


def _penalty(formats: GemmFormats, way: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of the squared gradient of a matmul with respect to A, and exact values.

    Ways that end with "B" differentiate with respect to B; "linear" ones have a linear loss.
    """
    a, b = torch.randn(4, 32), torch.randn(8, 32)
    linear, of_b = "linear" in way, way.endswith("B")

    def penalty(product, gradient):
        def loss(a, b):
            c = product(a, b)
            return c.sum() if linear else c.square().sum()

        return lambda x: gradient(loss, a if of_b else x, x if of_b else b).square().sum()

    def by_autograd(loss, a, b):
        a = a if a.requires_grad else a.detach().requires_grad_()
        return torch.autograd.grad(loss(a, b), a, create_graph=True)[0]

    def by_func(loss, a, b):
        return torch.func.grad(loss)(a, b)

    results = []
    for product in (
        lambda a, b: quantized_matmul(a, b, formats),
        lambda a, b: a @ b.t(),
    ):
        x = (b if of_b else a).clone()
        if "func" in way:
            results.append(torch.func.grad(penalty(product, by_func))(x))
            continue
        value = penalty(product, by_autograd)(x.requires_grad_())
        results.append(torch.autograd.grad(value, x, allow_unused=True)[0])
    return tuple(results)


EVERYWHERE = GemmFormats.uniform(get_format("mxfp8"))


@pytest.mark.parametrize("way", ["A", "B", "func A", "func B", "linear B", "func linear B"])
@pytest.mark.parametrize(
    "formats",
    [
        EVERYWHERE,
        replace(GemmFormats(), dgrad_b=EVERYWHERE.dgrad_b),
        replace(EVERYWHERE, dgrad_b=replace(EVERYWHERE.dgrad_b, source="dequantized")),
        replace(
            GemmFormats(),
            fprop_a=EVERYWHERE.fprop_a,
            fprop_b=EVERYWHERE.fprop_b,
            straight_through=True,
        ),
    ],
    ids=["all", "dgrad_b", "dequantized", "straight through"],
)
def test_the_derivative_of_a_quantized_gradient_is_refused(formats, way):
    with pytest.raises(ValueError, match="a quantized matmul has no second derivative"):
        _penalty(formats, way)


@pytest.mark.parametrize("way", ["A", "B", "func A", "func B", "linear B", "func linear B"])
def test_the_derivative_of_a_gradient_in_high_precision_is_exact(way):
    found, exact = _penalty(GemmFormats(), way)
    assert torch.allclose(found, exact, rtol=1e-4)


def test_first_derivatives_may_be_computed_with_a_graph_of_their_own():
    a, b = torch.randn(4, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    c = quantized_matmul(a, b, EVERYWHERE)
    expected = torch.autograd.grad(c.sum(), (a, b), retain_graph=True)
    found = torch.autograd.grad(c.sum(), (a, b), create_graph=True)
    assert all(map(torch.equal, expected, found))


def test_formats_of_another_type_are_refused():
    a = torch.randn(4, 32)
    for wrong in ("mxfp8", get_format("mxfp8"), None):
        with pytest.raises(ValueError, match="give a GemmFormats, such as"):
            quantized_matmul(a, a, wrong)
