"""Products of operands whose values are not rounded to the dtype of the tensors.

The expected products are computed in float64 from codes and scales, which are decoded here.
"""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.fake_quant import Hadamard, dequantize, fake_quantize, get_format, quantize, reference
from megatron.fake_quant.fused import numba_launch
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.mean_split import SplitMatrix
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.matmul.products import multiply
from megatron.fake_quant.matmul.unrounded import kind_of, quantize_parts, unpacked_parts
from megatron.fake_quant.quantize import checked

from ..kernel_inputs import SEED, bits

M, N, K = 48, 80, 192
HALVES = (torch.bfloat16, torch.float16)
#: Formats whose values bfloat16 does not represent, with the types of their codes and scales.
NUMPY = {
    "nvfp4": (None, ml_dtypes.float8_e4m3fn),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, None),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, None),
    "fp8_rowwise": (ml_dtypes.float8_e4m3fn, np.float32),
    "fp8_block": (ml_dtypes.float8_e4m3fn, np.float32),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXACT = ("mxfp8", "mxfp4", "mxint8", "hifp8", "hifp4", "mx6", "amdfp4", "nvfp4:outer-none", "bf16")
#: Formats, by the kind of their operands in bfloat16 on a CPU.
APART = ("nvfp4", "nvfp4:sr", "nvfp4:4over6-mse", "nvfp4:2d", "nvint4", "fp8_e4m3", "hifp8:t15")
WIDE = ("fp8_block", "fp8_rowwise", "nvfp4:outer-1x128", "nf4", "if4", "mxfp4_macro", "nvfp4:eden")


def tensors(dtype: torch.dtype, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    a, b, dc = (
        torch.randn(*batch, *shape, generator=generator).mul(size).to(dtype)
        for shape, size in (((M, K), 3.0), ((N, K), 0.05), ((M, N), 0.02))
    )
    return a.requires_grad_(), b.requires_grad_(), dc


def run(a, b, dc, formats, alpha=1.0, **arguments):
    c = quantized_matmul(a, b, formats, alpha=alpha, **arguments)
    return c.detach(), *torch.autograd.grad(c, (a, b), dc)


def exact(x: Tensor, name: str, axis: int) -> Tensor:
    """Return the quantized values of a matrix in float64, decoded from its codes and scales."""
    element, of_scale = NUMPY[name]
    packed = quantize(x.detach() if axis == -1 else x.detach().t(), name)
    codes = packed.codes.numpy()
    if element is None:
        values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)]
    else:
        values = codes.view(element).astype(np.float64)
    if of_scale is not None:
        blocks = packed.scales.blocks.numpy().view(of_scale).astype(np.float64)
        size = packed.format.block_size
        values = values * np.repeat(blocks, min(size, values.shape[-1]), -1)[:, : values.shape[-1]]
    if packed.scales.tensor is not None:
        values = values * float(packed.scales.tensor)
    result = torch.from_numpy(values)
    return result if axis == -1 else result.t()


def assert_rounded_once(ours: Tensor, expected: Tensor) -> None:
    """Check that almost all values are the float64 results, rounded once.

    A float32 sum next to a tie may be rounded to the other side. With the operands rounded to
    bfloat16, every other value differs.
    """
    assert (ours == expected.to(ours.dtype)).double().mean() > 0.985
    atol = max(1e-6 * float(expected.abs().max()), torch.finfo(ours.dtype).smallest_normal / 2**10)
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_the_three_products_are_rounded_once(name, dtype, alpha):
    a, b, dc = tensors(dtype)
    results = run(a, b, dc, GemmFormats.uniform(get_format(name)), alpha)
    qa, qb, qc = exact(a, name, -1), exact(b, name, -1), exact(dc, name, -1)
    expected = [
        alpha * qa @ qb.t(),
        alpha * qc @ exact(b, name, -2),
        alpha * exact(dc, name, -2).t() @ exact(a, name, -2),
    ]
    for ours, theirs in zip(results, expected, strict=True):
        assert_rounded_once(ours, theirs)
    rounded = fake_quantize(a, name).double() @ fake_quantize(b, name).double().t()
    if dtype == torch.bfloat16:
        assert (results[0] == (alpha * rounded).to(dtype)).double().mean() < 0.9


@pytest.fixture
def quick_cpu(monkeypatch):
    """Let products be those of torch, as on a CPU on which oneDNN multiplies every dtype."""
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset())


@pytest.fixture
def slow_cpu(monkeypatch):
    """Let products be those of a CPU on which torch multiplies short dtypes with scalar code."""
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset(HALVES))


