"""Test attention in tiles against whole matrices and a float64 model of the kernel's order."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fake_quant import Hadamard, fake_quantize, get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.matmul.unrounded import quantize_parts
from megatron.fake_quant.tiles import matmul as module
from megatron.fake_quant.tiles.attention import tiled_attention
from megatron.fake_quant.tiles.forward import TiledAttention
from megatron.fake_quant.tiles.matmul import TiledMatmul
from megatron.fake_quant.tiles.tiling import KeyMask, Tiling
from tests.fake_quant.tiles.attention_runs import (
    ALPHA,
    BATCH,
    NAMES,
    SIZE,
    VALUE_SIZE,
    tensors,
    tiled,
    whole,
)


def uniform(name, *, unnormalized, straight_through=False):
    """Return the formats of QK^T and PV: one format, after random signs if straight-through."""
    operand = Operand(get_format(name), Hadamard(16, "random") if straight_through else None)
    slots = SLOTS[:2] if straight_through else SLOTS
    qk = GemmFormats(**dict.fromkeys(slots, operand), straight_through=straight_through)
    return qk, replace(qk, unnormalized=unnormalized)


@pytest.mark.parametrize("unnormalized", [False, True])
@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp4:sr", "nvfp4", "nvfp4:2d", "hifp8", "fp8_e4m3", "fp8_rowwise"]
)
def test_one_tile_has_the_bits_of_whole_matrices(name, unnormalized):
    qkv, do = tensors()
    for straight_through in (False, True):
        formats = uniform(name, unnormalized=unnormalized, straight_through=straight_through)
        expected = whole(qkv, do, formats)
        for tile in (96, 128):
            results = tiled(qkv, do, formats, Tiling(tile))
            for what, ours, theirs in zip(NAMES, results, expected, strict=True):
                assert torch.equal(ours, theirs), (what, tile, straight_through)


def test_operands_of_the_backward_pass_can_come_from_the_forward_copies():
    q, mixed = Operand(get_format("mxfp8")), Operand(get_format("mxfp4"), source="dequantized")
    rotated = replace(mixed, hadamard=Hadamard(16))
    gradient = replace(q, hadamard=Hadamard(16))
    qk = GemmFormats(q, q, q, mixed, gradient, rotated)
    qkv, do = tensors()
    for pv in (qk, replace(qk, unnormalized=True)):
        results = tiled(qkv, do, (qk, pv), Tiling(96))
        for ours, theirs in zip(results, whole(qkv, do, (qk, pv)), strict=True):
            assert torch.equal(ours, theirs)


def test_the_mean_over_queries_and_keys_can_be_split_off():
    split = Operand(get_format("mxfp4"), split="mean")
    plain = Operand(get_format("mxfp4"))
    qk = GemmFormats(split, split, split, split, split, split)
    pv = replace(GemmFormats(split, plain, split, plain, split, split), unnormalized=True)
    qkv, do = tensors()
    expected = whole(qkv, do, (qk, pv))
    for ours, theirs in zip(tiled(qkv, do, (qk, pv), Tiling(96)), expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(tiled(qkv, do, (qk, pv), Tiling(32)), expected, strict=True):
        assert relative(ours, theirs) < 0.2  # the mean of P differs between tiles


def test_bfloat16_has_the_bits_of_float32_rounded_at_the_end():
    qkv, do = tensors(dtype=torch.bfloat16)
    formats = uniform("nvfp4", unnormalized=True)
    wide = tuple(x.detach().float().requires_grad_() for x in qkv)
    for tile in (96, 32):
        expected = tiled(wide, do.float(), formats, Tiling(tile))
        for ours, theirs in zip(tiled(qkv, do, formats, Tiling(tile)), expected, strict=True):
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, theirs.bfloat16())


def relative(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


class Model:
    """Float64 model of one head, written with plain loops over tiles and queries."""

    def __init__(self, formats, tiling, hidden):
        (self.qk, self.pv), self.tiling, self.hidden = formats, tiling, hidden

    def rounded(self, matmul, slot, x, axis, amax=None):
        fmt = getattr(getattr(self, matmul), slot).format
        if fmt is None:
            return x
        amax = None if amax is None else torch.tensor(amax)
        return fake_quantize(x.float(), fmt, axis, amax=amax).double()

    def starts(self, keys):
        starts = list(range(0, keys, self.tiling.tile))
        return starts[::-1] if self.tiling.order == "reverse" else starts

    def forward(self, query, key, value):
        queries, keys, tiling = len(query), len(key), self.tiling
        self.scores = ALPHA * (
            self.rounded("qk", "fprop_a", query, -1) @ self.rounded("qk", "fprop_b", key, -1).T
        )
        self.scores[self.hidden] = -10000.0
        value = self.rounded("pv", "fprop_b", value, -2)
        scale = tiling.scale or 1.0
        output = torch.zeros(queries, value.shape[1], dtype=torch.float64)
        largest = [-math.inf] * queries
        total, rounded_total = [0.0] * queries, [0.0] * queries
        self.copy = torch.zeros(queries, keys, dtype=torch.float64)  # P as it is multiplied
        for start in self.starts(keys):
            stop = min(start + tiling.tile, keys)
            e = torch.zeros(queries, stop - start, dtype=torch.float64)
            for i in range(queries):
                new = max(largest[i], *self.scores[i, start:stop].tolist())
                factor = math.exp(largest[i] - new) if largest[i] > -math.inf else 0.0
                output[i] *= factor
                self.copy[i] *= factor
                total[i] *= factor
                rounded_total[i] *= factor
                largest[i] = new
                for j in range(start, stop):
                    e[i, j - start] = math.exp(self.scores[i, j] - new)
                    total[i] += float(e[i, j - start])
            fmt = self.pv.fprop_a.format
            amax = None
            if fmt is not None and fmt.has_tensor_scale:
                amax = {"fp8_e4m3": 448.0, "nvfp4": 6 * 448.0}[fmt.name] if tiling.scale else 1.0
            probs = self.rounded("pv", "fprop_a", e * scale, -1, amax)
            self.copy[:, start:stop] = probs
            for i in range(queries):
                rounded_total[i] += float(probs[i].sum())
                output[i] += probs[i] @ value[start:stop]
        if tiling.row_sum == "quantized":
            total = [x / scale for x in rounded_total]
        divisor = torch.tensor(total, dtype=torch.float64)[:, None]
        self.copy /= divisor * scale
        self.probs = (self.scores - torch.tensor(largest, dtype=torch.float64)[:, None]).exp()
        self.probs /= divisor
        return output / (divisor * scale)

    def backward(self, query, key, value, grad):
        straight = self.pv.straight_through
        tile = self.tiling.tile
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        by_value = self.rounded("pv", "dgrad_c", grad, -1)
        source = self.rounded("pv", "fprop_b", value, -2) if straight else value
        if straight:  # the backward pass multiplies the operands of the forward pass
            query = self.rounded("qk", "fprop_a", query, -1)
            key = self.rounded("qk", "fprop_b", key, -1)
        grad_probs = by_value @ self.rounded("pv", "dgrad_b", source, -1).T
        dot = (self.probs * grad_probs).sum(1, keepdim=True)
        grad_scores = self.probs * (grad_probs - dot)
        grad_scores[self.hidden] = 0.0
        key_by_key = self.rounded("qk", "dgrad_b", key, -2)
        for start in self.starts(len(key)):
            keys = slice(start, start + tile)
            probs = (self.copy if straight else self.probs)[:, keys]
            probs = self.rounded("pv", "wgrad_a", probs, -2)
            grads[2][keys] = probs.T @ self.rounded("pv", "wgrad_c", grad, -2)
            ds = self.rounded("qk", "dgrad_c", grad_scores[:, keys], -1)
            grads[0] += ALPHA * ds @ key_by_key[keys]
            ds = self.rounded("qk", "wgrad_c", grad_scores[:, keys], -2)
            grads[1][keys] = ALPHA * ds.T @ self.rounded("qk", "wgrad_a", query, -2)
        return grads


MODEL_CASES = {
    "mx, forward": ("mx:e4m3:b8:floor", Tiling(16)),
    "mx, reverse, scaled": ("mx:e2m1:b16:rceil", Tiling(16, "reverse", 256.0)),
    "nv": ("nvfp4", Tiling(16)),
    "nv, reverse, scaled, row sum": ("nvfp4", Tiling(32, "reverse", 2688.0, "quantized")),
    "hif8, scaled": ("hifp8", Tiling(24, "forward", 256.0)),
    "fp8, reverse, scaled, row sum": ("fp8_e4m3", Tiling(16, "reverse", 256.0, "quantized")),
    "fp8": ("fp8_e4m3", Tiling(10)),
    "rows": ("fp8_rowwise", Tiling(10, "reverse")),
}


@pytest.mark.parametrize("case", [*MODEL_CASES, "straight-through"])
def test_many_tiles_equal_a_float64_model_of_the_kernel(case):
    """A few results differ if float32 and float64 round a value to different sides of a tie."""
    name, tiling = MODEL_CASES.get(case, ("mx:e4m3:b8:floor", Tiling(16, "reverse", 16.0)))
    formats = GemmFormats.uniform(get_format(name))
    if case == "straight-through":
        operand = Operand(get_format(name))
        formats = GemmFormats(operand, operand, straight_through=True)
    pair = (formats, replace(formats, unnormalized=True))
    qkv, do = tensors(queries=24, keys=40)
    hidden = torch.arange(40) > torch.arange(24)[:, None] + 16
    mask = KeyMask(torch.arange(24) + 16)
    for head in range(2):
        alone = tuple(x[head : head + 1].detach().requires_grad_() for x in qkv)
        ours = tiled(alone, do[head : head + 1], pair, tiling, mask)
        model = Model(pair, tiling, hidden)
        operands = [x[0].detach().double() for x in alone]
        exact = [model.forward(*operands), *model.backward(*operands, do[head].double())]
        for what, x, y in zip(NAMES, ours, exact, strict=True):
            error = (x[0].double() - y).abs() / y.abs().mean()
            assert (error < 1e-5).double().mean() > 0.9, what
            assert error.median() < 1e-6, what


HIGH = (GemmFormats(), GemmFormats(unnormalized=True))


def float64_attention(qkv, do, hidden, coefficient=1.0):
    """Return the results of plain attention in float64; `hidden` fits `[heads, M, N]`."""
    query, key, value = (x.detach().double().requires_grad_() for x in qkv)
    scores = (coefficient * ALPHA * query @ key.mT).masked_fill(hidden, -10000.0)
    output = scores.softmax(-1) @ value
    return output.detach(), *torch.autograd.grad(output, (query, key, value), do.double())


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("case", ["none", "causal", "window", "given", "padding"])
def test_masks_and_orders_without_formats(case, order):
    """The mask of "padding" hides all keys of some queries; these attend equally to all keys."""
    qkv, do = tensors(queries=40, keys=56)
    ahead = torch.arange(56) - (torch.arange(40)[:, None] + 16)
    given = torch.rand(2, 1, 40, 56, generator=torch.Generator().manual_seed(1)) < 0.4
    given[..., 0] = False
    given[0, 0, 5:9] = case == "padding"
    hidden, mask = {
        "none": (torch.zeros(40, 56).bool(), KeyMask()),
        "causal": (ahead > 0, KeyMask(torch.arange(40) + 16)),
        "window": (
            (ahead > 3) | (ahead < -9),
            KeyMask(torch.arange(40) + 16, (9, 3)),
        ),
    }.get(case, (given.expand(2, 2, 40, 56).flatten(0, 1), KeyMask(given=given)))
    exact = float64_attention(qkv, do, hidden, coefficient=1.5)
    for formats in (HIGH, (HIGH[0], HIGH[0])):
        results = tiled(qkv, do, formats, Tiling(24, order), mask, heads=2, coefficient=1.5)
        for ours, theirs in zip(results, exact, strict=True):
            assert relative(ours, theirs) < 1e-6


def test_each_tile_has_random_bits_of_its_own():
    formats = uniform("mxfp4:sr", unnormalized=True)
    qkv, do = tensors()
    first, again = (tiled(qkv, do, formats, Tiling(32)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    attention = TiledAttention(*(TiledMatmul(x, seed=5) for x in formats), Tiling(32))
    e = torch.rand(1, 64, 32, generator=torch.Generator().manual_seed(2))
    of_tile = [attention.unnormalized(e, tile).matrix.values for tile in (0, 1, 2, 1)]
    assert not torch.equal(of_tile[0], of_tile[1])
    assert not torch.equal(of_tile[1], of_tile[2])
    assert torch.equal(of_tile[1], of_tile[3])


def test_without_a_seed_the_backward_pass_repeats_the_draws_of_the_forward_pass():
    qk, pv = uniform("mxfp4", unnormalized=True)
    rotated = Operand(get_format("mxfp4:sr"), Hadamard(16, "random"))
    qk = replace(qk, fprop_a=rotated, fprop_b=rotated)
    qkv, do = tensors()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        attention = TiledAttention(TiledMatmul(qk, ALPHA), TiledMatmul(pv), Tiling(32))
        output = tiled_attention(*qkv, attention=attention)
        results.append((output, *torch.autograd.grad(output, qkv, do)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


class _Largest(TorchDispatchMode):
    """Record the largest number of values of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        sizes = [x.numel() for x in tensors if isinstance(x, torch.Tensor)]
        self.values = max([self.values, *sizes])
        return result


