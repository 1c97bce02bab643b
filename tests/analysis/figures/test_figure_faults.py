"""Regression tests of figures: missing places, axes that show noise, labels of a wrong format."""

from __future__ import annotations

import math

import matplotlib as mpl

mpl.use("agg")

import numpy as np
import pandas as pd
import pytest

from megatron.analysis.figures import block_analysis, comparisons, distributions, gradients
from megatron.analysis.figures.figure_data import KINDS, FigureData
from megatron.analysis.figures.sheet import caption, headline, sheet
from megatron.analysis.plots.lines import plot_lines
from megatron.analysis.plots.style import RC, in_style, visible_percent
from megatron.analysis.plots.text import brief, text_lines
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import FORMATS, write_two_types


@pytest.fixture(scope="module")
def figure_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    store = TensorStore(folder)
    return FigureData(store, compute(store, FORMATS), tuple(FORMATS))


def test_the_histograms_leave_no_place_out(figure_data, monkeypatch):
    monkeypatch.setattr(distributions, "MOST", 4)
    made = {name: make for name, make in distributions.draw(figure_data) if "histogram" in name}
    assert list(made) == ["histogram", "histogram_2", "histogram_3", "histogram_4"]
    titles = [
        ax.get_title(loc="left") for make in made.values() for ax in make().axes if ax.has_data()
    ]
    assert titles == [figure_data.label(place) for place in figure_data.places_apart]
    assert len(titles) == 15


def test_a_share_that_is_noise_is_not_written_in_digits():
    assert visible_percent(1.58e-16) == "<0.0001 %"
    assert visible_percent(0.0) == "0 %"
    assert visible_percent(2e-6) == "0.0002 %"


def test_weights_that_are_equal_in_all_runs_are_said_to_be(figure_data):
    found = FigureData(figure_data.store, figure_data.statistics, figure_data.formats)
    kinds = {"forward": 0.25, "weight": 0.0, "gradient": 2.5}
    rows = [("mxfp8", kind, layer, 2, far) for kind, far in kinds.items() for layer in (0, 1)]
    columns = ["quant_type", "kind", "layer_idx", "iteration", "deviation"]
    found.__dict__["deviations"] = pd.DataFrame(rows, columns=columns)
    figure = comparisons.deviation(found)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    weights = figure.axes[titles.index("Weights")]
    assert [text.get_text() for text in weights.texts] == ["equal in all runs\nin iteration 2"]
    limits = {ax.get_ylim() for ax in figure.axes if ax is not weights}
    assert len(limits) == 1
    assert {ax.get_yscale() for ax in figure.axes if ax is not weights} == {"log"}
    assert next(iter(limits))[0] < 0.25 < 2.5 < next(iter(limits))[1]


def test_runs_whose_deviation_is_not_finite_are_said_to_be(figure_data):
    found = FigureData(figure_data.store, figure_data.statistics, figure_data.formats)
    far = {"forward": (0.25, math.inf), "weight": (0.0, 0.0), "gradient": (math.inf, math.inf)}
    rows = [("mxfp8", kind, layer, 2, far[kind][layer]) for kind in far for layer in (0, 1)]
    columns = ["quant_type", "kind", "layer_idx", "iteration", "deviation"]
    found.__dict__["deviations"] = pd.DataFrame(rows, columns=columns)
    figure = comparisons.deviation(found)
    marks = {ax.get_title(loc="left"): ax.get_title(loc="right") for ax in figure.axes}
    panels = {ax.get_title(loc="left"): [t.get_text() for t in ax.texts] for ax in figure.axes}
    assert panels["Gradients"] == ["not finite in every run\nin iteration 2"]
    assert panels["Weights"] == ["equal in all runs\nin iteration 2"]
    assert "infinite" in marks["Activations"]  # layer 1
    texts = [text.get_text() for text in figure.texts]
    assert any("not finite in 3 of 6 tensors" in text for text in texts)
    mixed = found.__dict__["deviations"]
    mixed.loc[mixed["kind"].eq("weight") & mixed["layer_idx"].eq(1), "deviation"] = math.inf
    figure = comparisons.deviation(found)
    panels = {ax.get_title(loc="left"): [t.get_text() for t in ax.texts] for ax in figure.axes}
    assert panels["Weights"] == ["equal or not finite in every run\nin iteration 2"]


