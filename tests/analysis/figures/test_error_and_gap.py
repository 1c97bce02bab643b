"""Tests of the artists in the plot of offline errors against gaps."""

from __future__ import annotations

import itertools
import math

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from megatron.analysis.plots import plot_error_and_gap


@pytest.fixture
def ax():
    figure, axes = plt.subplots(figsize=(9, 6))
    yield axes
    plt.close(figure)


def points(names, gaps, half=0.002):
    errors = np.geomspace(0.02, 0.2, len(names))
    gaps = np.array(gaps)
    table = {"name": names, "x": errors, "y": gaps, "low": gaps - half, "high": gaps + half}
    return pd.DataFrame(table)


def names_of(ax):
    return {text.get_text(): text for text in ax.texts}


def test_every_configuration_has_a_dot_an_interval_and_a_name(ax):
    data = points(["mxfp8", "nvfp4", "mxfp4"], [0.003, 0.02, 0.05])
    assert plot_error_and_gap(data, xlabel="error", ylabel="gap", title="T", ax=ax) is ax
    assert set(names_of(ax)) == {"mxfp8", "nvfp4", "mxfp4"}
    assert [line.get_ydata().tolist() for line in ax.lines] == [
        pytest.approx([row.low, row.high]) for row in data.itertuples()
    ]
    assert len(ax.collections) == 3
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_title(loc="left") == "T"


def test_gaps_around_zero_have_a_linear_range_as_wide_as_the_intervals(ax):
    plot_error_and_gap(points(["mxfp8", "mxfp4"], [-0.001, 0.05]), ax=ax)
    assert ax.get_yscale() == "symlog"
    assert ax.yaxis.get_transform().linthresh == pytest.approx(0.002)


def test_names_do_not_overlap_where_there_is_room(ax):
    data = points([f"configuration_{number}" for number in range(20)], np.full(20, 0.01))
    plot_error_and_gap(data, ax=ax)
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    # The extent of an annotation contains its line; only the text itself must be free.
    sizes = [
        type(box).from_bounds(*box.p0, box.width, box.height)
        for box, text in zip(boxes, ax.texts, strict=True)
        if text.arrow_patch is None
    ]
    assert all(not a.overlaps(b) for a, b in itertools.combinations(sizes, 2))


def test_what_cannot_be_drawn_is_listed(ax):
    data = points(["mxfp8", "mxfp4", "mxint4"], [0.01, math.inf, 0.02])
    data.loc[2, "x"] = math.nan
    plot_error_and_gap(data, ax=ax)
    assert set(names_of(ax)) == {"mxfp8"}
    note = "not drawn (diverged, or without an offline error): mxfp4, mxint4"
    assert " ".join(ax.get_xlabel().splitlines()[1:]) == note
    figure, empty = plt.subplots()
    plot_error_and_gap(data.iloc[1:], ax=empty)
    assert "no values to draw" in names_of(empty)
    assert " ".join(empty.get_xlabel().splitlines()) == note
    plt.close(figure)


def test_a_single_seed_has_no_interval(ax):
    data = points(["mxfp8", "mxfp4"], [0.01, 0.02]).assign(low=math.nan, high=math.nan)
    plot_error_and_gap(data, ax=ax)
    assert not ax.lines
    assert len(ax.collections) == 2
