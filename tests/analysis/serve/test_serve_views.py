"""Tests of the views: what the callbacks return, called in this process."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis.serve import charts
from megatron.analysis.serve.address import Address
from megatron.analysis.serve.application import _Views, create, duration
from megatron.analysis.serve.charts import plain
from megatron.analysis.serve.contents import NotShownError
from megatron.analysis.serve.pages import tensor_page, training_page
from megatron.analysis.serve.pages.parts import dcc, html
from megatron.analysis.serve.pages.static import Static, static
from megatron.analysis.serve.panels import magnitudes, pictures
from megatron.analysis.serve.pixels import Region, reduce
from megatron.analysis.serve.statistics import BY_NAME
from megatron.analysis.serve.training import Series
from megatron.fake_quant import fake_quantize
from megatron.tensor_record import run_card_name
from tests.analysis.fake_dump import RUNS, records, values, write_dump, write_tensor
from tests.analysis.serve.conftest import opened_explorer, wait_for
from tests.analysis.serve.panels import operands, panel, shown_text


def find(explorer, name, run="mxfp8"):
    catalog = explorer.catalog
    return next(
        tensor
        for tensor in range(len(catalog))
        if catalog.field(tensor, "tensor_name") == name
        and catalog.field(tensor, "quant_type") == run
    )


def of_tensor(explorer, name, more=""):
    catalog = explorer.catalog
    return f"?v=tensor&t={catalog.id_of(find(explorer, name))}&format=mxfp4{more}"


def test_plain_parts_are_one_component_with_literal_texts():
    cells = [
        html.Tr([html.Td("<b>x</b>"), html.Td(html.A("y", href="?v=map", **{"data-view": ""}))])
    ]
    found = static([html.Div([html.H2("t"), html.Table(cells)]), html.Div([dcc.Graph(), "z"])])
    rows = [
        "tr",
        {},
        ["td", {}, "<b>x</b>"],
        ["td", {}, ["a", {"href": "?v=map", "data-view": ""}, "y"]],
    ]
    assert isinstance(found[0], Static)
    assert found[0].tree == ["div", {}, ["h2", {}, "t"], ["table", {}, rows]]
    assert isinstance(found[1].children[0], dcc.Graph)
    assert found[1].children[1] == "z"
    slot = html.Div(html.P("kept"), id={"type": "panel", "name": "x"})
    assert static(slot) is slot  # a callback replaces its children
    assert isinstance(slot.children, Static)


def test_every_view_names_its_panels(explorer):
    views = _Views(explorer)
    for search, names in (
        ("", {"controls", "verdict", "map", "worst"}),
        ("?v=training", {"numbers", "curves", "events"}),
        ("?v=runs", set()),
        (of_tensor(explorer, "query"), {"heading", "facts", *tensor_page.TITLES}),
        (of_tensor(explorer, "weight"), {"heading", "facts", *tensor_page.TITLES} - {"attention"}),
    ):
        page, key, links, _ = views.show(search, None, None, [], [])
        assert set(re.findall(r'"type": "panel", "name": "(\w+)"', shown_text(page))) == names
        assert views.show(search, None, key, [], [])[0] is not page
        assert "Training" in shown_text(links)


def test_only_panels_whose_part_of_the_address_changed_are_drawn_again(explorer):
    views = _Views(explorer)
    search = of_tensor(explorer, "query")
    _, key, _, _ = views.show(search, None, None, [], [])
    names = ["facts", "histogram", "image", "attention"]
    ids = [{"type": "panel-address", "name": name} for name in names]
    stored = [views._data(name, explorer.resolved(search)) for name in names]
    page, _, _, changed = views.show(f"{search}&z=0-10-0-10", None, key, ids, stored)
    assert page is views.show(search, None, key, [], [])[0]  # no_update
    assert [isinstance(data, dict) for data in changed] == [False, False, True, False]


def test_the_map_shows_the_numbers_and_a_cell_opens_a_tensor(explorer):
    text = panel(explorer, "map", "?run=" + RUNS["mxfp8"] + "&format=mxfp4&it=1")
    assert "qkv input" in text
    found = _Views(explorer).open_cell({"grid": "map", "row": 0, "column": 1}, "?format=mxfp4")
    catalog = explorer.catalog
    tensor = catalog.find(re.search(r"[?&]t=(\w+)", found)[1])
    assert catalog.name(tensor) == "L0 qkv weight"
    for pick in (None, {}, {"row": 9, "column": 9}, {"row": -1, "column": 0}, {"row": "x"}):
        assert not isinstance(_Views(explorer).open_cell(pick, ""), str)


def test_columns_that_are_iterations_have_a_title(explorer):
    searches = [explorer.resolved(f"?by={by}").search() for by in ("tensor", "iteration")]
    tensors, iterations = (panel(explorer, "map", search) for search in searches)
    title = '"text": "iteration"'
    assert (title in tensors, title in iterations) == (False, True)


def test_two_runs_are_shown_side_by_side(explorer):
    search = f"?run={RUNS['mxfp8']}&with={RUNS['bf16']}&it=1&format=mxfp8"
    text = panel(explorer, "map", search)
    assert f"bf16, {RUNS['bf16']} minus mxfp8" in text
    assert text.count('"type": "heatmap"') == 3


@pytest.mark.parametrize("name", ["facts", *tensor_page.TITLES])
def test_each_panel_shows_each_tensor_or_says_why_not(explorer, name):
    for tensor_name in ("query", "weight", "grad_output"):
        other = explorer.catalog.id_of(find(explorer, tensor_name, "bf16"))
        for more in ("", f"&beside={other}&img=difference"):
            text = panel(explorer, name, of_tensor(explorer, tensor_name, more))
            assert "cannot be shown" not in text
            if name != "attention" or tensor_name == "query":
                assert "Not shown" not in text


@pytest.mark.parametrize("tensor_name", ["input", "weight"])
def test_rows_of_a_weight_are_not_called_tokens(explorer, tensor_name):
    search = of_tensor(explorer, tensor_name)
    text = "".join(panel(explorer, name, search) for name in ("image", "tokens", "heading"))
    axis_of_rows = "row (output unit)" if tensor_name == "weight" else "token"
    assert text.count(f'"text": "{axis_of_rows}"') == 2
    assert ("Rows" in text, "Tokens" in text) == (tensor_name == "weight", tensor_name != "weight")


def test_the_image_has_the_values_of_largest_magnitude(explorer):
    x = torch.zeros(700, 1000)
    x[333, 777], x[10, 3], x[699, 999] = -5.0, 7.0, -9.0
    picture = reduce(x, Region.within(700, 1000), width=100, height=70)
    assert picture.step == (10, 10)
    assert picture.values.shape == (70, 100)
    assert (picture.values[33, 77], picture.values[1, 0], picture.values[69, 99]) == (-5, 7, -9)
    part = reduce(x, Region.within(700, 1000, (330, 340, 770, 780)))
    assert part.values[3, 7] == -5
    assert Region.within(700, 1000, (800, 900, 0, 10)) == Region(0, 700, 0, 1000)
    odd = torch.randn(101, 103)
    picture = reduce(odd, Region.within(101, 103), width=20, height=20)
    assert abs(picture.values).max() == pytest.approx(float(odd.abs().max()))


def test_a_format_is_applied_as_the_gemm_does(explorer):
    catalog, contents = explorer.catalog, explorer.contents
    weight = find(explorer, "weight")
    whole = contents.tensor(catalog, weight)
    for axis, dim in (("row", 1), ("column", 0)):
        found = contents.quantized(catalog, weight, "mxfp4", axis)
        assert torch.equal(found, fake_quantize(whole, "mxfp4", axis=dim))


def test_attention_and_its_change_are_those_of_the_definition(explorer):
    catalog, contents = explorer.catalog, explorer.contents
    query, key = (contents.tensor(catalog, find(explorer, name)) for name in ("query", "key"))
    found = contents.attention(catalog, find(explorer, "query"), "mxfp4", 1, 1)

    def attend(q, k):
        scores = (q[:, 1, 1] @ k[:, 1, 0].t()).float() / 32**0.5
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    exact = attend(query, key)
    torch.testing.assert_close(found.probabilities, exact, atol=5e-3, rtol=2e-2)
    rounded = attend(fake_quantize(query, "mxfp4"), fake_quantize(key, "mxfp4"))
    torch.testing.assert_close(found.change, rounded - exact, atol=1e-2, rtol=0)
    assert (found.heads, found.sequences) == (2, 2)


def test_a_probability_that_underflows_is_not_masked(explorer, monkeypatch):
    contents, tensor = explorer.contents, find(explorer, "query")
    read = contents.tensor
    monkeypatch.setattr(contents, "tensor", lambda catalog, number: 100 * read(catalog, number))
    found = contents.attention(explorer.catalog, tensor, "", 0, 0)
    assert torch.equal(found.visible, torch.ones(64, 64, dtype=torch.bool).tril())
    assert (found.probabilities[found.visible] == 0).any()
    address = Address(view="tensor", tensor=explorer.catalog.id_of(tensor))
    figure = pictures.attention(explorer.subject(address)).figure
    drawn = np.frombuffer(base64.b64decode(figure["data"][0]["z"]["bdata"]), "<f4")
    assert (np.isfinite(drawn) == found.visible.numpy().ravel()).all()


@pytest.mark.parametrize("card", [None, {"arguments": {"seed": 1}}])
def test_the_mask_of_saved_probabilities_is_that_of_the_run_card(tmp_path, card):
    record = next(r for r, _, _ in records(run_id="r", quant_type="bf16") if r.dims == "s b n d")
    probs = torch.zeros(1, 2, 64, 64)
    probs[..., 0] = 1  # every query attends to key 0 alone
    shape = list(probs.shape)
    fields = {"tensor_name": "attention_probs", "dims": "b n s t", "dtype": "float32"}
    record = dataclasses.replace(record, **fields, shape=shape, global_shape=shape)
    write_tensor(tmp_path, record, probs)
    if card is not None:
        (tmp_path / run_card_name("r")).write_text(json.dumps(card))
    explorer = opened_explorer(tmp_path)
    try:
        found = explorer.contents.attention(explorer.catalog, 0, "", 0, 0)
    finally:
        explorer.close()
    expected = probs[0, 0] > 0 if card is None else torch.ones(64, 64, dtype=torch.bool).tril()
    assert torch.equal(found.visible, expected)
    assert ("mask is not known" in found.how) == (card is None)


def test_numbers_are_downloaded_as_csv(explorer):
    client = create(explorer).server.test_client()
    answer = client.get("/csv?format=mxfp4&panel=map")
    table = pd.read_csv(io.StringIO(answer.text))
    assert len(table) == 7
    assert answer.headers["Content-Disposition"] == "attachment; filename=map.csv"
    for name in ("facts", *tensor_page.TITLES):
        answer = client.get(f"/csv{of_tensor(explorer, 'query')}&panel={name}")
        assert len(pd.read_csv(io.StringIO(answer.text))), name
    assert client.get("/csv?panel=../../x").status_code == 404
    assert client.get(f"/csv?v=tensor&t={'0' * 16}&panel=facts").status_code == 404


@pytest.mark.parametrize(("last", "dtick"), [(2, 1), (300, None)])
def test_the_iterations_of_a_short_run_are_whole_numbers(last, dtick):
    series = Series("run")
    series.values = {"lm loss": {1: 7.5, last: 7.0}}
    figure = training_page._curve([series], "lm loss", {"run": "#000000"})
    assert figure["layout"]["xaxis"].get("dtick") == dtick
    assert figure["layout"]["yaxis"]["exponentformat"] == "power"  # not 800µ for 0.0008


def test_equal_curves_of_several_files_are_all_visible():
    several = [Series(name, {"lm loss": {1: 7.5, 2: 7.0}}) for name in ("events", "log", "index")]
    figure = training_page._curve(several, "lm loss", {series.label: "" for series in several})
    dashes = [trace["line"]["dash"] for trace in figure["data"]]
    assert dashes[0] == "solid"
    assert len(set(dashes)) == 3


def test_a_page_names_each_fact_of_a_run_once(explorer):
    page = shown_text(_Views(explorer).show("?v=runs", None, None, [], [])[0])
    names = re.findall(r'\["tr", {}, \["td", {}, "([^"]*)"', page.rpartition("Map of this run")[2])
    assert {"end", "tensors", "collected iterations"} <= set(names)
    assert len(names) == len(set(names))


def test_a_duration_has_a_unit_that_fits():
    assert [*map(duration, (0, 89, 90, 5399, 92_520))] == ["0 s", "89 s", "2 min", "90 min", "26 h"]


def test_no_number_is_a_negative_zero():
    assert charts.number(-0.04, BY_NAME["sqnr_db"]) == "0.0"
    assert charts.number(-0.06, BY_NAME["sqnr_db"]) == "-0.1"
    assert charts.number(-0.0, BY_NAME["relative_bias"]) == "0"
    assert tensor_page._error(-0.004, share=False) == "0.00"
    assert tensor_page._error(-0.006, share=False) == "-0.01"
    assert tensor_page._error(-0.0, share=True) == "0 %"


def test_a_tensor_is_not_compared_with_itself(explorer):
    own = explorer.catalog.id_of(find(explorer, "query"))
    subject = explorer.subject(explorer.resolved(f"?v=tensor&t={own}&beside={own}"))
    assert subject.beside is None
    assert f'"value": "{own}"' not in shown_text(tensor_page._controls(explorer, subject)[-1])


def test_the_page_needs_no_other_machine(explorer):
    client = create(explorer).server.test_client()
    page = client.get("/").text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert sources
    assert all(source.startswith("/") for source in sources)
    assert client.get("/_dash-layout").status_code == 200
    body = {
        "output": "..view.children...shown.data...links.children...x.data..",
        "outputs": [], "inputs": [], "changedPropIds": [],
    }  # fmt: skip
    assert client.post("/_dash-update-component", json=body).status_code >= 400


HOSTILE = "<img src=x onerror=alert(1)><b>&lt;%{x}"


@pytest.fixture
def hostile(tmp_path):
    """Return an explorer of a dump with markup in texts, and a link that leads out of the dump."""
    outside = tmp_path / "outside.pt"
    folder = tmp_path / "dump"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    names = []
    for record, shape, scale in records(run_id="r" + HOSTILE, quant_type="bf16", layers=1):
        if record.tensor_name in ("input", "weight", "query", "key"):
            fields = record.to_metadata() | {"module": f"decoder.layers.0.{HOSTILE}"}
            changed = type(record).from_metadata(fields)
            names.append(write_tensor(folder, changed, values(shape, scale, generator)))
    names[0].rename(outside)
    names[0].symlink_to(outside)
    explorer = opened_explorer(folder)
    explorer.measurer.start()
    wait_for(lambda: explorer.measurer.total and explorer.measurer.done >= explorer.measurer.total)
    yield explorer
    explorer.close()


def test_texts_of_a_dump_are_shown_as_they_are(hostile):
    views = _Views(hostile)
    search = "?run=" + "r%3Cimg"
    page, _, _, _ = views.show(search, None, None, [], [])
    assert "dangerously" not in shown_text(page)
    assert any("leads out of the folder" in str(problem) for problem in hostile.follower.problems)
    found = panel(hostile, "map", hostile.resolved("").search())
    figure = re.search(r'"ticktext": \[[^\]]*\]', found)[0]
    assert "<" not in figure
    assert "<img" not in re.search(r'"hovertext": .*?\]\]', found)[0]
    assert plain("<a href='x'>&amp;") == "\u2039a href='x'\u203a\uff06amp;"


def test_a_file_that_cannot_be_shown_is_a_message(tmp_path, capsys):
    paths = write_dump(tmp_path, layers=1)
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[:200] + bytes(200) + content[400:])
    paths[1].unlink()
    explorer = opened_explorer(tmp_path)
    for tensor, why in ((0, "corrupt, truncated"), (1, "No such file")):
        search = f"?v=tensor&t={explorer.catalog.id_of(tensor)}&format=mxfp8"
        for name in ("facts", "image", "histogram", "scales"):
            text = panel(explorer, name, search)
            assert "Not shown" in text
            assert why in text
    assert capsys.readouterr().err == ""
    explorer.close()


def test_every_unusable_file_of_the_status_is_listed(tmp_path):
    paths = write_dump(tmp_path, layers=1)
    paths[3].write_bytes(b"damaged")
    explorer = opened_explorer(tmp_path)
    views = _Views(explorer)
    before = views._data("events", explorer.resolved("?v=training"))
    explorer.measurer.start()
    wait_for(lambda: explorer.measurer.total and explorer.measurer.done == explorer.measurer.total)
    assert '1 unusable file"' in shown_text(views._status())
    assert views._data("events", explorer.resolved("?v=training")) != before
    assert paths[3].name in panel(explorer, "events", "?v=training")
    explorer.close()


def test_a_link_out_of_the_folder_is_not_followed_when_an_index_names_it(tmp_path):
    folder = tmp_path / "dump"
    paths = write_dump(folder, layers=1)
    outside = tmp_path / "outside.pt"
    paths[0].rename(outside)
    paths[0].symlink_to(outside)
    explorer = opened_explorer(folder)
    tensor = 0
    assert Path(explorer.catalog.records.path(0)).name == paths[0].name
    with pytest.raises(NotShownError, match="leads out of the folder"):
        explorer.contents.tensor(explorer.catalog, tensor)
    with pytest.raises(NotShownError, match="leads out of the folder"):
        explorer.contents.answer(explorer.catalog, tensor, ["mxfp8"])
    explorer.close()


def test_the_histogram_shows_which_values_become_nan_or_inf(tmp_path):
    record = next(r for r, _, _ in records(run_id="r", quant_type="bf16") if r.dims == "n k")
    x = torch.randn(record.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, 3] = math.nan  # with mxfp8, the 32 values of its block along the row become NaN
    x[5, :7] = 2.0**17  # with hifp8:inf, they become Inf
    write_tensor(tmp_path, record, x)
    explorer = opened_explorer(tmp_path)
    try:
        for fmt in ("mxfp8", "hifp8:inf", "hifp8"):
            search = f"?v=tensor&t={explorer.catalog.id_of(0)}&format={fmt}"
            shown = magnitudes.histogram(explorer.subject(explorer.resolved(search)))
            y = fake_quantize(x.clone(), fmt, axis=-1)
            drawn = x.isfinite() & (x != 0)
            counts = shown.table.sum()
            assert counts["nan"] == int((y.isnan() & drawn).sum()) == 31 * (fmt == "mxfp8")
            assert counts["inf"] == int((y.isinf() & drawn).sum()) == 7 * (fmt == "hifp8:inf")
            assert counts["zero"] == int(((y == 0) & drawn).sum())
            # mxfp8 also clips values, which `test_clipping` tests
            assert fmt == "mxfp8" or counts["clipped"] == 7 * (fmt == "hifp8")
            [kept] = (t["y"] for t in shown.figure["data"] if t.get("name") == "kept")
            shares = np.frombuffer(base64.b64decode(kept["bdata"]), "<f4").sum() / 100
            others = sum(counts[["zero", "clipped", "inf", "nan"]])
            assert shares * int(drawn.sum()) == pytest.approx(counts["count"] - others, rel=1e-5), (
                fmt
            )
            bars = [trace["name"] for trace in shown.figure["data"] if trace["type"] == "bar"]
            assert ("becomes NaN" in bars, "becomes Inf" in bars) == (
                fmt == "mxfp8",
                fmt == "hifp8:inf",
            )
    finally:
        explorer.close()


def drawn_cells(figure):
    """Return the hover texts of a map with one row, and which of its cells are red."""
    red = np.zeros(len(figure["data"][0]["hovertext"][0]), bool)
    if len(figure["data"]) > 1:
        z = figure["data"][1]["z"]
        red = np.frombuffer(base64.b64decode(z["bdata"]), z["dtype"].replace("f", "<f")) == 1
    texts = [text.rpartition(": ")[2] for text in figure["data"][0]["hovertext"][0]]
    return texts, red.tolist()


def test_operands_that_are_not_finite_stay_in_the_map():
    nan, inf = math.nan, math.inf
    own = operands(amax=[2.0, inf, nan], sqnr_db=[20.0, nan, inf], underflow=[0.031, 0.25, nan])
    figures = {name: training_page._operand_map(own, name) for name in ("amax", "sqnr_db")}
    assert drawn_cells(figures["amax"]) == (
        ["2", "not finite", "not finite"], [False, True, True]
    )  # fmt: skip
    assert figures["amax"]["layout"]["xaxis"]["ticktext"] == ["1", "2", "3"]
    # an infinite SQNR is a result without error
    assert drawn_cells(figures["sqnr_db"]) == (
        ["20.0 dB", "not finite", "exact"], [False, True, False]
    )  # fmt: skip


def test_the_underflow_of_operands_is_in_percent_everywhere():
    figure = training_page._operand_map(operands(underflow=[0.031, 0.25]), "underflow")
    assert drawn_cells(figure)[0] == ["3.1 %", "25 %"]
    assert figure["data"][0]["colorbar"]["title"]["text"] == "Underflow (%)"
    assert figure["data"][0]["zmax"] == pytest.approx(25)


def test_a_cell_of_several_operands_is_red_if_one_of_them_is():
    own = operands(amax=[2.0, 3.0], rms=[1.0, 1.0])
    both = pd.concat([own, own.assign(amax=[math.inf, 5.0])])
    assert drawn_cells(training_page._operand_map(both, "amax")) == (
        ["not finite", "5"], [True, False]
    )  # fmt: skip


def test_operands_without_a_format_have_no_quantization_error(explorer, monkeypatch):
    own = operands(amax=[2.0, math.inf], sqnr_db=[math.nan] * 2)
    own["format"] = "none"
    assert training_page._operand_map(own, "sqnr_db") is None
    monkeypatch.setattr(explorer.training, "statistics", {"run": own})
    text = panel(explorer, "statistics", "?v=training&stat=amax")
    assert "Red cells: not finite" in text
    monkeypatch.setattr(explorer.training, "statistics", {"run": own[:1]})
    assert "Red cells" not in panel(explorer, "statistics", "?v=training&stat=amax")