@pytest.mark.usefixtures("quick_cpu")
@pytest.mark.parametrize("name", EXACT)
def test_formats_that_the_dtype_represents_keep_their_bits(name):
    a, b, dc = tensors(torch.bfloat16)
    c, da, db = run(a, b, dc, GemmFormats.uniform(get_format(name)))
    assert kind_of(get_format(name), torch.bfloat16, "cpu") == "exact"
    assert torch.equal(c, fake_quantize(a, name) @ fake_quantize(b, name).t())
    assert torch.equal(da, fake_quantize(dc, name) @ fake_quantize(b, name, -2))
    assert torch.equal(db, fake_quantize(dc, name, -2).t() @ fake_quantize(a, name, -2))


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["mxfp4", "hifp8"])
def test_a_slow_dtype_is_multiplied_in_float32(name, dtype, batch, autocast):
    """Each product is rounded once; alpha is applied before that only in batched forward passes."""
    alpha = 0.3
    a, b, dc = tensors(dtype, *batch)
    with torch.autocast("cpu", dtype, enabled=autocast):
        c, da, db = run(a, b, dc, GemmFormats.uniform(get_format(name)), alpha)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left.float(), right.float())

    if batch:
        left, right = fake_quantize(a, name).float(), fake_quantize(b, name).float().mT
        expected = torch.baddbmm(torch.zeros(*c.shape), left, right, beta=0.0, alpha=alpha)
        assert torch.equal(c, expected.to(dtype))
    else:
        expected = product(fake_quantize(a, name), fake_quantize(b, name).mT)
        assert torch.equal(c, expected.to(dtype) * alpha)
    expected = product(fake_quantize(dc, name), fake_quantize(b, name, -2))
    assert torch.equal(da, expected.to(dtype) * alpha)
    expected = product(fake_quantize(dc, name, -2).mT, fake_quantize(a, name, -2))
    assert torch.equal(db, expected.to(dtype) * alpha)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("name", [name for name in APART if not name.endswith(":sr")])
def test_a_slow_dtype_with_a_scale_apart_is_multiplied_in_float32(name):
    a, b, dc = tensors(torch.bfloat16)
    c, _, _ = run(a, b, dc, GemmFormats.uniform(get_format(name)))
    left, right = (quantize_parts(SplitMatrix(x), get_format(name), -1) for x in (a, b))
    exact = left.values.double() @ right.values.double().t()
    assert_rounded_once(c, exact * left.scale.double() * right.scale.double())


@pytest.mark.parametrize("name", [*NUMPY, *WIDE])
def test_float32_tensors_keep_their_bits(name):
    a, b, dc = tensors(torch.float32)
    c, da, db = run(a, b, dc, GemmFormats.uniform(get_format(name)), seed=3)
    if ":eden" not in name:
        assert torch.equal(c, fake_quantize(a, name) @ fake_quantize(b, name).t())
        assert torch.equal(da, fake_quantize(dc, name) @ fake_quantize(b, name, -2))
    assert db.dtype == torch.float32


@pytest.mark.parametrize("name", [*APART, *WIDE])
def test_values_times_their_scale_are_the_quantized_values_in_float32(name):
    """The elements are those of `fake_quantize`; only the last rounding is missing."""
    fmt, x = get_format(name), tensors(torch.bfloat16)[0].detach()
    seed = SEED if fmt.stochastic else None
    for axis, y in itertools.product((-1, -2), (x, x.t().contiguous().t(), x[::2, ::3])):
        parts = quantize_parts(SplitMatrix(y), fmt, axis, seed=seed)
        assert parts.dtype == torch.bfloat16
        assert (parts.scale is None) == (name in WIDE)
        assert parts.values.dtype == (torch.float32 if name in WIDE else torch.bfloat16)
        expected = fake_quantize(y.float(), fmt, axis, seed=seed)
        torch.testing.assert_close(parts.dense(), expected, rtol=2**-22, atol=0.0)
        assert torch.equal(parts.dense().bfloat16(), fake_quantize(y, fmt, axis, seed=seed))
        packed = quantize(y, fmt, axis, seed=seed)
        again = unpacked_parts(packed, torch.bfloat16)
        assert torch.equal(again.values, parts.values)
        assert torch.equal(again.dense(), parts.dense())


