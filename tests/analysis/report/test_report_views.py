"""Tests of the report's data on training, attention and gradients, and of its links."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis import report
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.report import training
from megatron.analysis.report.attention import TOKENS, attention, moved, pooled, spread, sum_change
from megatron.analysis.report.gradients import ALL_LAYERS, gradients
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize
from megatron.tensor_record import run_card_name
from tests.analysis.fake_dump import records, values, write_dump, write_events, write_tensor

RUN = "20250908_095200_abc123"


@pytest.fixture(scope="module")
def figure_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_dump(folder, layers=2, iterations=2)
    iterations = [*range(1, 3001)]
    trained = {"event": "trained", "iterations": iterations, "grad_norm": [1.0] * 3000}
    trained["loss"] = [3.0 if i != 1777 else 30.0 for i in iterations]
    write_events(folder, RUN, trained)
    store = TensorStore(folder)
    return FigureData(store, compute(store, ["mxfp8"]), ("mxfp8",))


def test_a_long_loss_curve_keeps_what_matters(figure_data):
    (entry,) = training.training(figure_data, [RUN])
    assert len(entry["iteration"]) <= training.MOST_POINTS
    assert entry["thinned"] is True
    assert {1, 2, 1777, 3000} <= set(entry["iteration"]), "the ends, the tensors and the spike"
    assert max(entry["loss"]) == 30.0
    assert entry["collected"] == [1, 2]
    assert entry["notes"] == [
        "How the run ended: no end in its run card: the run was killed or is in progress."
    ]


def test_events_are_told_in_words():
    def event(name, **fields):
        return {"event": name, **fields}

    jump = "loss nan and gradient norm 812, 120 times the level before at iteration 9"
    found = training.notes(
        [
            event("trained", iterations=[1], loss=[1.0], grad_norm=[1.0]),
            event("kept", why=jump, iterations=[7, 8, 9, 12]),
            event("kept", why=jump, iterations=[7, 8, 9, 12]),
            event("kept", why="ValueError: lost", iterations=[]),
            event("let_go", why="SIGTERM", iterations=[3]),
            event("switched", to="on", iteration=4),
            event("unknown"),
            event(["kept"], why=3),
            event("kept", why={"a": 1}, iterations="no list"),
        ]
    )
    assert found == [
        "The ring was written: at iteration 9, the loss was nan and the gradient norm was 812, "
        "120 times its level before. The dump has iterations 7 to 9 and 12. (2 ranks)",
        "The ring could not be written: ValueError: lost.",
        "The ring of iteration 3 was discarded: SIGTERM.",
        "The flag file switched the collection on at iteration 4.",
        "The ring could not be written: {'a': 1}.",
    ]


def decoded(text, heads, side):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(heads, side, side).astype(float)


def test_attention_equals_a_naive_recomputation(figure_data):
    found = attention(figure_data)
    assert (found["tokens"], found["recomputed"], len(found["layers"])) == (64, True, 2)
    places = figure_data.tensors.set_index(["iteration", "layer_idx", "tensor_name"])
    table = places["path"].to_dict()
    for layer, entry in enumerate(found["layers"]):
        loaded = [
            torch.load(table[2, layer, name], weights_only=True)["tensor"].float()
            for name in ("query", "key")
        ]
        quantized = [fake_quantize(x, "mxfp8") for x in loaded]
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        probs = []
        for query, key in (loaded, quantized):
            scores = torch.einsum("shd,td->hst", query[:, 0], key[:, 0, 0]) / math.sqrt(32)
            probs.append(scores.masked_fill(hidden, -math.inf).softmax(-1))
        change = (fake_quantize(probs[1], "mxfp8") - probs[0]).double().numpy()
        in_format = entry["formats"]["mxfp8"]
        gained, total = np.zeros(2), np.zeros(2)
        for head, query, key in np.argwhere(change != 0):
            gained[head] += max(change[head, query, key], 0) / 64
            total[head] += change[head, query, key] / 64
        assert in_format["moved"] == pytest.approx(gained.tolist(), rel=1e-3)
        assert in_format["sum_change"] == pytest.approx(total.tolist(), rel=1e-3, abs=1e-6)
        visible = np.arange(1, 65)[:, None]
        ratio = np.clip(probs[0].double().numpy() * visible, 1 / 32, 32)
        codes = decoded(entry["maps"], 2, 64)
        assert (codes == 0).all(0).tolist() == hidden.tolist()
        shown = 2.0 ** ((codes - 1) / 254 * 10 - 5)
        np.testing.assert_allclose(shown[:, ~hidden.numpy()], ratio[:, ~hidden.numpy()], rtol=0.015)
        codes = (decoded(in_format["maps"], 2, 64) - 128) / 127
        shown = np.sign(codes) * codes**2 * in_format["most"]
        close = np.abs(shown - change * visible) < 0.01 * in_format["most"]
        assert close[:, ~hidden.numpy()].all()


@pytest.mark.parametrize("collected", ["query and key", "attention_probs"])
def test_attention_of_a_long_sequence_shows_its_beginning(tmp_path, collected):
    long, generator = TOKENS + 90, torch.Generator().manual_seed(7)
    hidden = torch.ones(long, long, dtype=torch.bool).triu(1)
    shapes = {"query": (long, 2, 2, 32), "key": (long, 2, 1, 32), "value": (long, 2, 1, 32)}
    made = {}
    for record, _, _ in records(run_id=RUN, quant_type="mxfp8", layers=1):
        if record.tensor_name not in shapes:
            continue
        shape = shapes[record.tensor_name]
        fields = record.to_metadata() | {"shape": [*shape], "global_shape": [*shape]}
        made[record.tensor_name] = values(shape, 0.3, generator)
        if collected == "query and key" or record.tensor_name == "value":
            write_tensor(tmp_path, type(record).from_metadata(fields), made[record.tensor_name])
        last = fields
    scores = torch.einsum("sbhd,tbd->bhst", made["query"].float(), made["key"][:, :, 0].float())
    probs = (scores / math.sqrt(32)).masked_fill(hidden, -math.inf).softmax(-1)
    if collected == "attention_probs":
        fields = {"tensor_name": "attention_probs", "counter": 90, "dims": "b n s t"}
        fields |= {"shape": [*probs.shape], "global_shape": [*probs.shape], "dtype": "float32"}
        write_tensor(tmp_path, type(record).from_metadata(last | fields), probs)
    store = TensorStore(tmp_path)
    found = attention(FigureData(store, compute(store, ["mxfp8"]), ("mxfp8",)))
    assert found["recomputed"] is (collected == "query and key")
    assert found["tokens"] == TOKENS
    (entry,) = found["layers"]
    side = entry["side"]
    step = TOKENS // side
    # causal attention: the first queries see none of the keys that are left out
    ratio = probs[0, :, :TOKENS, :TOKENS].double().numpy() * np.arange(1, TOKENS + 1)[:, None]
    visible = ~hidden[:TOKENS, :TOKENS].numpy()
    pixels = (ratio * visible).reshape(2, side, step, side, step).sum((2, 4))
    pixels /= np.maximum(visible.reshape(side, step, side, step).sum((1, 3)), 1)
    shown = np.tril(np.ones((side, side), bool))
    codes = decoded(entry["maps"], 2, side)
    assert ((codes > 0) == shown).all()
    expected = np.clip(pixels, 1 / 32, 32)[:, shown]
    np.testing.assert_allclose(2.0 ** ((codes[:, shown] - 1) / 254 * 10 - 5), expected, rtol=0.03)


@pytest.mark.parametrize("card", [None, {"arguments": {"seed": 1}}])
def test_a_probability_that_underflows_is_visible_if_the_mask_is_known(tmp_path, card):
    probs = torch.zeros(1, 2, 64, 64)
    probs[..., 0] = 1  # every query attends to key 0 alone
    query = next(
        record
        for record, _, _ in records(run_id=RUN, quant_type="mxfp8", layers=1)
        if record.tensor_name == "query"
    )
    fields = {"tensor_name": "attention_probs", "dims": "b n s t", "dtype": "float32"}
    fields |= {"shape": [*probs.shape], "global_shape": [*probs.shape]}
    write_tensor(tmp_path, type(query).from_metadata(query.to_metadata() | fields), probs)
    if card is not None:
        (tmp_path / run_card_name(RUN)).write_text(json.dumps(card))
    store = TensorStore(tmp_path)
    (entry,) = attention(FigureData(store, compute(store, ["mxfp8"]), ("mxfp8",)))["layers"]
    assert entry["mask_known"] is (card is not None)
    codes = decoded(entry["maps"], 2, 64)
    shown = 2.0 ** ((codes - 1) / 254 * 10 - 5)
    if card is None:
        assert (codes[:, :, 1:] == 0).all()
        np.testing.assert_allclose(shown[:, :, 0], 1, rtol=0.02)
    else:
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1).tolist()
        assert (codes == 0).all(0).tolist() == hidden
        expected = np.clip(np.arange(1, 65), 0, 32)
        np.testing.assert_allclose(shown[:, :, 0], [expected] * 2, rtol=0.02)
        np.testing.assert_allclose(shown[:, 63, 1:], 1 / 32, rtol=0.02)


def test_a_pixel_is_the_mean_of_its_visible_values():
    values = np.arange(50.0).reshape(2, 5, 5)
    visible = np.tril(np.ones((2, 5, 5), bool))
    found = pooled(values, visible, 2)
    assert found[0, 0, 0] == np.mean([0, 5, 6])  # rows and columns 0 and 1
    assert np.isnan(found[0, 0, 1])
    assert found[1, 1, 0] == np.mean([35, 36, 40, 41, 45, 46])
    assert moved(np.array([[[0.25, -0.25], [0.0, 0.0]]])).tolist() == [0.125]
    # all probabilities shrink by a tenth, and none moves
    shrunk = np.full((1, 1, 100), -0.001)
    assert moved(shrunk).tolist() == [0]
    assert sum_change(shrunk) == pytest.approx([-0.1])
    # a fifth arrives at the first key, and half of it comes from the second
    uneven = np.array([[[0.2, -0.1]]])
    assert (moved(uneven).tolist(), sum_change(uneven).tolist()) == ([0.2], [0.1])
    assert spread(3, 8) == [0, 1, 2]
    assert spread(100, 4) == [0, 33, 66, 99]
    assert TOKENS >= 64


def test_many_gradients_are_medians_over_all_layers(figure_data, monkeypatch):
    rows = gradients(figure_data, [RUN])
    assert {row[2] for row in rows} == {0, 1}
    monkeypatch.setattr("megatron.analysis.report.gradients.MOST_ROWS", 3)
    fewer = gradients(figure_data, [RUN])
    assert {row[2] for row in fewer} == {ALL_LAYERS}
    by_place = pd.DataFrame(rows).groupby([1, 3])[[4, 5]].agg({4: "median", 5: "max"})
    for _, iteration, _, place, rms, amax, *_ in fewer:
        assert [rms, amax] == pytest.approx(by_place.loc[(iteration, place)].tolist(), rel=1e-4)


def test_figures_beside_the_report_are_linked(tmp_path):
    page = report.render({"title": "t"})
    path = tmp_path / "report.html"
    path.write_text(page)
    names = [
        "heatmaps/amax.png",
        "quick_analysis.png",
        "a/b.txt",
        "../x.png",
        'a".png',
        "a/b/c.png",
    ]
    report.link_figures(path, names)
    report.link_figures(path, ["heatmaps/amax.png", "heatmaps/rms.svg", *names])
    listed = path.read_text().partition('id="figures">')[2].partition("</script>")[0]
    assert json.loads(listed) == ["heatmaps/amax.png", "heatmaps/rms.svg", "quick_analysis.png"]
    assert path.read_text().replace(listed, "[]") == page
