"""Tests of the artists of the plots that several figures use."""

from __future__ import annotations

import inspect
import math

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from megatron.analysis import plots
from megatron.analysis.figures.exponent_histograms import format_ranges
from megatron.analysis.plots.style import FORMAT_COLORS, TENSOR_COLORS, color_of, decades
from megatron.fake_quant import fake_quantize


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def steps(ax):
    return [patch for patch in ax.patches if isinstance(patch, StepPatch)]


def test_every_plot_is_exported_and_takes_an_axes():
    functions = [getattr(plots, name) for name in plots.__all__]
    assert len(functions) >= 17
    assert all("ax" in inspect.signature(function).parameters for function in functions)


def test_a_gradient_has_the_colour_of_its_tensor_and_a_variant_that_of_its_format_lighter():
    assert color_of("grad_weight") == TENSOR_COLORS["weight"]
    assert color_of("mxfp8:rceil") not in (FORMAT_COLORS["mxfp8"], FORMAT_COLORS["mxfp4"])


def test_exponent_histogram_draws_shares_and_the_part_of_a_range_that_is_seen(ax):
    data = pd.DataFrame(
        {"group": ["input"] * 3, "exponent": [-3, -2, -1], "share": [0.25, 0.5, 0.25]}
    )
    ranges = pd.DataFrame(
        {
            "format": ["mxfp4", "hifp8"],
            "smallest": [-2.5, -22],
            "normal": [-2, -15],
            "largest": [-0.5, 15],
        }
    )
    assert plots.plot_exponent_histogram(data, ranges, ax=ax) is ax
    [outline] = steps(ax)
    np.testing.assert_array_equal(outline.get_data().values, [0.25, 0.5, 0.25])
    np.testing.assert_array_equal(outline.get_data().edges, [-3, -2, -1, 0])
    bars = {
        to_hex(line.get_color()): line.get_xdata().tolist()
        for line in ax.get_lines()
        if line.get_linewidth() == 7.0
    }
    assert bars[FORMAT_COLORS["mxfp4"]] == [-2, -0.5]
    assert bars[FORMAT_COLORS["hifp8"]] == [-3, 0]  # cut to the visible range
    assert {text.get_text() for text in ax.texts} == {"mxfp4", "hifp8"}
    assert min(ax.get_yticks()) >= 0  # no ticks below the histogram


def test_heatmap_has_a_number_in_each_cell_and_marks_what_is_missing(ax):
    data = pd.DataFrame(
        {
            "row": ["L0", "L0", "L1", "L1"],
            "column": ["a", "b", "a", "b"],
            "value": [10.0, 20.0, math.nan, math.inf],
        }
    )
    plots.plot_heatmap(data, label="SQNR (dB)", ax=ax)
    assert [text.get_text() for text in ax.texts] == ["10.0", "20.0", "-", "exact"]
    [mesh] = ax.collections
    np.testing.assert_array_equal(mesh.get_array().filled(-1).ravel(), [10, 20, -1, 20])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["L0", "L1"]
    assert ax.yaxis_inverted()


def test_lines_mark_what_the_axis_has_no_place_for_and_are_logarithmic_over_decades(ax):
    data = pd.DataFrame(
        {
            "group": ["mxfp8"] * 4 + ["hifp8"] * 3,
            "x": [0, 1, 2, 3, 0, 1, 2],
            "value": [1.0, math.inf, 100.0, math.nan, 2.0, 3.0, 0.0],
        }
    )
    plots.plot_lines(data, xlabel="layer", ylabel="rms", logarithmic=True, ax=ax)
    lines = {line.get_label(): line for line in ax.get_lines() if line.get_linestyle() != "None"}
    assert lines["mxfp8"].get_xdata().tolist() == [0, 2]
    assert lines["hifp8"].get_xdata().tolist() == [0, 1]
    assert {name: line.get_color() for name, line in lines.items()} == {
        name: FORMAT_COLORS[name] for name in ("mxfp8", "hifp8")
    }
    marks = [
        (line.get_marker(), line.get_xdata().tolist(), line.get_color())
        for line in ax.get_lines()
        if line.get_linestyle() == "None" and len(line.get_xdata())
    ]
    assert marks == [("^", [1], FORMAT_COLORS["mxfp8"]), ("v", [2], FORMAT_COLORS["hifp8"])]
    assert ax.get_title(loc="right") == "▴ infinite, ▾ zero"
    assert ax.get_yscale() == "log"


