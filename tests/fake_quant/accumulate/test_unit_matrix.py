"""Products with an accumulator: each GEMM equals accumulated products of its operands.

Elements and scales are decoded here from the codes of `quantize`, and the products are summed by
`accumulated_matmul`, which tests of its own compare with the exact definition.
"""

import itertools
from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.fake_quant import fake_quantize, get_format, quantize
from megatron.fake_quant.accumulate import ACCUMULATORS, accumulated_matmul, get_accumulator
from megatron.fake_quant.accumulate.unit_matrix import unit_matrix, unit_matrix_of_codes
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, SLOTS, GemmFormats
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.special_scalings import AbsmaxScaling, PairScaling
from tests.fake_quant.accumulate.unit_operands import taken_apart, with_accumulators
from tests.fake_quant.kernel_inputs import SEED

M, N, K = 12, 20, 160
FDA = "fda:l8:f12:m12:rz"
#: Two formats per unit, which cover the ways in which the unit applies scales.
UNITS = {
    "hopper_fp8": ("fp8_e4m3", "fp8_e5m2"),
    "hopper_fp8_promote128": ("fp8_block", "fp8_block:2d"),
    "blackwell_fp8": ("fp8_rowwise", "fp8_e4m3"),
    "blackwell_mx": ("mxfp8", "mxfp4:head3/4"),
    "blackwell_nvfp4": ("nvfp4", "nvfp4:2d"),
    "blackwell_mxfp4": ("mxfp4", "mxfp4:2d"),
    "cdna3_fp8": ("fp8_e4m3:pow2", "fp8_rowwise"),
    "fda:l8:f12:m12:rz": ("hifp8", "hifp8:t15"),
    "fda:l16:f20:m10:rne:p16": ("nvfp4:outer-row", "nf4"),
}


