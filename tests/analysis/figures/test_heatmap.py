"""Tests of plot_heatmap with empty, duplicate and infinite data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from megatron.analysis.plots import plot_heatmap

COLUMNS = ["row", "column", "value"]


@pytest.fixture
def ax():
    return Figure().subplots()


def meshes(ax):
    return [each for each in ax.collections if isinstance(each, QuadMesh)]


def test_no_data_is_said_not_drawn(ax):
    data = pd.DataFrame(columns=COLUMNS)
    assert plot_heatmap(data, label="dB", title="mxfp8", ax=ax) is ax
    assert [text.get_text() for text in ax.texts] == ["no values to draw"]
    assert ax.get_title(loc="left") == "mxfp8"
    assert not meshes(ax)
    assert ax.figure.axes == [ax]  # no color bar


def test_a_cell_that_is_there_twice_is_an_error(ax):
    data = pd.DataFrame([("L0", "a", 1.0), ("L1", "a", 2.0), ("L1", "a", 3.0)], columns=COLUMNS)
    with pytest.raises(ValueError, match=r"^1 rows repeat a cell, such as 'L1', 'a'; give"):
        plot_heatmap(data, label="dB", ax=ax)
    plot_heatmap(data.drop_duplicates(["row", "column"]), label="dB", ax=ax)
    assert len(meshes(ax)) == 1


def test_cells_without_a_number_are_told_apart(ax):
    rows = [("L0", "a", 12.5), ("L0", "b", np.inf), ("L1", "a", np.nan)]
    plot_heatmap(pd.DataFrame(rows, columns=COLUMNS), label="dB", ax=ax)
    assert [text.get_text() for text in ax.texts] == ["12.5", "exact", "-", "-"]