def test_an_axis_of_zeros_alone_has_no_negative_ticks(ax):
    data = pd.DataFrame({"group": ["a"] * 3, "x": [0, 1, 2], "value": [0.0, math.inf, 0.0]})
    plots.plot_lines(data, xlabel="layer", ylabel="error", logarithmic=True, ax=ax)
    assert ax.get_yticks().tolist() == [0]
    assert ax.get_ylim()[1] == 1


def test_zeros_are_drawn_on_a_linear_axis(ax):
    data = pd.DataFrame({"group": ["mxfp8"] * 3, "x": [0, 1, 2], "value": [0.0, 1.0, 2.0]})
    plots.plot_lines(data, xlabel="layer", ylabel="rms", logarithmic=True, ax=ax)
    assert ax.get_yscale() == "linear"
    assert ax.get_lines()[0].get_ydata().tolist() == [0, 1, 2]


def test_many_formats_leave_room_for_the_histogram(ax):
    data = pd.DataFrame({"group": ["input"] * 2, "exponent": [-2, -1], "share": [0.5, 0.5]})
    names = [f"mx:e3m2:b{size}" for size in range(8, 28)]
    ranges = pd.DataFrame({"format": names, "smallest": -9.0, "normal": -5.0, "largest": 3.0})
    plots.plot_exponent_histogram(data, ranges, ax=ax)
    low, high = ax.get_ylim()
    assert low < 0 < 0.5 < high
    assert -low < high


def test_the_reach_of_hifloat4_has_its_two_bits_of_exponent():
    x = torch.tensor([7.0] + [0.0] * 63)
    assert fake_quantize(x, "hifp4").max() == 7.0
    table = pd.DataFrame(
        {
            "quantized_format": ["hifp4"],
            "scale_median": [0.0],
            "scale_min": [-3.0],
            "scale_max": [2.0],
            "amax": [7.0],
        }
    )
    [row] = format_ranges(["hifp4"], table).to_dict("records")
    assert 2.0 ** row["largest"] == pytest.approx(7.0)
    # the scales of other blocks extend the range, so that no value seems to overflow
    assert 2.0 ** row["highest"] == pytest.approx(28.0)
    assert row["lowest"] == row["smallest"] - 3


def test_the_range_of_nvfp4_goes_from_the_smallest_to_the_largest_tensor():
    table = pd.DataFrame(
        {
            "quantized_format": "nvfp4",
            "scale_median": [7.0, 6.0, 7.0],
            "scale_min": [0.0, 1.0, 2.0],
            "scale_max": [8.8, 8.8, 8.8],
            "amax": [1e-3, 2.0, 100.0],
        }
    )
    [row] = format_ranges(["nvfp4"], table).to_dict("records")
    assert row["highest"] == pytest.approx(math.log2(6) + 8.8 + math.log2(100 / 2688))
    assert row["lowest"] == pytest.approx(-1 + math.log2(1e-3 / 2688))
    assert row["largest"] == pytest.approx(math.log2(6) + 7.0 + math.log2(2 / 2688))


def test_variants_of_a_format_can_be_told_apart():
    names = ["mxfp8", "mxfp8:rceil", "mxfp8:2d", "mxfp8:sr", "mx:e3m4:b16:rceil", "mx:e2m3:b32"]
    assert len({color_of(name) for name in names}) == len(names)


def test_a_narrow_span_of_values_has_a_linear_axis(ax):
    data = pd.DataFrame({"group": ["mxfp8"] * 2, "x": [0, 1], "value": [1.0, 1.5]})
    plots.plot_lines(data, xlabel="layer", ylabel="rms", logarithmic=True, ax=ax)
    assert ax.get_yscale() == "linear"