@pytest.mark.parametrize("unnormalized", [False, True])
def test_no_tensor_has_all_pairs_of_queries_and_keys(unnormalized):
    qkv, do = tensors(queries=256, keys=512)
    formats = (GemmFormats(), GemmFormats(unnormalized=unnormalized))
    with _Largest() as largest:
        tiled(qkv, do, formats, Tiling(32))
    assert largest.values <= BATCH * 512 * max(SIZE, VALUE_SIZE)
    with _Largest() as largest:
        tiled(qkv, do, formats, Tiling(512))
    assert largest.values == BATCH * 256 * 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tile": 0}, "a tile of 0 keys; choose a number from 1"),
        ({"tile": 12.5}, "a tile of 12.5 keys; give a number of keys"),
        ({"tile": True}, "a tile of True keys; give a number of keys"),
        ({"order": "back"}, "the order of tiles 'back'; choose forward or reverse"),
        ({"row_sum": "none"}, "the row_sum of tiles 'none'; choose exact or quantized"),
        ({"scale": 0}, "the scale of P 0 is out of range; choose a number"),
        ({"scale": "big"}, "the scale of P 'big' is out of range; choose a number"),
        ({"scale": math.inf}, "the scale of P inf is out of range; choose a number"),
    ],
)
def test_settings_of_tiles_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Tiling(**settings)