@pytest.mark.parametrize("name", [*APART, "fp8_rowwise", "nvfp4:sr:2d", "nvfp4:bound256"])
def test_kernels_leave_the_scale_out_as_the_reference_does(name):
    fmt = get_format(name).with_scale_apart()
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    x[3, 40], x[60, 5] = torch.nan, -torch.inf
    for dtype, axis in itertools.product((torch.float32, torch.bfloat16), (0, 1)):
        _, layout = checked(x, fmt, axis)
        seed = SEED if fmt.stochastic else None
        expected = reference.fake_quantize(x.to(dtype), fmt, layout, seed)
        found = numba_launch.fake_quantize(x.to(dtype), fmt, layout, seed)
        assert torch.equal(bits(found), bits(expected))
        assert float(found.nan_to_num(0, 0, 0).abs().max()) > 1.5, "elements, not scaled values"


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gpu_keeps_the_scales_of_rows_apart(dtype):
    assert kind_of(get_format("fp8_rowwise"), dtype, "cuda") == "apart"
    assert kind_of(get_format("nvfp4"), dtype, "cuda") == "apart"
    assert kind_of(get_format("fp8_block"), dtype, "cuda") == "wide"
    assert kind_of(get_format("nv:e3m4:b16:e4m3"), dtype, "cuda") == (
        "wide" if dtype == torch.bfloat16 else "apart"
    )


def test_scales_of_rows_are_applied_to_the_product_or_along_the_reduction():
    """On a GPU, an operand of a straight-through pass has its rows' scales along the reduction."""
    a, b = (torch.randn(6, 6).bfloat16() for _ in range(2))
    rows, columns = torch.rand(6, 1) + 0.1, torch.rand(1, 6) + 0.1
    for of_a, of_b in itertools.product((rows, columns, torch.tensor(0.3), None), repeat=2):
        left, right = (
            SplitMatrix(x, scale=scale, dtype=torch.bfloat16) for x, scale in ((a, of_a), (b, of_b))
        )
        expected = 0.5 * left.scaled().double() @ right.scaled().double()
        ours = multiply(left, right, 0.5, lambda x, y, alpha: alpha * (x @ y))
        torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-3)


SPLIT = Operand(get_format("nvfp4"), split="mean")
NVFP4, BLOCK, PER_TENSOR = (Operand(get_format(n)) for n in ("nvfp4", "fp8_block", "fp8_e4m3"))
COPY = Operand(source="dequantized")


def by_hand(a, b, dc, formats):
    """Return C, dA and dB in float64, with the operands of `fake_quantize` in float32."""

    def q(slot, x, axis):
        operand = getattr(formats, slot)
        x = x.detach().float()
        mean = 0.0
        if operand.split == "mean":
            mean = x.double().mean(-2, keepdim=True).to(dc.dtype).float()
            x = (x - mean).to(dc.dtype).float()
        values = x if operand.format is None else fake_quantize(x, operand.format, axis)
        return values.double() + mean

    qa, qb = q("fprop_a", a, -1), q("fprop_b", b, -1)
    copies = formats.straight_through, formats.dgrad_b.source, formats.wgrad_a.source
    for_dgrad = qb if copies[0] else q("dgrad_b", qb if copies[1] == "dequantized" else b, -2)
    for_wgrad = qa if copies[0] else q("wgrad_a", qa if copies[2] == "dequantized" else a, -2)
    return qa @ qb.mT, q("dgrad_c", dc, -1) @ for_dgrad, q("wgrad_c", dc, -2).mT @ for_wgrad


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize(
    "formats",
    [
        GemmFormats(NVFP4, PER_TENSOR, straight_through=True),
        GemmFormats(BLOCK, PER_TENSOR, straight_through=True),
        GemmFormats(NVFP4, PER_TENSOR, dgrad_b=COPY, wgrad_a=COPY),
        GemmFormats(NVFP4, BLOCK, PER_TENSOR, replace(NVFP4, source="dequantized"), NVFP4, NVFP4),
        GemmFormats(
            NVFP4, NVFP4, dgrad_b=Operand(get_format("mxfp8"), source="dequantized"), wgrad_a=BLOCK
        ),
        GemmFormats(fprop_a=NVFP4, wgrad_c=PER_TENSOR),
        GemmFormats(Operand(get_format("mxfp4")), NVFP4, BLOCK, BLOCK, BLOCK, PER_TENSOR),
        GemmFormats(SPLIT, NVFP4, straight_through=True),
        GemmFormats(SPLIT, SPLIT, SPLIT, BLOCK, replace(BLOCK, split="mean"), SPLIT),
    ],
    ids=str,
)
def test_operands_of_every_source_are_not_rounded(formats, batch):
    if batch and SPLIT in (formats.fprop_a, formats.wgrad_c):
        pytest.skip("mean splits are tested without batches")
    a, b, dc = tensors(torch.bfloat16, *batch)
    split = any(getattr(formats, slot).split != "none" for slot in SLOTS)
    for ours, expected in zip(run(a, b, dc, formats), by_hand(a, b, dc, formats), strict=True):
        assert ours.dtype == torch.bfloat16
        if split:  # the product of the rests is rounded before the products of means are added
            torch.testing.assert_close(
                ours.double(), expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max())
            )
        else:
            assert_rounded_once(ours, expected)