def test_noise_does_not_fill_an_axis_and_no_power_stands_above_it(ax):
    data = pd.DataFrame({"group": ["a"] * 2, "x": [0, 1], "value": [0.013515, 0.013545]})
    plots.plot_lines(data, xlabel="layer", ylabel="rms", logarithmic=True, ax=ax)
    low, high = ax.get_ylim()
    assert low < 0.9 * 0.0136
    assert high > 1.1 * 0.0135
    ax.figure.canvas.draw()
    assert ax.yaxis.get_offset_text().get_text() == ""
    assert "0.013" in ax.get_yticklabels()[len(ax.get_yticks()) // 2].get_text()


def test_an_axis_of_decibels_spans_two_at_least(ax):
    data = pd.DataFrame({"group": ["a"] * 2, "x": [0, 1], "value": [18.8, 18.9]})
    plots.plot_lines(data, xlabel="layer", ylabel="SQNR (dB)", least=2.0, ax=ax)
    low, high = ax.get_ylim()
    assert high - low == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("limits", "names"),
    [((1, 1e4), {"1", "10", "100", "1000", "10000"}), ((10, 1e8), {"10¹", "10⁴", "10⁸"})],
)
def test_the_ticks_of_a_logarithmic_axis_have_one_style(ax, limits, names):
    ax.set_yscale("log")
    ax.set_ylim(*limits)
    decades(ax.yaxis)
    shown = {ax.yaxis.get_major_formatter()(10.0**e, 0) for e in range(9)}
    assert names <= shown


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ((0.06, 0.14), ["0.06", "0.07", "0.08", "0.09", "0.1"]),
        ((0.11, 0.49), ["0.2", "0.3", "0.4"]),
        ((0.16, 0.95), ["0.2", "0.3", "0.5", "0.7"]),
        ((0.153, 0.1665), ["0.153", "0.156", "0.159", "0.162", "0.165"]),
        ((0.009, 0.13), ["0.01", "0.1"]),
    ],
)
def test_a_logarithmic_axis_has_several_labels_in_any_view(ax, limits, names):
    ax.set_yscale("log")
    for view in (limits, (1, 1e4), limits):  # the ticks follow each view
        ax.set_ylim(*view)
        decades(ax.yaxis)
        ax.figure.canvas.draw()
    labels = [*ax.get_yticklabels(), *ax.get_yticklabels(minor=True)]
    low, high = limits
    shown = {each.get_text() for each in labels if low <= each.get_position()[1] <= high}
    assert sorted(shown - {""}, key=float) == names


def test_dots_put_a_share_of_zero_at_the_end_of_the_axis_and_say_so(ax):
    data = pd.DataFrame(
        {"group": ["mxfp8", "mxfp4", "mxfp8"], "name": ["a", "a", "b"], "value": [0.0, 0.1, 0.001]}
    )
    plots.plot_dots(data, xlabel="share", shares=True, ax=ax)
    x = np.concatenate([dots.get_offsets()[:, 0] for dots in ax.collections])
    assert sorted(x.round(9)) == [0.0001, 0.001, 0.1]
    ax.figure.canvas.draw()
    assert ax.get_xticklabels()[0].get_text() == "0"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_error_by_magnitude_is_a_step_line_a_format(ax):
    data = pd.DataFrame(
        {"format": ["mxfp8"] * 2, "exponent": [-2, -1], "relative_error": [0.02, math.nan]}
    )
    plots.plot_error_by_magnitude(data, ax=ax)
    [outline] = steps(ax)
    np.testing.assert_array_equal(outline.get_data().values, [0.02, math.nan])
    assert ax.get_yscale() == "log"


def test_boxes_stand_at_the_logarithms_of_the_quantiles(ax):
    data = pd.DataFrame(
        [
            {
                "name": "qkv input",
                "group": "input",
                "p1": 0.0,
                "p25": 0.25,
                "p50": 0.5,
                "p75": 1.0,
                "p99": 2.0,
                "largest": 4.0,
            }
        ]
    )
    plots.plot_boxes(data, ax=ax)
    [box] = ax.patches
    assert (box.get_x(), box.get_width()) == (-2, 2)
    *_, zeros = ax.get_lines()
    whiskers, median, largest = (line.get_xdata() for line in ax.get_lines()[:3])
    assert list(whiskers) == [-3, 1]  # zero is drawn at half of the smallest value
    assert list(median) == [-1, -1]
    assert list(largest) == [2]
    assert (zeros.get_marker(), list(zeros.get_xdata())) == ("v", [-3])


