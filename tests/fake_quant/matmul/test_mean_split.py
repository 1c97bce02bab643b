"""The mean split of operands, compared with float64 products of matrices that are built here."""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron.fake_quant import Hadamard, fake_quantize, get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import Operand

M, N, K = 48, 64, 96
MXFP4, MXFP8 = get_format("mxfp4"), get_format("mxfp8")
SPLIT = Operand(MXFP4, split="mean")


def operands(*batch, dtype=torch.float32):
    """Return A, B and dC whose rows share a large component."""
    generator = torch.Generator().manual_seed(8)
    tensors = []
    for rows, columns in ((M, K), (N, K), (M, N)):
        x = torch.randn(*batch, rows, columns, generator=generator)
        tensors.append((x + 4 * torch.randn(columns, generator=generator)).to(dtype))
    a, b, dc = tensors
    return a.requires_grad_(), b.requires_grad_(), dc


def run(a, b, dc, formats, **how):
    c = quantized_matmul(a, b, formats, **how)
    return c.detach(), *torch.autograd.grad(c, (a, b), dc)


def mean_of(x):
    """Return the mean of the rows, in the dtype of `x`."""
    return x.detach().double().mean(-2, keepdim=True).to(x.dtype)


def dense(x, operand, axis):
    """Return the matrix that stands for an operand, in float64."""
    if operand.format is None:
        return x.detach().double()
    mean = mean_of(x) if operand.split == "mean" else torch.zeros(())
    rest = fake_quantize((x.detach() - mean).to(x.dtype), operand.format, axis)
    return mean.double() + rest.double()


def by_hand(a, b, dc, formats, alpha=1.0):
    def of(slot, x, axis):
        return dense(x, getattr(formats, slot), axis)

    c = alpha * of("fprop_a", a, -1) @ of("fprop_b", b, -1).mT
    da = alpha * of("dgrad_c", dc, -1) @ of("dgrad_b", b, -2)
    db = alpha * of("wgrad_c", dc, -2).mT @ of("wgrad_a", a, -2)
    return c, da, db


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize(
    "slots", [*itertools.combinations(SLOTS, 1), SLOTS[::2], SLOTS[1::2], SLOTS]
)
def test_the_products_of_both_parts_add_up_to_the_product_in_float64(slots, alpha, batch):
    formats = replace(GemmFormats.uniform(MXFP8), **dict.fromkeys(slots, SPLIT))
    a, b, dc = operands(*batch)
    exact = by_hand(a, b, dc, formats, alpha)
    for ours, expected in zip(run(a, b, dc, formats, alpha=alpha), exact, strict=True):
        assert ours.dtype == torch.float32
        # float32 sums of up to 96 terms, whose magnitudes add up to about 2000
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-3)


def test_in_bf16_each_product_is_rounded_and_then_their_sum():
    a, b, dc = operands(dtype=torch.bfloat16)
    formats = GemmFormats(*[SPLIT] * 6)
    for ours, expected in zip(run(a, b, dc, formats), by_hand(a, b, dc, formats), strict=True):
        assert ours.dtype == torch.bfloat16
        size = expected.abs().max()
        torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=2**-8 * float(size))


def test_autocast_rounds_neither_the_means_nor_their_products():
    a, b, dc = operands(dtype=torch.bfloat16)
    formats = GemmFormats(*[SPLIT] * 6)
    alone = run(a, b, dc, formats)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for ours, expected in zip(run(a, b, dc, formats), alone, strict=True):
            assert torch.equal(ours, expected)


def test_equal_rows_are_exact_and_ordinary_quantization_is_not():
    a = torch.randn(K).expand(M, K).contiguous().requires_grad_()
    b = torch.randn(N, K)
    exact = a.detach().double() @ b.double().mT
    split = quantized_matmul(a, b, GemmFormats(fprop_a=SPLIT))
    torch.testing.assert_close(split.double(), exact, rtol=1e-6, atol=1e-4)
    plain = quantized_matmul(a, b, GemmFormats(fprop_a=Operand(MXFP4)))
    assert (plain - exact).abs().max() > 0.1


def test_a_shared_component_costs_no_precision():
    a, b, _ = operands()
    exact = a.detach().double() @ b.detach().double().mT
    errors = [
        (quantized_matmul(a, b, GemmFormats(fprop_a=operand)) - exact).norm()
        for operand in (SPLIT, Operand(MXFP4))
    ]
    assert 3 * errors[0] < errors[1]


def test_observers_and_codes_get_the_rest():
    a, b, dc = operands()
    seen = {}
    formats = GemmFormats(*[SPLIT] * 6)
    run(a, b, dc, formats, observe=lambda slot, x, *_: seen.update({slot: x}))
    for slot, x in zip(SLOTS, (a, b, dc, b, dc, a), strict=True):
        assert torch.equal(seen[slot], x.detach() - mean_of(x))


@pytest.mark.parametrize("tokens", [48, 40])
def test_both_parts_are_transformed(tokens):
    """The transform along tokens pads both parts of 40 tokens with zeros."""
    a, b, dc = (x.detach() for x in operands())
    a, dc = a[:tokens].requires_grad_(), dc[:tokens]
    b.requires_grad_()
    exact = run(a, b, dc, GemmFormats())
    operand = Operand(get_format("mxint8"), Hadamard(16, "nvfp4"), split="mean")
    for formats in (
        GemmFormats(*[operand] * 6),
        GemmFormats(operand, operand, straight_through=True),
    ):
        for ours, expected in zip(run(a, b, dc, formats), exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0.01, atol=6.0)


def test_the_forward_copy_is_the_sum_of_both_parts():
    a, b, dc = operands()
    copy = Operand(source="dequantized")
    for formats in (
        GemmFormats(SPLIT, SPLIT, straight_through=True),
        GemmFormats(SPLIT, SPLIT, dgrad_b=copy, wgrad_a=copy),
    ):
        _, da, db = run(a, b, dc, formats)
        assert torch.equal(da, dc @ dense(b, SPLIT, -1).float())
        assert torch.equal(db, dc.mT @ dense(a, SPLIT, -1).float())


def test_the_mean_of_no_tokens_adds_nothing():
    a, b = torch.zeros(0, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    c, da, db = run(a, b, torch.zeros(0, N), GemmFormats(*[SPLIT] * 6))
    assert c.shape == (0, N)
    assert da.shape == (0, K)
    assert torch.equal(db, torch.zeros(N, K))


def test_a_split_without_a_format_is_refused():
    with pytest.raises(ValueError, match="is for quantizing the rest; give the operand a format"):
        Operand(split="mean")
    with pytest.raises(ValueError, match="unknown split 'median' of an operand; choose none or m"):
        Operand(MXFP4, split="median")