def test_transformed_operands_are_not_rounded():
    a, b, dc = tensors(torch.bfloat16)
    h = Hadamard(16, "nvfp4")
    rotated = Operand(get_format("nvfp4"), h)
    results = run(a, b, dc, GemmFormats(*[rotated] * 6))
    qa, qb = (fake_quantize(h.apply(x).float(), "nvfp4").double() for x in (a, b))
    assert_rounded_once(results[0], qa @ qb.t())
    formats = GemmFormats(rotated, rotated, dgrad_b=COPY)
    back = h.invert(fake_quantize(h.apply(b).float(), "nvfp4"))
    assert_rounded_once(run(a, b, dc, formats)[1], dc.double() @ back.double())


def test_unnormalized_probabilities_are_not_rounded():
    a, b, dc = tensors(torch.bfloat16)
    e = a.detach().float().exp().bfloat16()
    sums = e.float().sum(-1, keepdim=True)
    probs = (e.float() / sums).bfloat16().requires_grad_()
    formats = GemmFormats(NVFP4, NVFP4, wgrad_a=COPY, unnormalized=True)
    c = quantized_matmul(probs, b, formats, unnormalized=(e, sums))
    (db,) = torch.autograd.grad(c, b, dc)
    qe, qb = (fake_quantize(x.detach().float(), "nvfp4").double() for x in (e, b))
    assert torch.isclose(c.double(), (qe @ qb.t()) / sums, rtol=2**-7).double().mean() > 0.98
    assert_rounded_once(db, dc.double().t() @ (qe / sums))


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e30])
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3"])
def test_the_factor_of_a_product_may_leave_the_range_of_float32(name, size):
    """The product of two scales can be subnormal although the product of the tensors is not."""
    a, b, _ = tensors(torch.bfloat16)
    a = (a.detach() * size).bfloat16()
    formats = GemmFormats(*[Operand(get_format(name))] * 2)
    for other in (b.detach(), (b.detach() * 1e-5).bfloat16()):
        expected = exact(a, name, -1) @ exact(other, name, -1).t()
        assert_rounded_once(quantized_matmul(a, other, formats), expected)


@pytest.mark.parametrize("name", ["nvfp4:sr", "fp8_e4m3", "fp8_block"])
def test_compiled_and_mapped_products_have_the_bits_of_eager_mode(name):
    a, b, dc = (x.detach() for x in tensors(torch.bfloat16, 3))
    for operand in (Operand(get_format(name)), replace(SPLIT, format=get_format(name))):
        formats = GemmFormats(operand, operand, dgrad_c=operand, dgrad_b=COPY, wgrad_a=operand)

        def step(a, b, dc, formats=formats):
            c, pullback = torch.func.vjp(
                lambda a, b: quantized_matmul(a, b, formats, alpha=0.5, seed=SEED), a, b
            )
            return c, *pullback(dc)

        def results(a, b, dc, formats=formats):
            return run(a.requires_grad_(), b.requires_grad_(), dc, formats, 0.5, seed=SEED)

        loop = [results(*(x[i].clone() for x in (a, b, dc))) for i in range(3)]
        for ours, samples in zip(torch.vmap(step)(a, b, dc), zip(*loop, strict=True), strict=True):
            torch.testing.assert_close(ours, torch.stack(samples), rtol=2**-8, atol=1e-7)
            if name != "fp8_block" and operand.split == "none":
                assert torch.equal(ours, torch.stack(samples))
        torch._dynamo.reset()
        compiled = torch.compile(results, backend="aot_eager")
        for ours, expected in zip(compiled(a, b, dc), results(a, b, dc), strict=True):
            assert torch.equal(ours, expected)


def test_an_empty_operand_gives_an_empty_product():
    a, b = torch.zeros(0, K).bfloat16(), torch.randn(N, K).bfloat16()
    a.requires_grad_(), b.requires_grad_()
    c, da, db = run(a, b, torch.zeros(0, N).bfloat16(), GemmFormats.uniform(get_format("nvfp4")))
    assert (c.shape, da.shape) == ((0, N), (0, K))
    assert torch.equal(db, torch.zeros_like(b))


def test_autocast_does_not_round_the_values_again():
    a, b, _ = tensors(torch.bfloat16)
    formats = GemmFormats.uniform(get_format("fp8_block"))
    alone = quantized_matmul(a, b, formats)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quantized_matmul(a, b, formats), alone)


def test_the_public_function_still_returns_the_dtype_of_the_tensor():
    x = tensors(torch.bfloat16)[0].detach()
    assert fake_quantize(x, "nvfp4").dtype == torch.bfloat16
    assert torch.equal(dequantize(quantize(x, "nvfp4")), fake_quantize(x, "nvfp4"))
