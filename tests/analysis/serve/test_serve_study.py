"""Tests of the map that shows the SQNR of the matmuls' results, from the table of a study."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from megatron.analysis.serve.pages import map_page
from tests.analysis.fake_dump import RUNS
from tests.analysis.serve.panels import panel, row

BF16, MXFP8 = RUNS["bf16"], RUNS["mxfp8"]
SEARCH = f"?run={BF16}&format=mxfp4&stat=output_sqnr_db&it=1"


ROWS = [
    row(10.0),
    row(14.0, micro_batch=1),
    row(12.5, gemm="dgrad"),
    row(70.0, accumulator="hopper_fp8"),
    row(71.0, recipe="all_of_it"),
    row(72.0, run_id=MXFP8),
    row(73.0, format="mxfp8"),
    row(20.0, iteration=5),
    # sums leave out NaN and Inf, so the SQNR of a result that contains them may look good
    row(74.0, gemm="wgrad", nonfinite=3),
    row(40.0, gemm="wgrad", micro_batch=1),
    row(41.0, gemm="wgrad", micro_batch=2),
    row(75.0, layer_idx=1, nonfinite=1),
]


@pytest.fixture
def studied(explorer, tmp_path, monkeypatch):
    pd.DataFrame(ROWS).to_parquet(tmp_path / "study.parquet")
    monkeypatch.setattr(explorer, "_study_path", tmp_path / "study.parquet")
    return explorer


def cells(explorer, search):
    shown = map_page.shown_map(explorer, explorer.resolved(search))
    return {
        (layer, column): (shown.values[i, j], shown.counts[i, j])
        for i, layer in enumerate(shown.rows)
        for j, column in enumerate(shown.columns)
        if shown.counts[i, j]
    }


def test_a_cell_is_the_median_of_the_results_of_its_run_iteration_and_format(studied):
    assert cells(studied, SEARCH) == {
        ("L0", "qkv fprop"): (12.0, 2),
        ("L0", "qkv dgrad"): (12.5, 1),
        ("L0", "qkv wgrad"): (40.0, 3),  # -inf, 40 and 41
        ("L1", "qkv fprop"): (-math.inf, 1),
    }
    assert cells(studied, SEARCH.replace(BF16, MXFP8)) == {("L0", "qkv fprop"): (72.0, 1)}
    assert cells(studied, SEARCH + "&gemm=dgrad") == {("L0", "qkv dgrad"): (12.5, 1)}
    text = panel(studied, "map", SEARCH)
    assert "SQNR of the results in mxfp4, iteration 1" in text
    assert "L0 qkv fprop: 12.0 dB (2 results)" in text
    assert "L1 qkv fprop: -\\u221e dB" in text
    assert "A cell is the median of up to 3 results. 2 of 7 results hold NaN or Inf" in text


def test_iterations_are_columns_of_one_module(studied):
    search = SEARCH + "&by=iteration&place=qkv input"
    assert cells(studied, search + "&gemm=fprop") == {
        ("L0", "1"): (12.0, 2),
        ("L0", "5"): (20.0, 1),
        ("L1", "1"): (-math.inf, 1),
    }
    assert cells(studied, search)["L0", "1"] == (13.25, 6)  # -inf, 10, 12.5, 14, 40 and 41
    assert "SQNR of the results in mxfp4: qkv" in panel(studied, "map", search)


def test_a_cell_with_inf_on_both_sides_of_the_middle_shows_the_worse(
    explorer, tmp_path, monkeypatch
):
    rows = [row(math.inf), row(30.0, micro_batch=1, nonfinite=1)]
    pd.DataFrame(rows).to_parquet(tmp_path / "study.parquet")
    monkeypatch.setattr(explorer, "_study_path", tmp_path / "study.parquet")
    assert cells(explorer, SEARCH) == {("L0", "qkv fprop"): (-math.inf, 2)}


@pytest.mark.parametrize(
    ("changes", "search", "why"),
    [
        ({"run_id": "another"}, "", "This run was not studied."),
        ({"recipe": "all_of_it"}, "", "This run was not studied."),
        ({"iteration": 5}, "", "Iteration 1 of this run was not studied; studied: 5."),
        ({"format": "nvfp4"}, "", "mxfp4 was not studied in this run; studied: nvfp4."),
        ({}, "&gemm=dgrad", "The GEMM dgrad was not studied here."),
        ({}, "&by=iteration&place=core query", "The matmuls of core were not studied in this run."),
    ],
)
def test_the_map_names_what_was_not_studied(explorer, tmp_path, monkeypatch, changes, search, why):
    pd.DataFrame([row(10.0, **changes)]).to_parquet(tmp_path / "study.parquet")
    monkeypatch.setattr(explorer, "_study_path", tmp_path / "study.parquet")
    assert why in panel(explorer, "map", SEARCH + search)
    both = panel(explorer, "map", f"{SEARCH}{search}&with={MXFP8}")
    assert why in both


def test_a_table_without_accumulators_is_read(explorer, tmp_path, monkeypatch):
    table = pd.DataFrame([row(10.0)]).drop(columns="accumulator")
    table.to_parquet(tmp_path / "study.parquet")
    monkeypatch.setattr(explorer, "_study_path", tmp_path / "study.parquet")
    assert cells(explorer, SEARCH) == {("L0", "qkv fprop"): (10.0, 1)}
