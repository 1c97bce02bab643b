"""Tests of report.html with unusual dumps: no error, NaN, missing parts, hostile names."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

from megatron.analysis.diagnostics import find_diagnostics
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.report import write_report
from megatron.analysis.report.cards import audit, facts
from megatron.analysis.report.content import content
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize
from megatron.tensor_record import run_card_name
from tests.analysis.fake_dump import records, write_tensor
from tests.analysis.report.browser import browser, find_browser

FORMATS = ("mxfp8", "hifp8")
INPUT, WEIGHT = "qkv input", "qkv weight"


def figure_data_of(folder, formats=FORMATS):
    store = TensorStore(folder)
    return FigureData(store, compute(store, formats), tuple(formats))


def linear(**changes):
    """Yield the records of a run's inputs and weights, with a shape of 128 x 128."""
    for record, _, _ in records(run_id="r1", quant_type="bf16", layers=2, iterations=2):
        if record.layer_type == "linear" and record.tensor_name in ("input", "weight"):
            yield dataclasses.replace(
                record, shape=[128, 128], global_shape=[128, 128], dims="t h", **changes
            )


def normal(seed):
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))


def write_odd(folder):
    """Write weights and one input of ones, and other inputs, some with a NaN and a tiny value."""
    for record in linear():
        x = torch.ones(128, 128)
        if record.tensor_name == "input" and (record.layer_idx, record.iteration) != (0, 1):
            x = normal(record.counter)
        if record.tensor_name == "input" and record.layer_idx == 1:
            x[0, 3] = float("nan")
            x[7, 0] = 1e-30
        write_tensor(folder, record, x.bfloat16())
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return figure_data_of(write_odd(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def opened_browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium on the PATH (nor in CHROMIUM): the pages were NOT looked at")
    with browser(executable, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def tab(odd, opened_browser, tmp_path_factory):
    opened_browser.open(write_report(odd, tmp_path_factory.mktemp("page") / "report.html"))
    return opened_browser


def test_a_cell_without_error_says_so_and_shows_no_number(tab, odd):
    texts = tab.evaluate(
        "Array.from(document.querySelectorAll('#heatmap .heatmap-label'), (n) => n.textContent)"
    )
    last = odd.uses[(odd.uses["quantized_format"] == "mxfp8") & (odd.uses["iteration"] == 2)]
    shown = {f"{value:.1f}" for value in last["sqnr_db"] if value != float("inf")}  # the two inputs
    assert sorted(texts) == sorted([*shown, "exact", "exact"])
    hover = tab.evaluate("$('heatmap').data[0].hovertext.flat()")
    assert sorted(hover) == sorted([*(f"{text} dB" for text in shown), "exact", "exact"])
    assert tab.messages == []


def test_the_medians_over_layers_are_those_of_all_tensors(tab, odd):
    drawn = tab.evaluate("$('by-layer').data.map((t) => [t.name, t.y, t.text])")
    uses = odd.uses
    assert [name for name, _, _ in drawn] == list(FORMATS)
    for name, y, text in drawn:
        mine = uses[uses["quantized_format"] == name]
        expected = [
            float(np.median(mine.loc[mine["layer_idx"] == layer, "sqnr_db"].dropna()))
            for layer in (0, 1)
        ]
        # 3 of 4 tensors in layer 0 and 2 of 4 in layer 1 have no error: both medians are infinite
        assert expected == [np.inf, np.inf]
        assert text == ["exact", "exact"]
        assert np.isfinite(y).all()
    # one figure has triangles only, the other also numbers
    ticks = "['by-layer', 'by-place'].map((id) => $(id)._fullLayout.yaxis.showticklabels)"
    assert tab.evaluate(ticks) == [False, True]
    marks = tab.evaluate("$('by-place').data.map((t) => [t.marker.symbol, t.y])")
    for name, (symbols, y) in zip(FORMATS, marks, strict=True):
        mine = uses[(uses["quantized_format"] == name) & (uses["place"] == INPUT)]["sqnr_db"]
        assert odd.places == [INPUT, WEIGHT]
        assert symbols == ["circle", "triangle-up"]
        assert y[0] == pytest.approx(np.median(mine), rel=1e-5)
        assert y[1] > max(y[0] for _, y in marks)


def test_the_histogram_says_what_becomes_nan_and_what_it_leaves_out(tab, odd):
    table = odd.tensors
    [tensor] = table.index[
        (table["place"] == INPUT) & (table["layer_idx"] == 1) & (table["iteration"] == 2)
    ]
    tab.evaluate(f"$('format').value = 0, $('format').onchange(), open({tensor}), 1")
    bars = dict(
        tab.evaluate(
            "$('histogram').data.filter((t) => t.type === 'bar')"
            ".map((t) => [t.name, t.y.reduce((a, b) => a + b)])"
        )
    )
    x = odd.load(tensor)
    y = fake_quantize(x.clone(), "mxfp8", axis=-1)
    drawn = x.isfinite() & (x != 0) & (x.abs() > 1e-20)
    assert bars["become NaN"] == int((y.isnan() & drawn).sum()) == 31
    assert bars["become zero"] == int(((y == 0) & drawn).sum())
    assert bars["kept"] + bars["saturate"] == int((y.isfinite() & (y != 0) & drawn).sum())
    assert tab.evaluate("$('histogram-note').textContent") == (
        "Not in the histogram. Smaller values: 1 (0.006104 %; become zero in mxfp8: 1). NaN: 1."
    )
    tab.evaluate("$('format').value = 1, $('format').onchange(), 1")
    names = tab.evaluate("$('histogram').data.map((t) => t.name)")
    assert "become NaN" not in names  # hifp8 has no blocks
    assert tab.messages == []


EVIL = "<a href='https://evil.example'>x</a><img src=x onerror='document.title=1'>&lt;{}"


def write_hostile(folder):
    """Write a run without quantization and one with hostile type, names, id and card.

    Return the folder of the dump.
    """
    folder = folder / EVIL.format("folder").replace("/", "")
    folder.mkdir()
    for number, (run_id, quant_type) in enumerate(
        [("r1", "bf16"), (EVIL.format("run").replace("/", ""), EVIL.format("type"))]
    ):
        for record in linear():
            metadata = record.to_metadata() | {
                "run_id": run_id,
                "quant_type": quant_type,
                "module": record.module + EVIL.format("module"),
                "tensor_name": record.tensor_name + EVIL.format("name"),
            }
            x = normal(record.counter) * (1 + number / 8)
            path = folder / f"{number}_{record.counter}.pt"
            torch.save({"tensor": x.bfloat16(), "metadata": metadata}, path)
        card = {"run_id": run_id, "quant_type": quant_type, "device": EVIL.format("device")}
        card["quantization"] = [{"iteration": EVIL.format("i"), "matmuls": [EVIL.format("line")]}]
        card["arguments"] = {"lr": EVIL.format("lr")}
        (folder / run_card_name(run_id)).write_text(json.dumps(card))
    return folder


def test_nothing_in_a_dump_becomes_markup_in_the_browser(opened_browser, tmp_path):
    figure_data = figure_data_of(write_hostile(tmp_path))
    page = write_report(figure_data, tmp_path / "report.html")
    tab = opened_browser
    tab.requests.clear()
    tab.open(page)
    for tensor in (0, 5):
        tab.evaluate(f"open({tensor}), 1")
    assert tab.evaluate("Array.from(document.images).length") == 0
    links = tab.evaluate(
        "Array.from(document.querySelectorAll('a'),"
        " (a) => a.getAttribute('href') ?? a.getAttribute('xlink:href') ?? '#')"
    )
    assert [link for link in links if not link.startswith("#")] == []
    # the texts are shown literally
    for plot, name in (("heatmap", "module"), ("by-place", "name"), ("by-type", "type")):
        texts = f"Array.from(document.querySelectorAll('#{plot} text'), (n) => n.textContent)"
        assert any(EVIL.format(name) in text for text in tab.evaluate(texts)), (plot, name)
    shown = tab.evaluate("document.body.textContent")
    for name in ("device", "line", "lr", "i"):
        assert EVIL.format(name) in shown
    assert tab.evaluate("document.title") != "1"
    assert [url for url in tab.requests if not url.startswith(("data:", "blob:"))] == [
        page.resolve().as_uri()
    ]
    assert tab.messages == []


def write_runs(folder):
    """Write a run without quantization, and three runs that differ from it.

    Everything is NaN in the first of the three. In the second, one of the inputs of layer 1 is
    0.5 % too large, the other has a NaN, and the weights are equal. The third has iteration 1 only.
    """
    folder.mkdir()
    for quant_type in ("bf16", "mxfp4", "mxfp8", "hifp8"):
        for record in linear():
            x, is_input = normal(record.counter), record.tensor_name == "input"
            if quant_type == "mxfp4":
                x[:] = float("nan")
            if quant_type == "mxfp8" and is_input and record.layer_idx == 1:
                x *= 1.005
            if quant_type == "hifp8":
                if record.iteration == 2:
                    continue
                x *= 1.25
            changes = {"quant_type": quant_type, "run_id": quant_type, "dtype": "float32"}
            record = dataclasses.replace(record, **changes)
            write_tensor(folder, record, x)
            if quant_type == "mxfp8" and is_input and record.layer_idx == 1:
                x[5, 5] = float("nan")
            # a second tensor per kind and layer
            counter = 100 + record.counter
            write_tensor(folder, dataclasses.replace(record, micro_batch=1, counter=counter), x)
    return folder


def test_a_run_of_nan_is_named_and_not_called_equal(opened_browser, tmp_path):
    figure_data = figure_data_of(write_runs(tmp_path / "dump"), ("mxfp8",))
    rows = {tuple(row[:3]): row[3:] for row in content(figure_data)["by_type"]}
    quarter = pytest.approx(0.25, rel=1e-5)
    kinds = [(kind, layer) for kind in ("forward", "weight") for layer in (0, 1)]
    assert rows == (
        {("mxfp4", *place): ["inf", 2, 2] for place in kinds}
        | {("mxfp8", *place): [0, 0, 2] for place in kinds}
        | {("mxfp8", "forward", 1): ["inf", 1, 2]}
        | {("hifp8", *place): [quarter, 0, 2] for place in kinds}
    )
    opened_browser.open(write_report(figure_data, tmp_path / "report.html"))
    note = opened_browser.evaluate("$('types-note').textContent")
    assert "(hifp8 1, mxfp4 2, mxfp8 2)" in note
    assert "equal to the run without quantization: mxfp8, activations (L0); mxfp8, weights." in note
    assert "Not finite" in note
    assert (
        ": mxfp4, activations, 4 of 4 tensors; mxfp4, weights, 4 of 4 tensors;"
        " mxfp8, activations (L1), 1 of 4 tensors;"
    ) in note
    drawn = dict(opened_browser.evaluate("$('by-type').data.map((t) => [t.name, [t.y, t.text]])"))
    assert drawn["mxfp4, weights"][1] == ["not finite", "not finite"]
    assert drawn["hifp8, weights"][0] == [quarter, quarter]
    assert min(drawn["mxfp4, activations"][0]) > 0.25  # above all numbers
    assert drawn["mxfp8, activations"] == [
        [None, min(drawn["mxfp4, weights"][0])],
        ["0", "not finite"],
    ]
    assert "mxfp8, weights" not in drawn
    assert opened_browser.messages == []


@pytest.mark.parametrize(
    "wrong", [5, "text", [5], {"a": [1]}, [{"a": 5}], [None, [[]]], True, 1e999, -1, 10**400]
)
def test_a_card_may_hold_anything(wrong):
    known = {"quantization": [{"iteration": 1, "matmuls": ["fc1 mxfp8"]}], "seed": 7}
    assert facts(known) == [("seed", "7")]
    assert audit(known) == ["from iteration 1:", "  fc1 mxfp8"]
    for name in ("seed", "device", "versions", "git", "arguments", "quantization"):
        card = {name: wrong}
        assert all(isinstance(text, str) for _, text in facts(card))
        assert all(isinstance(line, str) for line in audit(card))
    for name in ("iteration", "share_of_matmul_flops", "matmuls"):
        lines = audit({"quantization": [{name: wrong}]})
        assert lines[0].startswith("from iteration ")
        assert all(isinstance(line, str) for line in lines)


def test_a_page_opens_a_limited_number_of_tensors_and_says_so(
    odd, opened_browser, tmp_path, monkeypatch
):
    # the function and its module have the same name
    monkeypatch.setattr(sys.modules[content.__module__], "MOST_DETAILS", 5)
    data = content(odd)
    page = write_report(odd, tmp_path / "report.html")
    assert len(data["details"]) == 5
    # the worst tensor of each format and the first of each warning come first
    for rows in data["worst"].values():
        assert str(rows[0][0]) in data["details"]
    assert all(str(warning["tensors"][0]) in data["details"] for warning in data["cautions"][:2])
    opened_browser.open(page)
    assert opened_browser.evaluate("$('opened-note').textContent") == "5 of 8 tensors can be opened"


def test_what_the_statistics_note_of_tensors_is_among_the_warnings(opened_browser, tmp_path):
    (tmp_path / "dump").mkdir()
    for record in linear():
        rank = {"world": 0, "world_size": 2, "tp": 0, "tp_size": 2}
        if record.tensor_name == "weight":
            record = dataclasses.replace(record, rank=rank, dims="n[tp] k", global_shape=[256, 128])
        elif record.iteration == 1:
            cut = {"of": [256, 128], "start": [0, 0], "step": [1, 1]}
            record = dataclasses.replace(record, slice=cut)
        write_tensor(tmp_path / "dump", record, normal(record.counter).bfloat16())
    figure_data = figure_data_of(tmp_path / "dump")
    found = [
        warning for warning in content(figure_data)["cautions"] if warning["kind"] == "partial"
    ]
    notes = figure_data.tensors["note"]
    parts = "shards of tp 1 are missing"
    [cut] = {note for note in notes if note.startswith("a slice: ")}
    assert [warning["text"] for warning in found] == [
        f"4 of 8 tensors: {parts}",
        f"2 of 8 tensors: {cut}",
    ]
    assert sorted(found[1]["tensors"]) == sorted(notes.index[notes == cut])
    opened_browser.open(write_report(figure_data, tmp_path / "report.html"))
    first = "document.querySelector('#cautions li')"
    assert parts in opened_browser.evaluate(f"{first}.textContent")
    opened_browser.evaluate(f"{first}.querySelector('button').click(), 1")
    assert opened_browser.evaluate("$('detail-facts').textContent").endswith(f"Note: {parts}")


def test_many_different_notes_are_counted(odd):
    tensors = odd.tensors.assign(note=[f"note {i}" for i in range(8)])
    diagnostics = find_diagnostics(odd.uses, tensors)
    found = [diagnostic for diagnostic in diagnostics if diagnostic.kind == "partial"]
    assert len(found) == 7
    assert str(found[-1]) == "2 of 8 tensors: 2 other notes"
    assert {tensor for diagnostic in found for tensor in diagnostic.tensors} == set(tensors.index)
