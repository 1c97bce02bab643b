"""The gradient rule, on gradients whose ratio to their noise is known in closed form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from megatron.analysis.study.candidates import candidates_of
from megatron.analysis.study.gemm_errors import Settings, errors_of
from megatron.analysis.study.gradients import gradients_of, rule
from megatron.analysis.study.operands import Matmul
from megatron.analysis.study.verdict import cells
from megatron.fake_quant.gradient_rule import THRESHOLD, gradient_to_noise, ratio_of_sqnr

SIZE = 512  #: tokens, inputs and outputs of the layer, and values per block of the format
FORMAT = f"mx:e2m1:b{SIZE}:floor"
MODULE = "decoder.layers.0.mlp.linear_fc2"


def gradient_of_columns(small: float) -> torch.Tensor:
    """Return a gradient with one 6 in each column and the value `small` everywhere else.

    The largest number of E2M1 is 6, so the scale of a column is 1. Values below 0.25 are rounded to
    0, and they are the whole error.
    """
    dy = torch.full((SIZE, SIZE), small)
    dy.fill_diagonal_(6.0)
    return dy.bfloat16()


def rows_of(small: float) -> pd.DataFrame:
    """Return the rows of a layer whose input and weight are identity matrices, which are exact.

    Then dgrad and wgrad are the gradient itself and its transpose.
    """
    one = torch.eye(SIZE).bfloat16()
    fields = {"module": MODULE, "layer_idx": 0, "iteration": 1, "micro_batch": 0, "rank": 0}
    row = SimpleNamespace(**fields, run_id="a", quant_type="bf16")
    matmul = Matmul(row, "linear", one, one, gradient_of_columns(small))
    [(_, rows, _)] = errors_of(matmul, candidates_of([FORMAT], []), Settings(1, budget=False))
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("small", "flagged"), [(15 / 64, True), (1 / 8, False)])
def test_the_ratio_is_that_of_the_constructed_gradient(small, flagged):
    table = rows_of(small)
    noise = (SIZE - 1) * small**2
    ratio = math.sqrt((36 + noise) / noise)
    assert (ratio < math.sqrt(3)) == flagged, "the two cases lie on both sides of the threshold"
    assert math.isnan(table["gradient_to_noise"][0]), "fprop has no gradient"
    assert table["gradient_to_noise"][1:].tolist() == pytest.approx([ratio] * 2, rel=1e-6)
    gradients = gradients_of(cells(table))
    assert gradients["place"].tolist() == ["fc2 dgrad", "fc2 wgrad"]
    assert gradients["gradient_to_noise"].tolist() == pytest.approx([ratio] * 2, rel=1e-6)
    assert gradients["flagged"].tolist() == [flagged] * 2
    text = rule(gradients)
    if flagged:
        assert f"2 of 2 gradients are too noisy in {table['format'][0]}" in text
        assert f"fc2 dgrad of layer 0, ratio {ratio:.2g}; fc2 wgrad of layer 0" in text
    else:
        assert text.endswith("none of 2 gradients is too noisy.")


def cell(layer, squared, place="fc2 wgrad", candidate="mxfp4"):
    return {"candidate": candidate, "place": place, "layer_idx": layer, "squared": squared}


def test_layers_are_named_the_noisiest_place_first():
    limit = 1 / 3
    table = [cell(layer, limit * (1 + 1e-9)) for layer in (0, 1, 3)]
    table += [cell(2, limit), cell(4, math.nan), cell(5, 0.0)]
    table += [cell(0, 1.0, place=f"{name} dgrad") for name in ("fc1", "proj", "qkv")]
    table += [cell(0, 4.0, place="QK grad_key"), cell(0, 9.0, place="fc1 fprop")]
    gradients = gradients_of(pd.DataFrame(table))
    assert len(gradients) == len(table) - 1, "a forward result is no gradient"
    assert gradients["flagged"].sum() == 7
    assert rule(gradients).endswith(
        "7 of 10 gradients are too noisy in mxfp4 (QK grad_key of layer 0, ratio 0.5; fc1 dgrad of "
        "layer 0, ratio 1; proj dgrad of layer 0, ratio 1; 2 more)."
    )
    assert gradients["gradient_to_noise"].max() == math.inf


def test_both_definitions_of_the_ratio_agree():
    for ratio in (0.5, THRESHOLD, 100.0):
        assert gradient_to_noise(1 / ratio) == pytest.approx(ratio)
        assert ratio_of_sqnr(20 * math.log10(ratio)) == pytest.approx(ratio)
    assert gradient_to_noise(0.0) == ratio_of_sqnr(math.inf) == math.inf
