"""Tests of report.html: its content, and its behavior in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pytest

from megatron.analysis.__main__ import main
from megatron.analysis.diagnostics import find_diagnostics
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.report import render
from megatron.analysis.report.content import content
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import FORMATS, RUNS, write_events, write_two_types
from tests.analysis.report.browser import browser, find_browser


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    trained = {"event": "trained", "iterations": [1, 2, 3], "loss": [4.0, 9.0, "nan"]}
    trained |= {"grad_norm": [1.0, None, "inf"]}
    why = "loss 9, 2.25 times the level before at iteration 2"
    kept = {"event": "kept", "why": why, "iterations": [1, 2]}
    write_events(folder / "mxfp8", RUNS["mxfp8"], trained, kept)
    return folder


@pytest.fixture(scope="module")
def figure_data(dump):
    store = TensorStore(dump)
    return FigureData(store, compute(store, FORMATS), tuple(FORMATS))


@pytest.fixture(scope="module")
def page(dump, tmp_path_factory):
    output = tmp_path_factory.mktemp("draw")
    assert main(["report", str(dump), "--output-dir", str(output), "--formats", *FORMATS]) == 0
    return output / "report.html"


@pytest.fixture(scope="module")
def tab(page, tmp_path_factory):
    """Open the page in a browser."""
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium on the PATH (nor in CHROMIUM): the page was NOT looked at")
    with browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        opened.open(page)
        yield opened


def embedded(page):
    return data_of(page.read_text(encoding="utf-8"))


def data_of(text):
    """Return the data of a page, which are compressed JSON."""
    packed = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_is_one_file_with_its_data(page, figure_data):
    found = embedded(page)
    assert found["places"] == figure_data.places
    assert [run["type"] for run in found["runs"]] == ["bf16", "mxfp8"]
    assert len(found["details"]) == len(found["tensors"]) == 114
    head = page.read_text(encoding="utf-8").partition('id="data"')[0]
    assert "src=" not in head
    assert not re.search(r'href="(?!#|data:)', head)
    visible = [path.name for path in page.parent.iterdir() if path.name[0] != "."]
    assert visible == ["report.html"]
    assert page.stat().st_size < 5e6


def test_cells_and_details_have_the_numbers_of_the_statistics(page, figure_data):
    found = embedded(page)
    width = 5 + 2 * len(FORMATS)
    cells = figure_data.tensors.groupby(["run_id", "iteration", "layer_idx", "place"])
    assert len(found["cells"]) == cells.ngroups
    assert all(len(cell) == width for cell in found["cells"])
    run, iteration, layer, place, count, sqnr, tensor = found["cells"][0][:7]
    row = figure_data.tensors.loc[tensor]
    assert (row["iteration"], row["layer_idx"], row["place"]) == (
        iteration,
        layer,
        figure_data.places[place],
    )
    assert (run, count) == (0, 1)
    uses = figure_data.uses
    own = uses[(uses["tensor"] == tensor) & (uses["quantized_format"] == FORMATS[0])]
    assert sqnr == pytest.approx(own["sqnr_db"].iloc[0], rel=1e-5)
    detail = found["details"][str(tensor)]
    arrays = figure_data.statistics.arrays(tensor)
    counts = arrays.positive + arrays.negative
    first = detail["first"] + 127
    assert detail["values"] == counts[first : first + len(detail["values"])].tolist()


def test_a_block_map_is_that_of_the_tensor(page, figure_data):
    found = embedded(page)["details"]
    tensor = int(next(iter(found)))
    packed = found[str(tensor)]["maps"]["mxfp8"]
    held = np.frombuffer(base64.b64decode(packed["bytes"]), np.int8).astype(float)
    expected = scale_map(figure_data.load(tensor), "mxfp8", rows=48, blocks=48)
    held[held == -128] = np.nan
    np.testing.assert_array_equal(held.reshape(expected.shape), expected.to_numpy())


def test_warnings_have_the_numbers_behind_them(figure_data):
    tensors, uses = figure_data.tensors.copy(), figure_data.uses.copy()
    assert not [c for c in find_diagnostics(uses, tensors) if c.kind == "nan"]
    tensors.loc[3, "nan"] = 5
    tensors.loc[4, "dead_channels"] = 2
    at = uses.index[uses["quantized_format"] == "hifp8"][0]
    uses.loc[at, ["clipping_error", "underflow", "gain"]] = [0.625, 0.25, -0.125]
    uses.loc[at, "compared"] -= 3
    found = {diagnostic.kind: diagnostic for diagnostic in find_diagnostics(uses, tensors)}
    place = tensors.loc[3, "place"]
    assert str(found["nan"]) == (
        "1 of 114 tensors hold NaN or Inf; "
        f"worst: L{tensors.loc[3, 'layer_idx']} {place} (5 values)"
    )
    assert found["dead_channels"].tensors == (4,)
    clipping = "hifp8 owes more than 50 % of its squared error to clipping: 1 of 114 tensors"
    assert clipping in str(found["clipping"])
    assert "(62.5 %)" in str(found["clipping"])
    assert "hifp8 turns finite values into Inf: 1 of 114 tensors" in str(found["overflow"])
    assert "(3 values)" in str(found["overflow"])
    gains = [
        str(d) for d in find_diagnostics(uses, tensors) if (d.kind, d.format) == ("gain", "hifp8")
    ]
    assert "hifp8 shrinks or enlarges tensors by more than 5 % (gain): 1 of 114" in gains[0]
    assert "(12.5 %)" in gains[0]
    kinds = [diagnostic.kind for diagnostic in find_diagnostics(uses, tensors)]
    assert kinds.index("nan") < kinds.index("clipping") < kinds.index("dead_channels")


def test_nothing_in_the_data_can_become_markup(figure_data):
    data = content(figure_data) | {"title": "</script><script>alert(1)</script>&"}
    page = render(data)
    assert "<script>alert" not in page
    assert "<title>&lt;/script&gt;" in page
    evil = "</script><!--<script><a href='x'>{{data}}"
    texts = {"folder": evil, "places": [evil], "left_out": [evil], "tensors": [evil]}
    page = render(data | texts)
    assert evil not in page
    assert data_of(page)["folder"] == evil


def test_the_page_opens_without_an_error_and_asks_for_nothing(tab, page):
    assert tab.messages == []
    outside = [url for url in tab.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [page.resolve().as_uri()]
    assert tab.evaluate("document.querySelectorAll('#heatmap .heatmaplayer image').length") == 1
    tab.evaluate("$('iteration').value = 2, $('iteration').onchange(), 1")
    texts = tab.evaluate(
        "Array.from(document.querySelectorAll('#heatmap .heatmap-label'), (n) => n.textContent)"
    )
    # only one layer has attention_probs, so that the cell of the other is empty
    places = embedded(page)["results"].count(False)  # the map has columns for operands only
    written = [text for text in texts if text]
    assert len(written) == 2 * places - 1
    assert all(re.fullmatch(r"\d+\.\d", text) for text in written)
    assert tab.evaluate("document.querySelectorAll('#worst-table tr').length") > 10
    assert tab.evaluate("document.querySelectorAll('#cautions li').length") >= 1


def test_a_click_on_a_cell_opens_its_histogram_and_block_map(tab, page):
    data = embedded(page)
    place = data["places"].index("core query")
    column = sum(not result for result in data["results"][:place])
    run, iteration = 1, 2
    tab.evaluate(f"$('run').value = {run}, $('run').onchange(), $('iteration').value")
    cell = next(c for c in data["cells"] if c[:4] == [run, iteration, data["layers"][1], place])
    tab.evaluate("$('heatmap').scrollIntoView()")
    x, y = tab.evaluate(
        f"""(() => {{ const plot = $('heatmap'), box = plot.getBoundingClientRect(),
            {{ xaxis, yaxis }} = plot._fullLayout;
            return [box.left + xaxis._offset + xaxis.l2p({column}),
                    box.top + yaxis._offset + yaxis.l2p(1)]; }})()"""
    )
    tab.click(x, y)
    tab.wait_for(f"$('detail').dataset.tensor === '{cell[6]}'")
    assert tab.evaluate("$('detail-title').textContent") == data["tensors"][cell[6]]
    detail = data["details"][str(cell[6])]
    bars = "$('histogram').data.slice(0, 3).map((t) => Array.from(t.y))"
    drawn = np.array(tab.evaluate(bars)).sum(0)
    assert drawn.tolist() == detail["values"]
    assert tab.evaluate("$('blockmap').data[0].z.length") == detail["maps"]["mxfp8"]["rows"]
    scale = "#blockmap .cbaxis text"
    ticks = tab.evaluate(f"Array.from(document.querySelectorAll('{scale}'), (n) => n.textContent)")
    exponents = [int(tick.replace("\N{MINUS SIGN}", "-")) for tick in ticks]
    assert exponents == sorted(set(exponents)) != []
    assert tab.messages == []


def test_another_format_redraws_what_is_open(tab):
    before = tab.evaluate("$('detail').dataset.tensor")
    tab.evaluate("$('format').value = 3, $('format').onchange(), 1")
    assert tab.evaluate("$('detail').dataset.tensor") == before
    assert "hifp8" in tab.evaluate("$('histogram').layout.title.text")
    assert "hifp8 has no scales of blocks" in tab.evaluate("$('block-note').textContent")
    assert tab.messages == []


def test_saturated_values_are_hatched_whatever_the_color_of_the_format(tab):
    tab.evaluate("$('format').onchange(), 1")
    patterns = dict(
        tab.evaluate(
            "$('histogram').data.filter((t) => t.type === 'bar')"
            ".map((t) => [t.name, t.marker.pattern ? t.marker.pattern.shape : ''])"
        )
    )
    assert patterns == {"kept": "", "become zero": "", "saturate": "/"}
    assert tab.messages == []


def test_a_row_of_the_worst_and_a_warning_open_their_tensor(tab, page):
    tab.evaluate("$('format').value = 1, $('format').onchange(), 1")
    worst = embedded(page)["worst"]["mxfp4"][2][0]
    tab.evaluate("document.querySelectorAll('#worst-table tr.open')[2].click(), 1")
    assert tab.evaluate("$('detail').dataset.tensor") == str(worst)
    named = embedded(page)["cautions"][0]["tensors"][0]
    tab.evaluate("document.querySelector('#cautions button.tensor').click(), 1")
    assert tab.evaluate("$('detail').dataset.tensor") == str(named)
    assert tab.messages == []


AGREEMENT = """(() => { const tensor = Number($('detail').dataset.tensor);
    const [run, iteration] = data.at[tensor];
    const shapes = $('heatmap').layout.shapes.length;
    return [Number($('run').value) === run, Number($('iteration').value) === iteration,
            $('histogram').layout.title.text.endsWith(formatName()), shapes]; })()"""


def test_map_and_detail_show_the_same_run_iteration_and_format(tab, page):
    data = embedded(page)
    tab.open(page)
    assert tab.evaluate(AGREEMENT) == [True, True, True, 1]  # after loading
    warnings = [(i, w) for i, w in enumerate(data["cautions"]) if w["format"] and w["tensors"]]
    assert len({warning["format"] for _, warning in warnings}) > 1
    for number, warning in warnings:
        item = f"document.querySelectorAll('#cautions > li')[{number}]"
        tab.evaluate(f"Array.from({item}.querySelectorAll('button')).at(-1).click(), 1")
        assert tab.evaluate("formatName()") == warning["format"]
        assert tab.evaluate("$('detail').dataset.tensor") == str(warning["tensors"][-1])
        assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    for row in (0, 5, 11):
        tab.evaluate(f"document.querySelectorAll('#worst-table tr.open')[{row}].click(), 1")
        assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    for select, value in (("run", 0), ("iteration", 1), ("run", 1), ("shown", "'results'")):
        tab.evaluate(f"$('{select}').value = {value}, $('{select}').onchange(), 1")
        assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    assert tab.messages == []


def test_results_stand_in_a_map_of_their_own(tab, page):
    data = embedded(page)
    shown = "$('heatmap').data[0].x"
    for kind in (False, True):
        name = "results" if kind else "operands"
        tab.evaluate(f"$('shown').value = '{name}', $('shown').onchange(), 1")
        expected = [
            label
            for label, result in zip(data["labels"], data["results"], strict=True)
            if result == kind
        ]
        assert tab.evaluate(shown) == expected
    assert data["judged_places"] == [
        place for place, result in zip(data["places"], data["results"], strict=True) if not result
    ]


def test_the_scales_of_nvfp4_are_shown_by_their_values(tab, page, figure_data):
    tab.evaluate("goTo(data.worst.nvfp4[0][0], 'nvfp4'), 1")
    tensor = int(tab.evaluate("$('detail').dataset.tensor"))
    expected = scale_map(figure_data.load(tensor), "nvfp4", rows=48, blocks=48).to_numpy()
    drawn = np.array(tab.evaluate("$('blockmap').data[0].z"), dtype=float)
    np.testing.assert_allclose(drawn, expected, rtol=1e-12)
    ticks = tab.evaluate("$('blockmap').data[0].colorbar.ticktext")
    values = 2.0 ** expected[np.isfinite(expected)]
    assert len(set(ticks)) == len(ticks)
    assert all(np.isclose(values, float(tick), rtol=1e-2).any() for tick in ticks)
    assert tab.messages == []


def test_the_loss_says_why_the_ring_was_written_and_a_click_shows_the_tensors(tab, page):
    tab.open(page)
    notes = tab.evaluate(
        "Array.from(document.querySelectorAll('#events li'), (n) => n.textContent)"
    )
    written = "mxfp8: The ring was written: at iteration 2, the loss was 9, 2.25 times its level "
    assert f"{written}before. The dump has iterations 1 to 2." in notes
    traces = tab.evaluate("$('loss').data.map((t) => [t.mode, t.yaxis, t.x, t.y])")
    assert ["lines", "y", [1, 2, 3], [4, 9, None]] in traces
    assert ["lines", "y2", [1, 2, 3], [1, None, None]] in traces
    assert ["markers", "y", [1, 2], [4, 9]] in traces, "iterations with tensors"
    assert ["markers", "y", [3], [9]] in traces, "NaN, at the top"
    assert tab.evaluate("$('loss').layout.shapes.map((s) => s.x0)") == [2]
    assert "Without losses: bf16" in tab.evaluate("$('training-note').textContent")
    tab.evaluate("$('loss').emit('plotly_click', { points: [{ customdata: [1, 2] }] }), 1")
    assert tab.evaluate("[Number($('run').value), Number($('iteration').value)]") == [1, 2]
    assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    assert tab.messages == []


def test_attention_follows_the_layer_the_head_and_the_format(tab, page):
    tab.open(page)
    data = embedded(page)["attention"]
    assert [entry["layer"] for entry in data["layers"]] == [0, 1]
    tab.evaluate("$('format').value = 1, $('format').onchange(), 1")
    tab.evaluate("$('attention-layer').value = 1, $('attention-layer').onchange(), 1")
    tab.evaluate("$('attention-head').value = 1, $('attention-head').onchange(), 1")
    moved = [entry["formats"][FORMATS[1]]["moved"] for entry in data["layers"]]
    drawn = np.array(tab.evaluate("$('attention-moved').data[0].z"))
    np.testing.assert_allclose(drawn, 100 * np.array(moved))
    changes = np.array([entry["formats"][FORMATS[1]]["sum_change"] for entry in data["layers"]])
    hover = tab.evaluate("$('attention-moved').data[0].customdata")
    for layer, heads in enumerate(hover):
        for head, (number, text) in enumerate(heads):
            assert number == data["layers"][layer]["heads"][head]
            percent = float(text.removesuffix(" %"))
            assert percent == pytest.approx(100 * changes[layer, head], rel=0.06)
    title = tab.evaluate("$('attention-title').textContent")
    ends = re.search(r"changes by (\S+) % to (\S+) %", title)
    expected = [100 * changes.min(), 100 * changes.max()]
    assert [float(end) for end in ends.groups()] == pytest.approx(expected, rel=0.06)
    side, heads = data["layers"][1]["side"], len(data["layers"][1]["heads"])
    codes = np.frombuffer(base64.b64decode(data["layers"][1]["maps"]), np.uint8)
    codes = codes.reshape(heads, side, side)[1].astype(float)
    expected = np.where(codes == 0, np.nan, (codes - 1) / 254 * 10 - 5)
    shown = np.array(tab.evaluate("$('attention-map').data[0].z"), dtype=float)
    np.testing.assert_allclose(shown, expected, atol=1e-9)
    assert FORMATS[1] in tab.evaluate("$('attention-change').layout.title.text")
    mean = "$('attention-head').value = 'mean', $('attention-head').onchange()"
    tab.evaluate(f"{mean}, 1")
    assert "mean of the heads" in tab.evaluate("$('attention-map').layout.title.text")
    tab.evaluate(
        "$('attention-moved').emit('plotly_click', { points: [{ pointNumber: [0, 1] }] }), 1"
    )
    assert tab.evaluate("[$('attention-layer').value, $('attention-head').value]") == ["0", "1"]
    assert tab.messages == []


def test_gradients_are_drawn_over_iterations_or_layers(tab, page, figure_data):
    tab.open(page)
    table = figure_data.tensors
    own = table[(table["kind"] == "gradient") & (table["quant_type"] == "bf16")]
    medians = own.groupby(["place", "iteration"])["rms"].median()
    drawn = tab.evaluate("$('gradient-plot').data.map((t) => [t.name, t.x, t.y])")
    assert len(drawn) == own["place"].nunique()
    for name, x, y in drawn:
        place = name.removesuffix(" (result)")
        assert y == pytest.approx([medians[place, iteration] for iteration in x], rel=1e-4)
    tab.evaluate("$('gradient-number').value = 'sqnr', $('gradient-number').onchange(), 1")
    names = tab.evaluate("$('gradient-plot').data.map((t) => t.name)")
    assert sorted(names) == ["core grad_output", "qkv grad_output"], "operands only"
    assert "in mxfp8, the format chosen above" in tab.evaluate("$('gradient-note').textContent")
    assert tab.messages == []


def test_the_worst_tensors_can_be_sorted_and_filtered(tab, page):
    tab.open(page)
    rows = """Array.from(document.querySelectorAll('#worst-table tr.open'),
                         (row) => row.cells[0].textContent)"""
    everything = tab.evaluate(rows)
    worst = embedded(page)["worst"][FORMATS[0]]
    names = embedded(page)["tensors"]
    assert everything == [names[row[0]] for row in worst]
    tab.evaluate("$('worst-layer').value = 1, $('worst-layer').onchange(), 1")
    of_layer = tab.evaluate(rows)
    assert of_layer == [name for name in everything if name.startswith("L1 ")] != []
    tab.evaluate("$('worst-text').value = 'GRAD', $('worst-text').oninput(), 1")
    assert tab.evaluate(rows) == [name for name in of_layer if "grad" in name]
    assert tab.evaluate("$('worst-count').textContent") == (
        f"{len(tab.evaluate(rows))} of {len(everything)} rows"
    )
    tab.evaluate(
        "$('worst-layer').value = '', $('worst-text').value = '', $('worst-text').oninput(), 1"
    )
    for clicks, reverse in ((1, False), (2, True)):
        tab.evaluate("document.querySelectorAll('#worst-table .sort')[5].click(), 1")
        shown = [worst[everything.index(name)][5] for name in tab.evaluate(rows)]
        assert shown == sorted(shown, reverse=reverse), clicks
    assert tab.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1
    assert tab.messages == []


def test_the_verdict_ranks_the_formats_with_the_numbers_of_the_statistics(tab, page, figure_data):
    verdict = embedded(page)["verdict"]
    medians = figure_data.judged.groupby("quantized_format")["sqnr_db"].median()
    assert [each["format"] for each in verdict] == list(medians.sort_values(ascending=False).index)
    for each in verdict:
        uses = figure_data.judged[figure_data.judged["quantized_format"] == each["format"]]
        assert each["text"].startswith(f"{medians[each['format']]:.1f} dB in the median of ")
        assert each["tensor"] == uses.loc[uses["sqnr_db"].idxmin(), "tensor"]
        assert f"{uses['sqnr_db'].min():.1f} dB; " in each["text"]
    tab.evaluate("document.querySelectorAll('#sentences button')[1].click(), 1")
    assert tab.evaluate("$('detail').dataset.tensor") == str(verdict[1]["tensor"])
    assert tab.evaluate("formatName()") == verdict[1]["format"]


def test_the_address_of_a_view_opens_it_again(tab, page):
    tab.open(page)
    tensor = embedded(page)["worst"]["nvfp4"][5][0]
    tab.evaluate(f"jumpTo({tensor}, 'nvfp4'), 1")
    address = tab.evaluate("location.hash")
    assert f"tensor={tensor}" in address
    assert "format=nvfp4" in address
    tab.evaluate("jumpTo(0, 'mxfp8'), 1")
    tab.evaluate(f"location.hash = '{address}', 1")
    tab.wait_for(f"$('detail').dataset.tensor === '{tensor}'")
    assert tab.evaluate("formatName()") == "nvfp4"
    assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    for wrong in ("tensor=99999", "tensor=-1", "tensor=1e2", "format=%3Cb%3E&run=x&iteration=7"):
        tab.evaluate(f"location.hash = '#view:{wrong}', 1")
        tab.wait_for(f"location.hash !== '#view:{wrong}'")
    assert tab.messages == []


def test_the_arrow_keys_open_the_next_cell(tab, page):
    tab.open(page)
    tab.evaluate("$('heatmap').focus(), 1")
    assert tab.evaluate("document.activeElement.id") == "heatmap"
    places = []
    for key in ("ArrowDown", "ArrowLeft", "ArrowUp", "ArrowRight", "ArrowRight", "ArrowLeft"):
        event = f"new KeyboardEvent('keydown', {{ key: '{key}', cancelable: true }})"
        tab.evaluate(f"$('heatmap').dispatchEvent({event}), 1")
        places.append(tab.evaluate("data.at[opened].slice(2).join()"))
        assert tab.evaluate(AGREEMENT) == [True, True, True, 1]
    assert len(set(places)) >= 3


def test_a_phone_needs_no_sideways_scrolling_and_a_dark_screen_no_white_page(tab, page):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.send("Emulation.setDeviceMetricsOverride", **phone)
    tab.send("Emulation.setEmulatedMedia", features=dark)
    try:
        tab.open(page)
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(23, 25, 27)"
        assert tab.evaluate("$('heatmap')._fullLayout.paper_bgcolor") == "#17191b"
        assert tab.evaluate("document.querySelectorAll('#heatmap .heatmap-label').length") == 0
        for plot in ("by-place", "by-layer", "gradient-plot"):  # no legend covers the data
            legend, panel = (
                tab.evaluate(f"$('{plot}').querySelector('{part}').getBoundingClientRect().{end}")
                for part, end in ((".legend", "bottom"), (".nsewdrag", "top"))
            )
            assert legend <= panel
        assert tab.messages == []
    finally:
        tab.send("Emulation.clearDeviceMetricsOverride")
        tab.send("Emulation.setEmulatedMedia", features=[])