def test_density_is_drawn_beside_a_normal_distribution(ax):
    data = pd.DataFrame({"group": "input", "left": [-1, 0], "right": [0, 1], "density": [0.5, 0.5]})
    plots.plot_density(data, ax=ax)
    assert len(steps(ax)) == 2  # filled and outlined
    [normal] = ax.get_lines()
    assert normal.get_ydata().max() == pytest.approx(1 / math.sqrt(2 * math.pi), rel=1e-2)


def test_block_map_is_an_image_whose_ticks_name_rows_and_values(ax):
    data = pd.DataFrame([[1.0, 2.0], [3.0, np.nan]], index=[0, 10], columns=[0, 32])
    plots.plot_block_map(data, rows="token", columns="first value", ax=ax)
    [image] = ax.images
    assert image.get_array().mask.tolist() == [[False, False], [False, True]]
    assert ax.xaxis.get_major_formatter()(1, 0) == "32"
    assert ax.yaxis.get_major_formatter()(1, 0) == "10"
    assert ax.yaxis.get_major_formatter()(0.5, 0) == ""


def test_code_usage_marks_the_codes_that_never_occur(ax):
    data = pd.DataFrame({"format": "mxfp4", "value": [-1.0, -0.0, 0.0, 1.0], "count": [1, 0, 2, 1]})
    plots.plot_code_usage(data, ax=ax)
    assert [bar.get_height() for bar in ax.patches] == [0.25, 0, 0.5, 0.25]
    [unused] = ax.get_lines()
    assert unused.get_xdata().tolist() == [1]
    assert ax.get_title(loc="right") == "3 of 4 codes used"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["-1", "-0", "0", "1"]


def test_stacked_shares_begin_where_the_part_before_ends(ax):
    data = pd.DataFrame({"name": ["a", "a"], "part": ["low", "high"], "share": [0.25, 0.75]})
    plots.plot_stacked_shares(data, {"low": "#ff0000", "high": "#0000ff"}, ax=ax)
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 0.25), (0.25, 0.75)]


def test_counts_are_drawn_as_shares_of_each_format(ax):
    data = pd.DataFrame({"format": "mxfp8", "left": [0, 1], "right": [1, 2], "count": [1, 3]})
    plots.plot_counts(data, xlabel="binades", ax=ax)
    np.testing.assert_array_equal(steps(ax)[1].get_data().values, [0.25, 0.75])


def test_scales_have_a_line_over_the_range_and_a_dot_at_the_rms(ax):
    data = pd.DataFrame([{"name": "a", "group": "grad_input", "low": 0, "rms": 0.5, "high": 2.0}])
    plots.plot_scales(data, ax=ax)
    line, dot = ax.get_lines()
    assert list(line.get_xdata()) == [-1, 1]  # `low` is zero, so that the line begins at the rms
    assert list(dot.get_xdata()) == [-1]
    assert dot.get_markerfacecolor() == "white"


@pytest.mark.parametrize(
    ("plot", "columns", "options"),
    [
        (plots.plot_exponent_histogram, ["group", "exponent", "share"], {}),
        (plots.plot_lines, ["group", "x", "value"], {"xlabel": "x", "ylabel": "y"}),
        (plots.plot_dots, ["group", "name", "value"], {"xlabel": "x"}),
        (plots.plot_error_by_magnitude, ["format", "exponent", "relative_error"], {}),
        (plots.plot_counts, ["format", "left", "right", "count"], {"xlabel": "x"}),
    ],
)
def test_a_plot_without_data_says_so(ax, plot, columns, options):
    assert plot(pd.DataFrame(columns=columns), title="A", ax=ax, **options) is ax
    assert [text.get_text() for text in ax.texts] == ["no values to draw"]


def test_attention_map_masks_nan_and_draws_zeros(ax):
    plots.plot_attention_map(pd.DataFrame([[1.0, math.nan], [0.5, 0.0]]), ax=ax)
    [image] = ax.images
    assert image.get_array().mask.tolist() == [[False, True], [False, False]]
