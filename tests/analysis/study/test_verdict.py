"""Test that the sentences of the verdict are true for any input."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from megatron.analysis.plots.pareto import plot_pareto
from megatron.analysis.study.candidates import candidates_of
from megatron.analysis.study.engine import COLUMNS, Study
from megatron.analysis.study.page import page
from megatron.analysis.study.pictures import draw_verdict, points_of
from megatron.analysis.study.proposal import places_of, propose
from megatron.analysis.study.verdict import by_candidate, cells, verdict

FC = "decoder.layers.{}.mlp.linear_{}"


def result(errors, *, bits=None, nonfinite=0) -> Study:
    """Return a study of `fc1` and `fc2`, given relative errors by layer."""
    bits = bits or {"mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}
    rows = [
        dict.fromkeys(COLUMNS)
        | {
            "iteration": 1,
            "layer_idx": layer,
            "module": FC.format(layer, module),
            "operation": "linear",
            "gemm": "fprop",
            "format": fmt,
            "relative_error": error,
            "bits": bits[fmt],
            "values": 100,
            "matmul_bits": bits[fmt],
            "matmul_values": 300,
            "nonfinite": nonfinite,
            "reference_nonfinite": 0,
        }
        for fmt, modules in errors.items()
        for module, by_layer in modules.items()
        for layer, error in enumerate(by_layer)
    ]
    names = list(errors)
    return Study(pd.DataFrame(rows), pd.DataFrame(), candidates_of(names, []), [], Counter())


def test_the_places_that_lose_most_are_named_with_their_layers():
    errors = {
        "mxfp8": {"fc1": [0.01] * 4, "fc2": [0.01] * 4},
        "mxfp4": {"fc1": [0.1] * 4, "fc2": [0.3, 0.4, 0.1, 0.5]},
    }
    ranking, losses, front = verdict(result(errors))
    assert ranking == (
        "The median SQNR of 8 GEMM results in 4 layers is 40.0 dB in mxfp8 and 20.0 dB in mxfp4."
    )
    assert losses == "In mxfp4, fc2 fprop of layers 0 to 1, 3 (6.0 to 10.5 dB) loses most."
    assert "mxfp4 (4.25) and mxfp8 (8.25) make the most" in front


def test_one_format_and_one_layer():
    ranking, losses, front = verdict(result({"mxfp4": {"fc1": [0.1]}}))
    assert ranking == "The median SQNR of 1 GEMM result in 1 layer is 20.0 dB in mxfp4."
    assert losses.startswith("In mxfp4, no result lies 1 dB below the median; the lowest is 20.0")
    assert front == "mxfp4 takes 4.25 bits per value, scales included."


def test_ties_are_all_on_the_front_and_worse_ones_are_not():
    errors = {name: {"fc1": [0.1, 0.1]} for name in ("mxfp8", "mxfp4", "nvfp4")}
    summary = by_candidate(cells(result(errors).rows)).set_index("candidate")
    assert summary["front"].to_dict() == {"mxfp8": False, "mxfp4": True, "nvfp4": False}
    same = by_candidate(cells(result(errors, bits=dict.fromkeys(errors, 8.0)).rows))
    assert same["front"].all()


@pytest.mark.parametrize("error", [math.nan, 0.0])
def test_nan_and_exact_results_are_said_and_drawn(error):
    study = result({"mxfp8": {"fc1": [error]}, "mxfp4": {"fc1": [0.1]}}, nonfinite=error != error)
    sentences = verdict(study)
    text = " ".join(sentences)
    assert ("NaN or Inf occurs" in text) == math.isnan(error)
    assert ("infinite (no error) in mxfp8" in text) == (error == 0)
    assert "nan" not in text
    assert draw_verdict(study, sentences)[:4] == b"\x89PNG"


def test_a_format_that_overflows_is_not_judged_by_its_finite_results():
    """Two of three nvfp4 results have NaN or Inf; the finite one is the best of all results."""
    errors = {"mxfp8": {"fc1": [0.02, 0.02, 0.02]}, "nvfp4": {"fc1": [0.001, 0.001, 0.001]}}
    study = result(errors)
    study.rows.loc[
        study.rows["format"].eq("nvfp4") & (study.rows["layer_idx"] < 2), "nonfinite"
    ] = 3
    ranking, losses, front = verdict(study)
    assert ranking == (
        "The median SQNR of 3 GEMM results in 3 layers is 34.0 dB in mxfp8 and not finite in "
        "nvfp4; NaN or Inf occurs in 2 results of nvfp4."
    )
    more = result(errors)
    more.rows.loc[more.rows["layer_idx"] < 1, "nonfinite"] = 3
    assert "occurs in 1 result of each of mxfp8 and nvfp4." in verdict(more)[0]
    more.rows.loc[more.rows["format"].eq("nvfp4"), "nonfinite"] = 3
    assert "occurs in 1 result of mxfp8 and 3 of nvfp4." in verdict(more)[0]
    assert losses.startswith("In mxfp8, ")
    assert front == "mxfp8 (8.25) makes the most of its bits per value, scales included."
    study.rows.loc[study.rows["layer_idx"] == 1, "nonfinite"] = 0  # now the median is finite
    summary = by_candidate(cells(study.rows)).set_index("candidate")
    assert summary.loc["nvfp4", "sqnr_db"] == pytest.approx(60.0)
    assert summary["front"].to_dict() == {"nvfp4": False, "mxfp8": True}


def test_results_that_are_zero_in_high_precision_are_not_judged():
    study = result({"mxfp8": {"fc1": [math.nan, 0.01]}, "mxfp4": {"fc1": [math.nan, 0.1]}})
    assert verdict(study)[0] == (
        "The median SQNR of 1 GEMM result in 1 layer is 40.0 dB in mxfp8 and 20.0 dB in mxfp4."
    )
    assert verdict(result({"mxfp8": {"fc1": [math.nan, math.nan]}})) == [
        "All results are zero, NaN or Inf in high precision, so no relative error is defined."
    ]


def test_only_results_with_an_error_lose_most():
    study = result({"mxfp8": {"fc1": [0.0] * 11 + [0.1]}})
    assert verdict(study)[1] == "In mxfp8, fc1 fprop of layer 11 (20.0 dB) loses most."
    assert verdict(result({"mxfp8": {"fc1": [0.0, 0.0]}}))[1] == "In mxfp8, no result has an error."


def test_the_mixture_under_a_budget_is_one_more_point():
    errors = {"mxfp8": {"fc1": [0.01, 0.01, 0.01]}, "mxfp4": {"fc1": [0.1, 0.02, 0.3]}}
    study = result(errors)
    proposal = propose(places_of(study.rows), 7)
    assert [option.format for _, option in proposal.choices] == ["mxfp8", "mxfp4", "mxfp8"]
    points = points_of(study, proposal).set_index("candidate")
    assert set(points.index) == {"mxfp8", "mxfp4", "recipe.yaml"}
    assert points.loc["recipe.yaml", "bits"] == pytest.approx((8.25 + 4.25 + 8.25) / 3)
    assert points.loc["recipe.yaml", "sqnr_db"] == pytest.approx(40.0), "median of 0.01, 0.02, 0.01"
    assert points["front"].to_dict() == {"recipe.yaml": True, "mxfp8": False, "mxfp4": True}
    assert set(points_of(study)["candidate"]) == {"mxfp8", "mxfp4"}


def test_an_empty_study():
    empty = Study(pd.DataFrame(columns=list(COLUMNS)), pd.DataFrame(), [], [], Counter())
    assert verdict(empty) == ["No matmul of the dump could be studied."]


def test_points_that_are_not_drawn_are_listed_where_they_cover_nothing():
    names = [f"mxfp8:t{top}" for top in range(20)]
    data = pd.DataFrame({"name": ["a", *names], "x": 4, "y": [0.2] + [0.0] * 20, "front": True})
    _, ax = plt.subplots()
    plot_pareto(data, xlabel="bits", ylabel="error", title="A long title" * 3, ax=ax)
    label, *lines = ax.get_xlabel().splitlines()
    assert (label, ax.get_title(loc="right")) == ("bits", "")
    assert " ".join(lines).endswith(f"not finite: {', '.join(names)}")
    assert max(map(len, lines)) <= 64
    plt.close("all")


def test_the_front_is_a_line_through_its_points():
    data = pd.DataFrame(
        {
            "name": ["a", "b", "c"],
            "x": [4, 6, 8],
            "y": [0.2, 0.05, 0.1],
            "front": [True, True, False],
        }
    )
    _, ax = plt.subplots()
    assert plot_pareto(data, xlabel="bits", ylabel="error", ax=ax) is ax
    [line] = ax.get_lines()
    assert line.get_xdata().tolist() == [4, 6]
    assert {text.get_text() for text in ax.texts} == {"a", "b", "c"}
    plt.close("all")


def test_points_that_coincide_share_a_label_and_the_filled_one_is_seen():
    data = pd.DataFrame(
        {
            "name": ["nvfp4", "nvfp4+unit", "mxfp8"],
            "x": [4.5, 4.5, 8.25],
            "y": [0.08, 0.0801, 0.03],
            "front": [True, False, True],
        }
    )
    _, ax = plt.subplots()
    plot_pareto(data, xlabel="bits", ylabel="error", ax=ax)
    assert {text.get_text() for text in ax.texts} == {"nvfp4\nnvfp4+unit", "mxfp8"}
    filled, hollow = ax.collections[0], ax.collections[1]
    assert filled.get_zorder() > hollow.get_zorder()
    plt.close("all")


def test_the_table_of_all_places_counts_results_that_are_not_finite_as_the_worst():
    study = result({"mxfp8": {"fc1": [0.03] * 4}, "nvfp4": {"fc1": [0.001] * 4}})
    overflows = study.rows["format"].eq("nvfp4") & (study.rows["layer_idx"] < 3)
    study.rows.loc[overflows, "nonfinite"] = 3
    text = page(study, Path("bf16"), [], {}).decode()
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    assert ["fc1 fprop", "nvfp4", "4", "not finite", "not finite", "4.5"] in rows
    assert ["fc1 fprop", "mxfp8", "4", "30.5", "30.5", "8.25"] in rows


def test_the_bits_of_a_recipe_are_a_mean_over_the_values_of_its_operands():
    """Two experts with the same name have 8 and 1000 tokens, and only their weights are small."""
    study = result({"mxfp8": {"fc1": [0.03, 0.03]}})
    study.rows["layer_idx"] = 0
    study.rows["bits"], study.rows["values"] = [5.0, 15.0], [100, 900]
    assert by_candidate(cells(study.rows))["bits"].tolist() == [pytest.approx(14.0)]