def test_titles_of_panels_stand_at_one_height():
    with mpl.rc_context(RC):
        figure, axes = sheet(12, 4, 1, 3)
        for ax, title, size in zip(axes, KINDS.values(), (1.0, 1e-2, 1e6), strict=True):
            data = pd.DataFrame({"group": "mxfp8", "x": [0, 1], "value": [size, 1.01 * size]})
            plot_lines(data, xlabel="layer", ylabel="rms", title=title, logarithmic=True, ax=ax)
        figure.draw_without_rendering()
        renderer = figure._get_renderer()
        heights = {
            round(title.get_window_extent(renderer).y0, 3)
            for ax in figure.axes
            for title in ax.findobj(mpl.text.Text)
            if title.get_text() in ("Activations", "Weights", "Gradients")
        }
    assert len(heights) == 1


@pytest.mark.filterwarnings("error")
def test_notes_end_at_the_edge_of_the_figure_whatever_names_they_contain():
    name = "recipe_$x_1$ <b>100%_\N{CJK UNIFIED IDEOGRAPH-6F22}" + "W" * 90
    with in_style():
        figure, _ = sheet(4.6, 4.0)
        headline(figure, f"SQNR of {name}", f"SQNR of {name}, run 20261124_015409_260754", name)
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(mpl.text.Text) if text.get_text().strip()]
        widths = [text.get_window_extent().x1 for text in texts if "W" in text.get_text()]
        assert len(widths) > 5
        assert max(widths) <= figure.bbox.x1


def test_lines_have_all_characters_of_a_text():
    assert text_lines("one two  three", 0.8, 10) == ["one two", "three"]
    assert "".join(text_lines("a" * 40, 0.5, 10)) == "a" * 40
    assert text_lines("", 1, 10) == []
    assert brief("mxfp8") == "mxfp8"
    assert brief("recipe_" + "x" * 90 + "_end", 16) == "recipe_xxx…x_end"


def test_a_note_counts_the_gradients_that_are_drawn(figure_data):
    drawn = gradients.judged_gradients(figure_data)["tensor"].nunique()
    for draw in (gradients.exponents, gradients.underflow):
        assert f"; {drawn} operands of matmuls of " in caption(draw(figure_data))
    assert f"{drawn} operands" not in figure_data.judged_origin


def test_codes_are_numbers_before_the_scale_only_where_there_is_one(figure_data):
    labels = {
        ax.get_title(loc="left"): ax.get_xlabel()
        for ax in block_analysis.code_usage(figure_data).axes
    }
    assert list(labels) == ["mxfp8", "mxfp4", "nvfp4", "hifp8"]
    assert labels["nvfp4"] == "number that the code stands for (before the scale)"
    assert labels["hifp8"] == "number that the code stands for"


def test_a_panel_says_which_formats_it_lacks_or_hides(figure_data):
    figure = block_analysis.blocks(figure_data, figure_data.with_blocks())
    room, ranges, scales = figure.axes
    assert scales.get_title(loc="right") == "the other formats have no E8M0 scales"
    assert ranges.get_title(loc="right") == ""  # any number of formats would not fit there
    assert "; equal ranges: mxfp8 = mxfp4. " in caption(figure)
    counted = sum(figure_data.summed(name).headroom for name in figure_data.with_blocks())
    highest = block_analysis.HEADROOM_EDGES[counted.nonzero()[0][-1]]
    assert room.get_xlim()[1] == highest + 0.125


def test_only_formats_with_equal_counts_are_called_equal():
    b32, b16 = np.array([1, 2]), np.array([2, 1])
    counts = {"mxfp8": b32, "nvfp4": b16, "mxfp4": b32, "if4": b16, "hifp4": np.array([3, 0])}
    assert block_analysis.same_counts(counts) == [["mxfp8", "mxfp4"], ["nvfp4", "if4"]]


def test_a_scale_map_names_the_run_and_has_the_lowest_operands(figure_data):
    rows = block_analysis.worst(figure_data, "mxfp4", 6)
    assert rows["operand"].all()
    assert rows["along_row"].is_monotonic_increasing
    table = figure_data.statistics.formats
    for row in rows.itertuples():
        own = table[(table["tensor"] == row.tensor) & (table["quantized_format"] == "mxfp4")]
        assert row.along_row == own.loc[own["axis"] == "row", "sqnr_db"].iloc[0]
    titles = [
        ax.get_title(loc="left") for ax in block_analysis.scale_maps(figure_data, "mxfp4").axes
    ]
    assert sum(title.endswith(("dB (bf16 run)", "dB (mxfp8 run)")) for title in titles) == 6