def tensors(dtype=torch.bfloat16, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b, dc = (
        torch.randn(*batch, *shape, generator=generator).mul(size).to(dtype)
        for shape, size in (((M, K), 3.0), ((N, K), 0.05), ((M, N), 0.02))
    )
    return a.requires_grad_(), b.requires_grad_(), dc


def run(a, b, dc, formats, alpha=1.0, **arguments):
    c = quantized_matmul(a, b, formats, alpha=alpha, **arguments)
    return c.detach(), *torch.autograd.grad(c, (a, b), dc)


def refusal(fmt, name: str) -> str | None:
    """Return the message with which an accumulator is refused for a format, or None."""
    try:
        with_accumulators(GemmFormats.uniform(fmt), name)
    except ValueError as error:
        return str(error)
    return None


def by_hand(left, right, unit: str, alpha: float, dtype: torch.dtype) -> Tensor:
    (a, of_a, after_a, name_a), (b, of_b, after_b, name_b) = left, right
    scales = None
    if of_a is not None or of_b is not None:
        blocks = (of_a if of_b is None else of_b).shape[-1]
        scales = tuple(
            torch.ones(*x.shape[:-1], blocks) if s is None else s.contiguous()
            for x, s in ((a, of_a), (b, of_b))
        )
    sums = accumulated_matmul(a, b, unit, elements=(name_a, name_b), scales=scales)
    after_b = after_b.mT if after_b.dim() else after_b
    return (alpha * (sums * after_a * after_b)).to(dtype)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("unit", "pair"), [(unit, p) for unit, (f, g) in UNITS.items() for p in ((f, g), (g, f))]
)
def test_each_gemm_is_the_accumulated_product_of_its_operands(unit, pair, dtype, batch):
    if batch and dtype == torch.float32:
        pytest.skip("batches are tested with one dtype")
    a, b, dc = tensors(dtype, *batch)
    first, second = pair
    formats = GemmFormats(*(Operand(get_format(name)) for name in (*pair, *pair, *pair)))
    alpha = 0.3 if batch else 1.0
    results = run(a, b, dc, with_accumulators(formats, unit), alpha)
    operands = (
        ((a, first, -1), (b, second, -1)),
        ((dc, first, -1), (b, second, -2)),
        ((dc, first, -2), (a, second, -2)),
    )
    plain = run(a, b, dc, formats, alpha)
    for ours, (left, right), torchs in zip(results, operands, plain, strict=True):
        expected = by_hand(taken_apart(*left, unit), taken_apart(*right, unit), unit, alpha, dtype)
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours, expected, rtol=2**-22 if dtype.itemsize > 2 else 2**-8, atol=0
        )
        assert (ours == expected).float().mean() > 0.7
        torch.testing.assert_close(ours.float(), torchs.float(), rtol=0.02, atol=0.02)
        if dtype == torch.float32 and unit.startswith(("hopper", "fda")):
            assert not torch.equal(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", ["hopper_bf16", "ampere_bf16", "cdna3_bf16", "bf16", "fp16", FDA])
def test_high_precision_tensors_are_multiplied_in_units_for_them(unit, dtype):
    a, b, dc = tensors(dtype)
    results = run(a, b, dc, with_accumulators(GemmFormats(), unit))
    pairs = ((a, b, -1, -1), (dc, b, -1, -2), (dc, a, -2, -2))
    for ours, (x, y, i, j) in zip(results, pairs, strict=True):
        operands = taken_apart(x, None, i, unit), taken_apart(y, None, j, unit)
        assert torch.equal(ours, by_hand(*operands, unit, 1.0, dtype))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_accumulator_fp32_changes_no_bit(name, dtype):
    tensors_ = tensors(dtype)
    formats = GemmFormats.uniform(get_format(name))
    for straight in (False, True):
        if straight:
            formats = replace(GemmFormats(formats.fprop_a, formats.fprop_b), straight_through=True)
        plain, named = run(*tensors_, formats), run(*tensors_, with_accumulators(formats, "fp32"))
        assert all(map(torch.equal, plain, named))


def test_one_gemm_alone_is_accumulated():
    a, b, dc = tensors()
    formats = GemmFormats.uniform(get_format("fp8_e4m3"))
    plain = run(a, b, dc, formats)
    for index, gemm in enumerate(GEMM_SLOTS):
        own = replace(formats, **{f"{gemm}_accumulator": get_accumulator("fda:l32:f3:m3:rz")})
        changed = [not torch.equal(x, y) for x, y in zip(run(a, b, dc, own), plain, strict=True)]
        assert changed == [i == index for i in range(3)]


def test_the_backward_pass_may_use_the_forward_copy_or_be_straight_through():
    a, b, dc = tensors()
    for formats in (
        GemmFormats(*[Operand(get_format("nvfp4"))] * 2, straight_through=True),
        GemmFormats(
            *[Operand(get_format("nvfp4"))] * 4,
            wgrad_a=Operand(source="dequantized"),
        ),
    ):
        own = replace(formats, fprop_accumulator=get_accumulator("blackwell_nvfp4"))
        plain, results = run(a, b, dc, formats), run(a, b, dc, own)
        assert torch.equal(plain[1], results[1])
        assert torch.equal(plain[2], results[2])
    copy = replace(
        formats, wgrad_c=formats.fprop_a, wgrad_a=replace(formats.fprop_a, source="dequantized")
    )
    assert run(a, b, dc, with_accumulators(copy, "blackwell_nvfp4"))[2].isfinite().all()


def test_unnormalized_probabilities_transforms_and_stochastic_rounding():
    a, b, _ = tensors()
    e = a.detach().float().exp().bfloat16()
    sums = e.float().sum(-1, keepdim=True)
    operand = Operand(get_format("mxfp8"))
    formats = GemmFormats(operand, operand, unnormalized=True)
    formats = replace(formats, fprop_accumulator=get_accumulator("blackwell_mx"))
    c = quantized_matmul((e / sums).bfloat16(), b, formats, unnormalized=(e, sums))
    left, right = (taken_apart(x, "mxfp8", -1, "blackwell_mx") for x in (e, b))
    assert torch.equal(c, (by_hand(left, right, "blackwell_mx", 1.0, c.dtype) / sums).bfloat16())

    h = Hadamard(16, "nvfp4")
    formats = GemmFormats(*[Operand(get_format("nvfp4:sr"), h)] * 2)
    formats = replace(formats, fprop_accumulator=get_accumulator("blackwell_nvfp4"))
    seen = {}
    c = quantized_matmul(
        a, b, formats, seed=3, observe=lambda slot, *rest: seen.update({slot: rest})
    )
    parts = []
    for slot in SLOTS[:2]:
        x, operand, axis, seed, _ = seen[slot]
        packed = quantize(x, operand.format, axis, seed=seed)
        parts.append(unit_matrix_of_codes(packed, formats.fprop_accumulator))
    sums = accumulated_matmul(
        parts[0].elements,
        parts[1].elements,
        "blackwell_nvfp4",
        elements=("e2m1", "e2m1"),
        scales=(parts[0].scales, parts[1].scales),
    )
    assert torch.equal(c, (sums * parts[0].after * parts[1].after).bfloat16())


@pytest.mark.parametrize(
    "name", [*FORMATS, "mx:e4m3:b128:rceil", "fp8_block:2d", "amdfp4:outer-row"]
)
def test_every_format_is_refused_or_taken_apart_without_loss(name):
    """Elements times scales are the quantized values; codes give the same parts."""
    fmt, x = get_format(name), tensors(torch.float32)[0].detach()
    taken = []
    for unit in ("hopper_fp8_promote128", "fda:l8:f20:m23:rz:p16", "blackwell_mx", FDA):
        accumulator = get_accumulator(unit)
        for axis in (-1, -2):
            if refusal(fmt, unit) is not None:
                assert unit in refusal(fmt, unit)
                continue
            parts = unit_matrix(x, fmt, axis, accumulator)
            values = parts.elements
            if parts.scales is not None:
                repeated = parts.scales.repeat_interleave(accumulator.scale_block, -1)
                values = values * repeated[..., : values.shape[-1]]
            values = values if parts.after is None else values * parts.after
            expected = fake_quantize(x, fmt, axis).movedim(axis, -1)
            torch.testing.assert_close(values, expected, rtol=2**-22, atol=0)
            for ours, theirs in zip(
                unit_matrix_of_codes(quantize(x, fmt, axis), accumulator), parts, strict=True
            ):
                assert (
                    ours == theirs
                    if ours is None or isinstance(ours, str)
                    else torch.equal(ours, theirs)
                )
            taken.append(unit)
    finer = ("hifp4", "mx9", "mx6", "if4", "if4_mae", "mixfp4", "mxfp4_macro", "mxfp4_macro_oas")
    assert bool(taken) == (name not in finer)


@pytest.mark.parametrize(
    ("name", "unit", "message"),
    [
        (
            "mxfp4",
            "hopper_fp8",
            r"hopper_fp8 cannot be combined with mxfp4, which has block scales: this",
        ),
        ("mxfp4", "hopper_fp8_promote128", "one scale per 32 values: this unit takes one per 128"),
        ("fp8_block", "hopper_fp8", "this unit applies none; choose a unit that does"),
        ("fp8_block", "blackwell_mx", "has FP32 block scales: this unit applies E8M0"),
        ("nvfp4", "blackwell_mx", "one scale per 16 values: this unit takes one per 32"),
        ("mxfp4", "blackwell_nvfp4", "has E8M0 block scales: this unit applies E4M3"),
        ("fp8_e4m3", "blackwell_nvfp4", "does not multiply e4m3 elements; it multiplies e2m1"),
        (
            "hifp8",
            "hopper_fp8",
            "multiplies HiFloat8 is public; use the accumulator fp32$",
        ),
        ("hifp4", FDA, "finer scales inside"),
        ("if4", FDA, "choose between two element types"),
        (
            "nvfp4:outer-1x128",
            "blackwell_nvfp4",
            "the reduction axis; choose outer-tensor or outer-row$",
        ),
        (None, "hopper_fp8", "does not multiply bfloat16 elements; it multiplies e4m3, e5m2"),
    ],
)
def test_a_combination_that_no_unit_computes_is_refused(name, unit, message):
    operand = Operand(None if name is None else get_format(name))
    for index, gemm in enumerate(GEMM_SLOTS):
        operands = dict.fromkeys(SLOTS[2 * index : 2 * index + 2], operand)
        with pytest.raises(ValueError, match=f"{gemm}: .*{message}"):
            GemmFormats(**operands, **{f"{gemm}_accumulator": get_accumulator(unit)})


def test_copies_splits_and_mixed_types_are_refused():
    fp8, unit = Operand(get_format("fp8_e4m3")), get_accumulator("hopper_fp8")
    with pytest.raises(ValueError, match=r"dgrad has the accumulator hopper_fp8 and multiplies a"):
        GemmFormats(fp8, fp8, straight_through=True, dgrad_accumulator=unit)
    copy = Operand(source="dequantized")
    with pytest.raises(
        ValueError, match=r"fprop_a quantized along another axis, .* give wgrad_a a"
    ):
        GemmFormats(fp8, fp8, wgrad_a=copy, wgrad_accumulator=unit)
    with pytest.raises(ValueError, match="split mean makes two; remove the split"):
        GemmFormats(replace(fp8, split="mean"), fp8, fprop_accumulator=unit)
    with pytest.raises(ValueError, match="does not multiply bfloat16 elements"):
        GemmFormats(fp8, fprop_accumulator=unit)


def test_a_dtype_that_the_unit_does_not_multiply_is_refused():
    a, b, _ = tensors(torch.float32)
    formats = with_accumulators(GemmFormats(), "hopper_bf16")
    with pytest.raises(ValueError, match="does not multiply float32 elements"):
        quantized_matmul(a, b, formats)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4:sr", "fp8_block", "fp8_rowwise"])
def test_compiled_and_mapped_products_have_the_bits_of_eager_mode(name):
    a, b, dc = (x.detach() for x in tensors(torch.bfloat16, 2))
    unit = {"nvfp4:sr": "blackwell_nvfp4", "fp8_block": "hopper_fp8_promote128"}.get(
        name, "hopper_fp8"
    )
    formats = with_accumulators(GemmFormats.uniform(get_format(name)), unit)

    def step(a, b, dc):
        c, pullback = torch.func.vjp(
            lambda a, b: quantized_matmul(a, b, formats, alpha=0.5, seed=SEED), a, b
        )
        return c, *pullback(dc)

    def results(a, b, dc):
        return run(a.requires_grad_(), b.requires_grad_(), dc, formats, 0.5, seed=SEED)

    loop = [results(*(x[i].clone() for x in (a, b, dc))) for i in range(2)]
    for ours, samples in zip(torch.vmap(step)(a, b, dc), zip(*loop, strict=True), strict=True):
        assert torch.equal(ours, torch.stack(samples))
    torch._dynamo.reset()
    compiled = torch.compile(results, backend="aot_eager")
    for ours, expected in zip(
        compiled(*map(torch.clone, (a, b, dc))), results(a, b, dc), strict=True
    ):
        assert torch.equal(ours, expected)


def test_empty_operands_have_empty_products():
    a, b = torch.zeros(0, K).bfloat16(), torch.randn(N, K).bfloat16()
    a.requires_grad_(), b.requires_grad_()
    formats = with_accumulators(GemmFormats.uniform(get_format("fp8_e4m3")), "hopper_fp8")
    c, _, db = run(a, b, torch.zeros(0, N).bfloat16(), formats)
    assert c.shape == (0, N)
    assert torch.equal(db, torch.zeros_like(b))


def test_all_pairs_of_units_and_formats_are_decided_without_a_crash():
    for unit, name in itertools.product(ACCUMULATORS.values(), FORMATS):
        message = refusal(get_format(name), unit.name)
        assert message is None or unit.name in message


def test_a_scaling_that_does_not_declare_one_scale_per_block_is_refused():
    """Otherwise the scales of a new scaling would be ignored."""

    class New(AbsmaxScaling):
        size, block_scale, one_scale = 32, "E8M0", PairScaling.one_scale

    fmt = get_format("mxfp8")
    assert refusal(fmt, "blackwell_mx") is None
    fmt = copy(fmt)
    object.__setattr__(fmt, "scaling", New())
    assert "finer scales inside" in refusal(fmt, "blackwell_mx")
