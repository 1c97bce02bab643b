"""Tests of attention_maps/: the layers that are drawn, their numbers, and the memory used."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from megatron.analysis.figures import attention_maps
from megatron.analysis.figures.attention_probabilities import layers_of, recomputed
from megatron.analysis.figures.figure_data import FigureData, NothingToDrawError
from megatron.analysis.figures.scale_maps import largest_finite, scale_map
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from megatron.analysis.verification.recorded_formats import Softmax
from megatron.fake_quant import fake_quantize
from megatron.tensor_record import run_card_name
from tests.analysis.fake_dump import records, write_tensor

FORMATS = ("mxfp8", "hifp8")
HEADS, TOKENS = 2, 32


def probabilities(seed, *, heads=HEADS, tokens=TOKENS, sequences=1):
    shape = (sequences, heads, tokens, tokens)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(torch.bfloat16)


def record_of(layer, **changes):
    found = records(run_id="r1", quant_type="mxfp8", layers=layer + 1)
    query = [record for record, _, _ in found if record.tensor_name == "query"][layer]
    shape = [1, HEADS, TOKENS, TOKENS]
    given = {"shape": shape, "global_shape": shape, "dims": "b a[tp] s k", "format": None}
    changes = {"tensor_name": "attention_probs", "counter": 1000 + layer} | given | changes
    return dataclasses.replace(query, **changes)


def write(folder, layer, probs=None, **changes):
    probs = probabilities(layer) if probs is None else probs
    return write_tensor(folder, record_of(layer, **changes), probs)


def drawn(folder):
    """Return the figures by name; the value is the error if a figure cannot be drawn."""
    store = TensorStore(folder)
    found = {}
    for name, make in attention_maps.draw(FigureData(store, compute(store, FORMATS), FORMATS)):
        try:
            found[name] = make()
        except NothingToDrawError as reason:
            found[name] = reason
    return found


#: Shape and ranks of a tensor of which only two of four shards exist.
PART = {"global_shape": [1, 4 * HEADS, TOKENS, TOKENS]}
RANKS = [{"world": rank, "world_size": 4, "tp": rank, "tp_size": 4} for rank in (0, 1)]


def test_a_layer_that_cannot_be_put_together_is_left_out_with_the_reason(tmp_path):
    write(tmp_path, 0)
    for rank in RANKS:
        write(tmp_path, 1, **PART, rank=rank)
    found = drawn(tmp_path)
    assert list(found) == ["probabilities_L0", "probabilities_L1", "head_error"]
    assert isinstance(found["probabilities_L1"], NothingToDrawError)
    assert "missing" in str(found["probabilities_L1"])
    panel = found["head_error"].axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["L0"]


def test_where_no_layer_can_be_put_together_the_reason_is_all(tmp_path):
    for rank in RANKS:
        write(tmp_path, 0, **PART, rank=rank)
    with pytest.raises(NothingToDrawError, match="missing"):
        drawn(tmp_path)


def test_a_tensor_without_values_is_left_out(tmp_path):
    write(tmp_path, 0)
    shape = [1, HEADS, 0, 0]
    write(tmp_path, 1, torch.zeros(shape, dtype=torch.bfloat16), shape=shape, global_shape=shape)
    found = drawn(tmp_path)
    assert "have no values" in str(found["probabilities_L1"])
    assert "head_error" in found


def test_a_dump_that_knows_no_run_is_drawn(tmp_path):
    torch.save(probabilities(0), tmp_path / record_of(0).filename)
    assert list(drawn(tmp_path)) == ["probabilities_L0", "head_error"]


def test_it_is_the_last_iteration_of_the_newest_run(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    # the older run has more layers and iterations, so that it comes last in the table
    write(tmp_path / "new", 0, run_id="r2", iteration=1, timestamp="20250909_000000")
    write(tmp_path / "new", 0, run_id="r2", iteration=2, timestamp="20250909_000000", counter=3)
    for layer in (0, 1):
        write(tmp_path / "old", layer, run_id="r3", iteration=7)
    store = TensorStore(tmp_path)
    layers = layers_of(FigureData(store, compute(store, FORMATS), FORMATS))
    found = [(each.row.run_id, each.row.iteration, each.row.layer_idx) for each in layers]
    assert found == [("r2", 2, 0)]


def test_one_layer_is_in_memory_at_a_time_and_few_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_maps, "LAYERS", 2)
    for layer in range(5):
        write(tmp_path, layer)
    store = TensorStore(tmp_path)
    figure_data = FigureData(store, compute(store, FORMATS), FORMATS)
    loaded, load = [], figure_data.load
    monkeypatch.setattr(figure_data, "load", lambda tensor: loaded.append(tensor) or load(tensor))
    names = []
    for name, _ in attention_maps.draw(figure_data):
        names.append((name, len(loaded)))
    # each figure is drawn before the next layer is read
    assert names == [("probabilities_L0", 1), ("probabilities_L3", 4), ("head_error", 5)]


@pytest.mark.parametrize(
    "fmt",
    [
        *("mxfp8", "mxfp4:2d", "nvfp4", "nvfp4:2d", "hifp4", "hifp8", "fp8_e4m3", "fp16"),
        *("nv:e2m1:row:e4m3", "nv:e2m1:column:e4m3", "mx:e2m1:tensor:rceil"),
    ],
)
def test_the_error_in_chunks_is_that_of_the_whole_tensor(fmt, monkeypatch):
    probs = probabilities(0, heads=3, tokens=80, sequences=2).float()
    probs[1, 2, 70, 3] = 1.5  # the value that sets the tensor's scale is in the last chunk
    monkeypatch.setattr(attention_maps, "CHUNK", 16 * 80)
    sizes = []

    def spy(x, *arguments, **keywords):
        sizes.append(len(x))
        return fake_quantize(x, *arguments, **keywords)

    monkeypatch.setattr(attention_maps, "fake_quantize", spy)
    found = attention_maps.head_errors(probs, fmt)
    # There are several chunks per head and sequence, unless a block spans all rows.
    assert len(sizes) > 6 or {"row", "column", "tensor"} & set(fmt.split(":"))
    assert max(sizes) <= 81
    whole = fake_quantize(probs, fmt, axis=-1).double()
    for head, sqnr in enumerate(found):
        x = probs[:, head].double()
        noise = (whole[:, head] - x).square().sum()
        assert sqnr == pytest.approx(float(10 * torch.log10(x.square().sum() / noise)), rel=1e-9)


def test_heads_without_error_or_values_and_with_nan():
    probs = torch.zeros(1, 3, 4, 32)
    probs[0, 0] = 0.5
    probs[0, 2] = 0.3
    probs[0, 2, 0, 0] = math.nan
    exact, empty, spoilt = attention_maps.head_errors(probs, "mxfp8")
    assert exact == math.inf
    assert math.isnan(empty)
    y = fake_quantize(torch.tensor([0.3] * 32), "mxfp8", axis=-1)[0].item()
    assert spoilt == pytest.approx(20 * math.log10(0.3 / abs(0.3 - y)), rel=1e-4)


def test_entropy_in_chunks(monkeypatch):
    monkeypatch.setattr(attention_maps, "CHUNK", 100)
    probs = probabilities(0)[0, 0]
    p = probs.double()
    expected = -(p * p.clamp(min=1e-300).log2()).sum(-1).mean()
    assert attention_maps.entropy(probs) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("largest", [7.0, -7.0])
def test_the_largest_magnitude_is_found_in_chunks(largest, monkeypatch):
    monkeypatch.setattr("megatron.analysis.figures.scale_maps.CHUNK", 8)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[50, 1], x[0, 0], x[63, 2] = largest, math.inf, math.nan
    assert largest_finite(x) == 7.0
    assert largest_finite(torch.tensor([math.nan])) == 0.0
    assert largest_finite(torch.zeros(0)) == 0.0
    # the scale comes from the largest value, which may be in a row that is not drawn
    tall = torch.ones(400, 16)
    tall[-1] = 1000.0
    assert scale_map(tall, "nvfp4").iloc[0, 0] < scale_map(tall[:-1], "nvfp4").iloc[0, 0]


def write_pass(folder, layer=0, *, heads=4, groups=2, dim=32):
    """Write a query and a key of one pass, and return them."""
    generator = torch.Generator().manual_seed(layer)
    tensors = {}
    for record, _, _ in records(run_id="r1", quant_type="mxfp8", layers=layer + 1):
        if record.tensor_name not in ("query", "key") or record.layer_idx != layer:
            continue
        shape = [TOKENS, 2, heads if record.tensor_name == "query" else groups, dim]
        x = torch.randn(shape, generator=generator).bfloat16()
        given = {"shape": shape, "global_shape": shape}
        write_tensor(folder, dataclasses.replace(record, **given), x)
        tensors[record.tensor_name] = x
    return tensors["query"], tensors["key"]


def softmax_in_float64(query, key):
    """Return causal attention probabilities [b, heads, s, s] computed in float64."""
    q = query.double().permute(1, 2, 0, 3)
    k = key.double().permute(1, 2, 0, 3).repeat_interleave(q.shape[1] // key.shape[2], dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def test_probabilities_that_were_not_collected_are_recomputed(tmp_path):
    query, key = write_pass(tmp_path)
    write_pass(tmp_path, 1)
    found = drawn(tmp_path)
    assert list(found) == ["probabilities_L0", "probabilities_L1", "head_error"]
    store = TensorStore(tmp_path)
    data = FigureData(store, compute(store, FORMATS), FORMATS)
    probs = layers_of(data)[0].probabilities(data)
    torch.testing.assert_close(probs.double(), softmax_in_float64(query, key), rtol=0.02, atol=1e-4)
    image = found["probabilities_L0"].axes[1].images[0].get_array()
    expected = softmax_in_float64(query, key)[0, 1] * torch.arange(1, TOKENS + 1)[:, None]
    assert image.mask.tolist() == (expected == 0).tolist()
    clipped = expected.clamp(1 / 32, 32).numpy()[~image.mask]
    assert image.compressed() == pytest.approx(clipped, rel=0.02)


def sink(dim=16, length=32, dtype=torch.float16):
    """Return a query and a key with which every query attends to key 0 alone.

    The other scores are 22 lower, and exp(-22) is below the smallest number of float16.
    """
    query, key = torch.zeros(length, 1, 1, dim), torch.zeros(length, 1, 1, dim)
    query[..., 0], key[0, ..., 0] = 8.0, 11.0
    return query.to(dtype), key.to(dtype)


def arguments_card(folder, **arguments):
    """Write a run card with the given arguments of the training run."""
    card = {"run_id": "r1", "arguments": {"seed": 1, **arguments}}
    (folder / run_card_name("r1")).write_text(json.dumps(card))


def test_probabilities_that_underflow_are_visible(tmp_path):
    query, key = sink()
    for record, _, _ in records(run_id="r1", quant_type="mxfp8", layers=1):
        if record.tensor_name in ("query", "key"):
            x = query if record.tensor_name == "query" else key
            shape = list(x.shape)
            given = {"shape": shape, "global_shape": shape, "dtype": "float16"}
            write_tensor(tmp_path, dataclasses.replace(record, **given), x)
    image = drawn(tmp_path)["probabilities_L0"].axes[0].images[0].get_array()
    assert image.mask.tolist() == torch.ones(32, 32).triu(1).bool().tolist()
    assert image[31, 0] == 32  # 32 keys are visible, and the query attends to one of them
    assert image[31, 1:].tolist() == [1 / 32] * 31


def underflowing():
    """Return probabilities with a window of 4 keys, the last of which has a probability of 0."""
    probs = torch.zeros(1, HEADS, TOKENS, TOKENS)
    for query in range(TOKENS):
        probs[..., query, max(query - 3, 0) : query] = 1.0 / max(min(query, 3), 1)
    probs[..., 0, 0] = 1
    return probs.bfloat16()


@pytest.mark.parametrize(
    ("arguments", "before"),
    [
        ({"window_size": [3, 0]}, 3),
        ({"window_size": [3, 0], "attention_dropout": 0.1}, 3),
        ({}, TOKENS),
        (None, None),  # there is no run card
        ({"reset_attention_mask": True}, None),
        ({"window_size": [1, 0]}, None),  # hides probabilities above zero
    ],
)
def test_the_mask_of_saved_probabilities_is_that_of_the_run_card(tmp_path, arguments, before):
    write(tmp_path, 0, underflowing())
    if arguments is not None:
        arguments_card(tmp_path, **arguments)
    figure = drawn(tmp_path)["probabilities_L0"]
    image = figure.axes[0].images[0].get_array()
    texts = " ".join(text.get_text() for text in figure.texts)
    if before is None:
        assert "gray: zero, because the mask is not known" in texts
        assert image.mask.tolist() == (underflowing()[0, 0] == 0).tolist()
        return
    assert "gray: masked" in texts
    behind = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    visible = (behind >= 0) & (behind <= before)
    assert image.mask.tolist() == (~visible).tolist()
    seen = min(20, before) + 1
    assert image[20, 19] == pytest.approx(seen / 3, rel=5e-3)
    assert image[20, 20] == 1 / 32  # zero, the end of the color scale


def test_only_some_sequences_and_heads_are_recomputed_if_there_are_many(monkeypatch, tmp_path):
    query, key = write_pass(tmp_path)
    whole = recomputed(query, key, Softmax())
    name = "megatron.analysis.figures.attention_probabilities.MOST"
    monkeypatch.setattr(name, 4 * TOKENS * TOKENS)
    assert torch.equal(recomputed(query, key, Softmax()), whole[:1])
    monkeypatch.setattr(name, 3 * TOKENS * TOKENS)
    assert torch.equal(recomputed(query, key, Softmax()), whole[:1, :3])


def test_a_dump_without_keys_says_what_to_collect(tmp_path):
    for record, shape, _ in records(run_id="r1", quant_type="mxfp8", layers=1):
        if record.tensor_name == "query":
            write_tensor(tmp_path, record, torch.ones(shape, dtype=torch.bfloat16))
    with pytest.raises(NothingToDrawError, match="--collect-tensors all"):
        drawn(tmp_path)


def test_query_and_key_that_do_not_fit_together_are_refused():
    query = torch.zeros(8, 1, 4, 16)
    with pytest.raises(NothingToDrawError, match=r"\[8, 1, 4, 16\] and \[8, 1, 3, 16\] do not fit"):
        recomputed(query, torch.zeros(8, 1, 3, 16), Softmax())
    with pytest.raises(NothingToDrawError, match="probabilities cannot be computed"):
        recomputed(torch.zeros(8, 16), query, Softmax())
