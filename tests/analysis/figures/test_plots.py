"""Tests of the artists of the plots in quick_analysis.png, and of the shared style."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from megatron.analysis.plots import plot_magnitude_histogram, plot_shares, plot_value_histogram
from megatron.analysis.plots.style import (
    FORMAT_COLORS,
    color_of,
    colors_of,
    lighter,
    percent,
    short_count,
)


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def bars(ax):
    """Return the name and the share of each bar, without the gray track behind it."""
    rows = [text.get_text() for text in ax.get_yticklabels()]
    widths = [patch.get_width() for patch in ax.patches][1::2]
    return {row: widths[2 * i : 2 * i + 2] for i, row in enumerate(rows)}


SHARES = pd.DataFrame({"name": ["mxfp8", "bf16"], "tensors": [30, 10], "values": [1000, 3000]})


def test_shares_are_drawn_in_order_with_both_quantities(ax):
    assert plot_shares(SHARES, title="By type", ax=ax) is ax
    assert bars(ax) == {"mxfp8": [0.75, 0.25], "bf16": [0.25, 0.75]}
    assert ax.get_title(loc="left") == "By type"
    texts = [text.get_text() for text in ax.texts]
    assert texts[:4] == ["75 %", "30 tensors", "25 %", "1 K values"]


def test_each_format_has_its_colour_and_its_values_a_lighter_one(ax):
    plot_shares(SHARES, ax=ax)
    colors = [to_hex(patch.get_facecolor()) for patch in ax.patches][1::2]
    blue, gray = FORMAT_COLORS["mxfp8"], FORMAT_COLORS["bf16"]
    assert colors == [blue, lighter(blue, 0.5), gray, lighter(gray, 0.5)]


def test_many_parts_are_folded_into_one_and_none_is_lost(ax):
    names = [f"type{i}" for i in range(20)]
    data = pd.DataFrame({"name": names, "tensors": 1, "values": 2})
    plot_shares(data, ax=ax)
    found = bars(ax)
    assert len(found) == 8
    assert found["13 others"] == pytest.approx([0.65, 0.65])
    assert sum(width for width, _ in found.values()) == pytest.approx(1.0)


def test_labels_of_the_shares_stand_side_by_side(ax):
    plot_shares(SHARES, ax=ax)
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


BINS = pd.DataFrame(
    {
        "group": ["all values"] * 2 + ["forward"] * 2,
        "label": ["all values"] * 2 + ["forward, rms 1"] * 2,
        "left": [-1.0, 0.0] * 2,
        "right": [0.0, 1.0] * 2,
        "count": [5, 100000, 5, 7],
    }
)


def test_the_value_histogram_is_symmetric_and_logarithmic(ax):
    assert plot_value_histogram(BINS, note="from -1 to 1", ax=ax) is ax
    assert ax.get_xlim() == (-1.0, 1.0)
    assert ax.get_yscale() == "log"
    low, high = ax.get_ylim()
    assert low < 1
    assert high > 100000
    filled, outline = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    assert filled.get_fill()
    assert not outline.get_fill()
    assert to_hex(outline.get_edgecolor()) == color_of("forward")
    assert outline.get_data().values.tolist() == [5, 7]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["all values", "forward, rms 1"]
    assert ax.get_title(loc="right") == "from -1 to 1"


def test_the_magnitude_histogram_has_an_outline_a_group_over_whole_binades(ax):
    data = pd.DataFrame(
        {
            "group": ["forward"] * 3 + ["backward"] * 3,
            "exponent": [-2, -1, 0] * 2,
            "count": [1, 2, 3, 4, 5, 6],
        }
    )
    assert plot_magnitude_histogram(data, ax=ax) is ax
    assert ax.get_xlim() == (-2, 1)
    outlines = [patch for patch in ax.patches if not patch.get_fill()]
    assert [patch.get_data().values.tolist() for patch in outlines] == [[1, 2, 3], [4, 5, 6]]
    assert outlines[0].get_data().edges.tolist() == [-2, -1, 0, 1]
    assert [to_hex(patch.get_edgecolor()) for patch in outlines] == [
        color_of("forward"),
        color_of("backward"),
    ]


def test_a_name_has_one_colour_and_formats_differ():
    assert color_of("mxfp8") == color_of("mxfp8_e4m3") == FORMAT_COLORS["mxfp8"]
    assert color_of("hif8") == color_of("hifp8")
    assert len(set(FORMAT_COLORS.values())) == len(FORMAT_COLORS)
    scoped = [color_of(name) for name in ("mxfp4", "FA_linear_mxfp4", "linear_mxfp4", "FA_mxfp4")]
    assert len(set(scoped)) == 4
    assert color_of("mx:e3m4:b16:rceil") == color_of("mx:e3m4:b16:rceil")


def test_the_modules_of_one_figure_can_be_told_apart():
    parts = ["qkv", "proj", "fc1", "fc2", "router", "q_down", "kv_down", "kv_up"]
    colors = colors_of(["mxfp8", *parts])
    assert len(set(colors.values())) == len(colors)
    assert colors["mxfp8"] == FORMAT_COLORS["mxfp8"]
    assert colors["qkv"] == colors_of(["qkv"])["qkv"], "the first module keeps its own color"
    assert len(colors_of(map(str, range(20)))) == 20, "more names than colors"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 K"),
        (12345, "12.3 K"),
        (999400, "999 K"),
        (999500, "1 M"),
        (29622272, "29.6 M"),
        (1.5e9, "1.5 G"),
        (2e12, "2 T"),
    ],
)
def test_short_counts(count, text):
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.99999, ">99.9 %"), (0.5, "50 %"), (1e-6, "0.0001 %")],
)
def test_percentages_neither_hide_a_little_nor_claim_all(share, text):
    assert percent(share) == text
