"""Attention in tiles with accumulators, against whole matrices and a model of the kernel's order.

The model takes operands apart into the elements and scales of their codes, and adds their products
one by one with the scalar definition of the accumulator. All other arithmetic is float64.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron.fake_quant import get_format
from megatron.fake_quant.accumulate import get_accumulator, scalar
from megatron.fake_quant.accumulate.element_types import smallest_exponent
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.tiles.backward import Backward
from megatron.fake_quant.tiles.forward import TiledAttention
from megatron.fake_quant.tiles.matmul import TiledMatmul
from megatron.fake_quant.tiles.tiling import KeyMask, Tiling
from tests.fake_quant.accumulate.unit_operands import taken_apart, with_accumulators
from tests.fake_quant.tiles.attention_runs import NAMES, tensors, tiled, whole

ALPHA = 0.25


def pair(name, unit, *, unnormalized=True):
    """Return the formats of QK^T and PV: one format and one accumulator."""
    operand = Operand(None if name is None else get_format(name))
    qk = with_accumulators(GemmFormats(**dict.fromkeys(SLOTS, operand)), unit)
    return qk, replace(qk, unnormalized=unnormalized)


@pytest.mark.parametrize("unnormalized", [False, True])
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("fp8_e4m3", "hopper_fp8"),
        ("fp8_rowwise", "hopper_fp8_promote128"),
        ("fp8_block", "hopper_fp8_promote128"),
        ("mxfp8:sr", "blackwell_mx"),
        ("nvfp4:2d", "blackwell_nvfp4"),
        ("fp8_e4m3", "cdna3_fp8"),
        (None, "fda:l8:f12:m9:rz"),
    ],
)
def test_one_tile_has_the_bits_of_whole_matrices(name, unit, unnormalized):
    qkv, do = tensors(queries=48, keys=48)
    formats = pair(name, unit, unnormalized=unnormalized)
    expected = whole(qkv, do, formats)
    for what, ours, theirs in zip(
        NAMES, tiled(qkv, do, formats, Tiling(128)), expected, strict=True
    ):
        assert torch.equal(ours, theirs), what
    plain = tuple(with_accumulators(each, "fp32") for each in formats)
    if unit.startswith(("hopper", "fda")):
        for ours, theirs in zip(tiled(qkv, do, plain, Tiling(128)), expected, strict=True):
            assert not torch.equal(ours, theirs)


def test_copies_of_the_forward_pass_are_those_that_the_unit_multiplies():
    operand = Operand(get_format("nvfp4"))
    for formats in (
        GemmFormats(operand, operand, straight_through=True),
        GemmFormats(operand, operand, operand, replace(operand, source="dequantized")),
    ):
        qk = replace(formats, fprop_accumulator=get_accumulator("blackwell_nvfp4"))
        qkv, do = tensors(queries=48, keys=48)
        for unnormalized in (False, True):
            pv = replace(qk, unnormalized=unnormalized)
            results = tiled(qkv, do, (qk, pv), Tiling(64))
            for ours, theirs in zip(results, whole(qkv, do, (qk, pv)), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4:sr"])
def test_the_accumulator_fp32_changes_no_bit(name):
    qkv, do = tensors(queries=48, keys=48, dtype=torch.bfloat16)
    for unnormalized in (False, True):
        named = pair(name, "fp32", unnormalized=unnormalized)
        plain = tuple(
            replace(x, **dict.fromkeys(f"{gemm}_accumulator" for gemm in x.accumulators))
            for x in named
        )
        for ours, theirs in zip(
            tiled(qkv, do, named, Tiling(16)), tiled(qkv, do, plain, Tiling(16)), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("unit", ["hopper_fp8", "hopper_fp8_promote128"])
def test_queries_that_see_no_key_of_a_tile_change_no_sum(unit):
    """Where positions are consecutive, rows are left out in whole steps of the accumulator."""
    qkv, do = tensors(queries=150, keys=150)
    qkv, do = tuple(x[:1].detach().requires_grad_() for x in qkv), do[:1]
    formats = pair("fp8_e4m3", unit)
    for window in ((200, 0), (20, 3)):
        every = KeyMask(torch.arange(150), window)
        some = KeyMask.consecutive(150, qkv[0].device, window=window)
        for ours, theirs in zip(
            tiled(qkv, do, formats, Tiling(32), some),
            tiled(qkv, do, formats, Tiling(32), every),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


class Part:
    """Operand of a product: elements of its rows, scales of their blocks, factor of the sums."""

    def __init__(self, x, name, axis, unit, amax=None):
        self.accumulator = get_accumulator(unit)
        self.elements, self.scales, after, element = taken_apart(x, name, axis, unit, amax)
        self.after = after.double().reshape(-1, 1)
        self.smallest = smallest_exponent(element)

    def cut(self, rows=None, columns=None):
        """Return some rows, and a part of the reduction axis that begins with a whole block."""
        part = object.__new__(Part)
        part.__dict__ |= self.__dict__
        if rows is not None:
            part.elements = part.elements[rows]
            part.scales = None if part.scales is None else part.scales[rows]
            part.after = part.after[rows] if len(part.after) > 1 else part.after
        if columns is not None:
            part.elements = part.elements[:, columns]
            if part.scales is not None:
                block = self.accumulator.scale_block
                part.scales = part.scales[:, columns.start // block : -(-columns.stop // block)]
        return part


def sums(a, b, start=None):
    """Return the sums of all products of rows of A and B, by the scalar definition."""
    result = torch.zeros(len(a.elements), len(b.elements), dtype=torch.float64)
    ones = [1.0] * a.elements.shape[1]
    for i, x in enumerate(a.elements.tolist()):
        for j, y in enumerate(b.elements.tolist()):
            scales = None
            if a.scales is not None or b.scales is not None:
                both = ((a, i), (b, j))
                scales = tuple(ones if s.scales is None else s.scales[k].tolist() for s, k in both)
            begin = 0.0 if start is None else float(start[i, j].float())
            smallest = (a.smallest, b.smallest)
            result[i, j] = scalar.dot(
                x, y, a.accumulator, smallest=smallest, scales=scales, start=begin
            )
    return result


def product(a, b):
    return sums(a, b) * a.after * b.after.T


class Kernel:
    """Model of a kernel for one head, in float64 except for the products."""

    def __init__(self, name, unit, tiling, *, unnormalized, hidden, dtype):
        self.name, self.unit, self.tiling, self.dtype = name, unit, tiling, dtype
        self.unnormalized, self.hidden = unnormalized, hidden

    def part(self, x, axis, amax=None):
        x = x.to(self.dtype) if self.name is None else x.float()
        return Part(x, self.name, axis, self.unit, amax)

    def spans(self, keys):
        starts = range(0, keys, self.tiling.tile)
        spans = [slice(start, min(start + self.tiling.tile, keys)) for start in starts]
        return spans[::-1] if self.tiling.order == "reverse" else spans

    def forward(self, query, key, value):
        scores = ALPHA * product(self.part(query, -1), self.part(key, -1))
        self.scores = scores.masked_fill(self.hidden, -10000.0)
        vt, scale = self.part(value.T, -1), self.tiling.scale or 1.0
        output = torch.zeros(len(query), value.shape[1], dtype=torch.float64)
        largest = torch.full((len(query), 1), -math.inf, dtype=torch.float64)
        if not self.unnormalized:
            largest = self.scores.amax(1, keepdim=True)
        total, rounded_total = (torch.zeros(len(query), 1, dtype=torch.float64) for _ in "lr")
        shares = self.scores.softmax(1)
        for keys in self.spans(len(key)):
            new = torch.maximum(largest, self.scores[:, keys].amax(1, keepdim=True))
            shrink, e = (largest - new).exp(), (self.scores[:, keys] - new).exp()
            largest, output = new, output * shrink
            amax = None
            if self.unnormalized and self.name in ("fp8_e4m3", "nvfp4"):
                most = 448.0 if self.name == "fp8_e4m3" else 6 * 448.0
                amax = torch.tensor(most if self.tiling.scale else 1.0)
            probs = self.part(e * scale if self.unnormalized else shares[:, keys], -1, amax)
            total = total * shrink + e.sum(1, keepdim=True)
            rows = probs.elements.double() * probs.after
            rounded_total = rounded_total * shrink + rows.sum(1, keepdim=True)
            if self.in_one_register:
                output = sums(probs, vt.cut(columns=keys), output)
            else:
                output += product(probs, vt.cut(columns=keys))
        if self.in_one_register:
            output = output * probs.after * vt.after.T
        if self.tiling.row_sum == "quantized":
            total = rounded_total / scale
        self.probs = (self.scores - largest).exp() / total
        return output / (total * scale) if self.unnormalized else output

    @property
    def in_one_register(self):
        """True if P has no scale outside of the unit, or one that is common to all tiles."""
        if self.name in ("fp8_e4m3", "nvfp4"):
            return self.unnormalized
        return self.name != "fp8_rowwise"

    def backward(self, query, key, value, grad):
        dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
        # V is cut along its rows here, and K along the reduction axis of the gradient of Q.
        by_row, by_column = self.part(value.T, -2), self.part(key, -2)
        grad_probs = product(self.part(grad, -1), by_row)
        dot = (self.probs * grad_probs).sum(1, keepdim=True)
        grad_scores = (self.probs * (grad_probs - dot)).masked_fill(self.hidden, 0.0)
        for keys in self.spans(len(key)):
            probs, ds = self.probs[:, keys], grad_scores[:, keys]
            dv[keys] = product(self.part(probs, -2), self.part(grad, -2))
            dq += ALPHA * product(self.part(ds, -1), by_column.cut(columns=keys))
            dk[keys] = ALPHA * product(self.part(ds, -2), self.part(query, -2))
        return dq, dk, dv


def internal(formats, tiling, mask, operands, grad, dtype):
    """Return the output and the gradients in float32, before they are rounded to the dtype."""
    matmuls = (TiledMatmul(formats[0], ALPHA), TiledMatmul(formats[1]))
    attention = TiledAttention(*matmuls, tiling, mask).prepared(dtype)
    output, rows = attention.forward(*operands)
    return output, *Backward(attention, operands, grad).gradients(rows)


CASES = {
    "one register": ("fp8_e4m3", "hopper_fp8", Tiling(8), True),
    "rounded row sum": (
        "fp8_e4m3",
        "hopper_fp8",
        Tiling(8, "reverse", 256.0, "quantized"),
        True,
    ),
    "promotion": ("fp8_e4m3", "fda:l4:f9:m9:rz:p8", Tiling(10), True),
    "a scale per tile": ("fp8_e4m3", "hopper_fp8", Tiling(8), False),
    "a scale per row": ("fp8_rowwise", "hopper_fp8", Tiling(8, "reverse"), True),
    "mx": ("mxfp8", "blackwell_mx", Tiling(32), True),
    "mx, normalized": ("mxfp8", "blackwell_mx", Tiling(32, "reverse"), False),
    "nvfp4": ("nvfp4", "blackwell_nvfp4", Tiling(16, "reverse"), True),
    "no format": (None, "hopper_bf16", Tiling(8), True),
    "half precision": (None, "fp16", Tiling(8), True),
}


@pytest.mark.parametrize("case", CASES)
def test_many_tiles_equal_a_model_of_the_kernel(case):
    """A few results differ if float32 and float64 round a value to different sides of a tie."""
    name, unit, tiling, unnormalized = CASES[case]
    queries, keys, size = 6, 40 if case.startswith("mx") else 36, 16
    dtype = torch.bfloat16 if name is None else torch.float32
    generator = torch.Generator().manual_seed(8)
    shapes = [(queries, size), (keys, size), (keys, 8), (queries, 8)]
    operands = [torch.randn(s, generator=generator).to(dtype).float() for s in shapes]
    positions = torch.arange(queries) + keys - queries
    hidden = torch.arange(keys) > positions[:, None]
    model = Kernel(name, unit, tiling, unnormalized=unnormalized, hidden=hidden, dtype=dtype)
    *qkv, grad = (x.double() for x in operands)
    exact = [model.forward(*qkv), *model.backward(*qkv, grad)]
    *qkv, grad = (x[None] for x in operands)
    formats = pair(name, unit, unnormalized=unnormalized)
    ours = internal(formats, tiling, KeyMask(positions), tuple(qkv), grad, dtype)
    for what, x, y in zip(NAMES, ours, exact, strict=True):
        error = (x[0].double() - y).abs() / y.abs().mean()
        assert (error < 1e-5).double().mean() > 0.9, what
        assert error.median() < 1e-6, what


def test_a_new_sum_in_each_tile_would_have_other_bits(monkeypatch):
    qkv, do = tensors(queries=48, keys=48)
    formats = pair("fp8_e4m3", "hopper_fp8")
    one_register = tiled(qkv, do, formats, Tiling(16))[0]
    monkeypatch.setattr(TiledAttention, "continues", False)
    several = tiled(qkv, do, formats, Tiling(16))[0]
    assert not torch.equal(one_register, several)
    torch.testing.assert_close(one_register, several, rtol=0.01, atol=1e-3)


def test_a_dtype_that_the_unit_does_not_multiply_is_refused():
    qkv, do = tensors(queries=16, keys=16)
    with pytest.raises(ValueError, match="does not multiply float32 elements"):
        tiled(qkv, do, pair(None, "hopper_bf16"), Tiling(16))
