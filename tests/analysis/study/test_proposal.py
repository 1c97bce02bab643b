"""Test that the proposal keeps the budget, beats a single format, and is a recipe that loads."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest

from megatron.analysis.study.proposal import Option, Place, places_of, propose, ranges, recipe_text
from megatron.analysis.study.verdict import proposed
from megatron.fake_quant.policy import resolve
from megatron.fake_quant.quant_type import gemm_formats, parse_format

BITS = {"bf16": 16.0, "mxfp8": 8.25, "mxfp6_e2m3": 6.25, "mxfp4:rceil": 4.25}
FC1, CORE = "decoder.layers.{}.mlp.linear_fc1", "decoder.layers.{}.self_attention.core_attention"


def place(layer, errors, *, module=FC1, operation="linear", values=1000.0):
    options = tuple(
        Option(name, bits, error) for (name, bits), error in zip(BITS.items(), errors, strict=True)
    )
    return Place(layer, module.format(layer), operation, values, options)


PLACES = [
    place(0, (1e-6, 1e-3, 2e-3, 9e-1)),
    place(1, (1e-6, 1e-3, 2e-3, 4e-3)),
    place(2, (1e-6, 5e-3, 2e-3, 8e-2), values=300.0),
    place(0, (1e-6, 1e-3, 1e-3, 2e-1), module=CORE, operation="qk", values=2000.0),
    place(0, (1e-6, 1e-3, 3e-3, 5e-3), module=CORE, operation="pv", values=2000.0),
]


@pytest.mark.parametrize("budget", [4.25, 4.5, 5.0, 6.0, 6.5, 8.0, 12.0, 16.0])
def test_the_choice_keeps_the_budget_and_is_near_the_optimum(budget):
    proposal = propose(PLACES, budget)
    total = sum(place.values for place in PLACES)
    mean = sum(BITS[option.format] * place.values for place, option in proposal.choices) / total
    assert mean <= budget + 1e-6
    assert proposal.bits == pytest.approx(mean)
    best = min(
        sum(option.error for option in options)
        for options in itertools.product(*(place.options for place in PLACES))
        if sum(o.bits * p.values for o, p in zip(options, PLACES, strict=True)) / total
        <= budget + 1e-9
    )
    assert proposal.error >= best
    assert proposal.error <= best + 0.01, "the greedy choice misses at most one small exchange"
    assert proposal.uniform is None or proposal.error <= proposal.uniform.error


def test_a_budget_below_the_cheapest_format_is_refused():
    with pytest.raises(ValueError, match=r"take 4.25 bits per value; give more bits"):
        propose(PLACES, 4.2)
    with pytest.raises(ValueError, match="--bits needs formats whose results are finite"):
        propose([], 8)


@pytest.mark.parametrize("budget", [4.25, 5.5, 16.0])
def test_training_loads_the_recipe_and_finds_the_chosen_formats(tmp_path, budget):
    proposal = propose(PLACES, budget)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(proposal, 'a "dump"\nof: tensors'))
    policy = resolve({"recipe": str(path)}, {})
    for chosen, option in proposal.choices:
        fmt = parse_format(option.format)
        expected = None if fmt is None else gemm_formats(chosen.operation, fmt)
        plan = policy.plan(chosen.operation, chosen.module, chosen.layer, 3)
        assert plan.at(1) == expected, (chosen, option)
    outside = policy.plan("linear", "decoder.layers.0.mlp.linear_fc2", 0, 3)
    assert outside.at(1) is None, "what was not studied stays in high precision"


def row(**values):
    common = {"layer_idx": 0, "module": "m.layers.0.a", "operation": "linear", "gemm": "fprop"}
    numbers = {"relative_error": 0.1, "nonfinite": 0, "bits": 4.25, "values": 10, "recipe": None}
    row = common | numbers | {"format": "mxfp4"} | values
    return {"matmul_bits": row["bits"], "matmul_values": 2 * row["values"]} | row


def test_places_average_passes_and_leave_out_what_is_not_finite():
    rows = pd.DataFrame(
        [
            row(relative_error=0.1),
            row(relative_error=0.3),
            row(gemm="wgrad", relative_error=0.2),
            row(format="nvfp4", bits=4.5, nonfinite=3),
            row(format="none", recipe="mine", relative_error=0.0),
            row(layer_idx=-1, module="output_layer"),
        ]
    )
    [only] = places_of(rows)
    [option] = only.options
    assert option.format == "mxfp4"
    assert option.bits == pytest.approx(4.25)
    assert option.error == pytest.approx((0.01 + 0.09) / 2 + 0.04)
    assert math.isclose(only.values, 20)


def test_a_result_that_is_zero_in_high_precision_leaves_no_matmul_out():
    """A masked micro-batch has gradients of zero, whose relative error is undefined."""
    masked = [row(gemm="wgrad", relative_error=math.nan, format=name) for name in BITS]
    rows = [row(format=name, bits=bits) for name, bits in BITS.items()]
    [only] = places_of(pd.DataFrame([*rows, *masked]))
    assert [option.format for option in only.options] == list(BITS)
    assert [option.error for option in only.options] == pytest.approx([0.01] * len(BITS))


def test_a_matmul_that_no_format_computes_is_said():
    spoiled = {"module": "m.layers.0.b", "nonfinite": 1}
    rows = [row(), row(format="mxfp8", bits=8.25), row(**spoiled), row(format="mxfp8", **spoiled)]
    proposal = propose(places_of(pd.DataFrame(rows)), 8.25)
    assert [place.module for place, _ in proposal.choices] == ["m.layers.0.a"]
    assert [place.module for place in proposal.without] == ["m.layers.0.b"]
    assert "1 matmul has NaN or Inf in every format, so it stays in bf16" in proposed(proposal)


def test_ranges():
    assert ranges([3, 0, 1, 2, 8]) == "0-3,8"
    assert ranges([5]) == "5"