@pytest.mark.parametrize(
    ("name", "slot", "tile", "message"),
    [
        ("mxfp8", "pv fprop_a", 48, "pv: fprop_a has blocks of 32 values of mxfp8 along the keys"),
        ("mxfp8", "pv fprop_b", 16, "a multiple of 32 keys per tile"),
        ("mxfp8", "qk dgrad_c", 48, "qk: dgrad_c has blocks of 32"),
        ("mxfp8", "qk dgrad_b", 48, "qk: dgrad_b has blocks of 32"),
        ("nvfp4:2d", "qk fprop_b", 24, "qk: fprop_b has blocks of 16 rows of nvfp4:2d"),
        ("nvfp4:2d", "pv wgrad_a", 24, "pv: wgrad_a has blocks of 16 rows"),
        ("nvfp4:eden", "pv fprop_a", 64, "groups of 128 values of nvfp4:bound255.99:eden"),
        ("fp8_e4m3:global", "qk fprop_a", 32, "whose scale comes from a global amax"),
        ("fp8_e4m3:delayed", "pv wgrad_c", 32, "whose scale comes from a delayed amax"),
    ],
)
def test_tiles_that_cut_blocks_are_refused(name, slot, tile, message):
    operation, slot = slot.split()
    formats = {"qk": GemmFormats(), "pv": GemmFormats()}
    formats[operation] = GemmFormats(**{slot: Operand(get_format(name))})
    with pytest.raises(ValueError, match=message):
        TiledAttention(*(TiledMatmul(x) for x in formats.values()), Tiling(tile))


def test_blocks_along_other_axes_do_not_limit_tiles():
    along_queries = GemmFormats(wgrad_c=Operand(get_format("mxfp8")))
    along_channels = GemmFormats(Operand(get_format("mxfp8")), Operand(get_format("mxfp8")))
    TiledAttention(TiledMatmul(along_channels), TiledMatmul(along_queries), Tiling(5))
    rotated = Operand(None, Hadamard(16))
    with pytest.raises(ValueError, match="pv: fprop_a has a Hadamard transform of 16 values"):
        TiledAttention(TiledMatmul(HIGH[0]), TiledMatmul(GemmFormats(rotated, rotated)), Tiling(8))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (None, {"scale": 256.0}, "the scale 256 of probabilities in tiles without a format"),
        ("fp8_e4m3", {"scale": 512.0}, "beyond the largest number of fp8_e4m3; choose at most 448"),
        ("hifp8", {"scale": 65536.0}, "choose at most 32768"),
        ("nvfp4", {"scale": 2689.0}, "choose at most 2688"),
    ],
)
def test_settings_of_probabilities_must_fit_their_format(name, settings, message):
    probs = Operand(None if name is None else get_format(name))
    with pytest.raises(ValueError, match=message):
        GemmFormats(fprop_a=probs, unnormalized=True, tiling=Tiling(**settings))


def test_settings_of_probabilities_are_for_unnormalized_ones_without_a_transform():
    mxfp8, tiling = Operand(get_format("mxfp8")), Tiling(row_sum="quantized")
    with pytest.raises(ValueError, match=r"the row sum quantized .* unnormalized probabilities on"):
        GemmFormats(mxfp8, tiling=tiling)
    rotated = replace(mxfp8, hadamard=Hadamard(16))
    with pytest.raises(ValueError, match=r"the row sum quantized .* with a Hadamard transform"):
        GemmFormats(rotated, rotated, unnormalized=True, tiling=tiling)


def test_whole_matrices_are_not_multiplied_in_formats_of_tiles():
    with pytest.raises(ValueError, match="for attention in tiles of 64 keys, reverse; pass them"):
        quantized_matmul(*tensors()[0][:2], GemmFormats(tiling=Tiling(64, "reverse")))


def test_operands_that_do_not_fit_are_refused():
    (query, key, value), _ = tensors()
    attention = TiledAttention(*(TiledMatmul(x) for x in HIGH), Tiling(32))
    with pytest.raises(ValueError, match="do not fit; give Q as"):
        tiled_attention(query, key[:, :40], value, attention=attention)


@pytest.mark.parametrize(
    "tiling", [Tiling(), Tiling(64, "reverse", 0.1, "quantized"), Tiling(8, scale=2.0**-30)]
)
def test_settings_are_read_from_their_text(tiling):
    assert Tiling.parse(str(tiling)) == tiling
    assert Tiling.parse(f"{tiling} more") is None


# P under an attention sink

SINK = 4  #: number of keys at the beginning that form the sink


def underflow(delta, tiling, monkeypatch):
    """Return the share of P that becomes zero, in the tile of the sink and in the other tiles.

    Scores are standard normal, those of the sink are larger by `delta`. The third result is the
    expected share if the largest score of each query is one of the sink.
    """
    scores = torch.randn(1, 2048, 256, generator=torch.Generator().manual_seed(4))
    scores[..., :SINK] += delta
    zeros = {}

    def spy(parts, *how, **settings):
        quantized = quantize_parts(parts, *how, **settings)
        assert bool((parts.values > 0).all()), "P itself does not underflow"
        zeros[len(zeros)] = quantized.values == 0
        return quantized

    monkeypatch.setattr(module, "quantize_parts", spy)
    pv = GemmFormats(Operand(get_format("fp8_e4m3")), unnormalized=True, tiling=tiling)
    attention = TiledAttention(TiledMatmul(GemmFormats()), TiledMatmul(pv), tiling)
    value = torch.ones(1, 256, 8)
    tiled_attention(torch.eye(2048)[None], scores.mT, value, attention=attention)
    tiles = [zeros[index] for index in range(len(zeros))]
    tiles = tiles[::-1] if tiling.order == "reverse" else tiles
    own = tiles[0][..., SINK:].double().mean()
    largest = scores[..., :SINK].amax(-1).double()
    expected = normal(largest - 10 * math.log(2) - math.log(tiling.scale)).mean()
    return float(own), float(torch.cat(tiles[1:], -1).double().mean()), float(expected)


def normal(x):
    """Return the normal distribution function."""
    return 0.5 * torch.special.erfc(-torch.as_tensor(x) / math.sqrt(2))


@pytest.mark.parametrize(("delta", "scale"), [(4.0, 1.0), (6.0, 1.0), (8.0, 1.0), (12.0, 256.0)])
def test_in_forward_order_the_sink_makes_p_underflow_as_published(delta, scale, monkeypatch):
    """The formula of arXiv 2606.06521 is Phi(delta + 1 - 6.93 - ln S): .528 at 6 with S = 1.

    P S rounds to zero below 2^-10 = exp(-6.93), half of the smallest E4M3 number. 1 (more precisely
    1.03) is the mean of the largest of four normal numbers, the scores of the sink beside delta.
    The formula takes this mean for the maximum itself, so that it is off by up to .04 at other
    deltas.
    """
    own, elsewhere, expected = underflow(delta, Tiling(64, "forward", scale), monkeypatch)
    assert own == pytest.approx(expected, abs=0.01)
    assert elsewhere == pytest.approx(expected, abs=0.01)
    published = float(normal(delta + 1 - 6.93 - math.log(scale)))
    assert elsewhere == pytest.approx(published, abs=0.045)
    if delta == 6.0:
        assert published == pytest.approx(0.528, abs=5e-4)
        assert elsewhere == pytest.approx(0.528, abs=0.015), "the paper measures .543"


@pytest.mark.parametrize("delta", [6.0, 9.0, 12.0])
def test_reverse_order_and_a_scale_of_256_remove_the_underflow_beside_the_sink_s_tile(
    delta, monkeypatch
):
    own, elsewhere, expected = underflow(delta, Tiling(64, "reverse", 256.0), monkeypatch)
    assert elsewhere == 0.0
    assert own == pytest.approx(expected, abs=0.01)
    _, unscaled, _ = underflow(delta, Tiling(64, "reverse", 1.0), monkeypatch)
    assert 0.0 < unscaled < 0.01
