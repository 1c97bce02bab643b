"""Test that operands that do not fit together are reported and do not end the study."""

from __future__ import annotations

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.study.operands import matmuls
from megatron.analysis.study.passes import counted, find_passes
from megatron.analysis.verification.recorded_formats import NotCheckedError
from tests.analysis.study import small_dump


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return TensorStore(small_dump.write(tmp_path_factory.mktemp("operands") / "bf16", layers=1))


def operands(store, layer_type, **changed):
    """Return the operations of the first pass, with some tensors replaced by zeros of any shape."""
    passes = find_passes(store, store.records).passes
    of_pass = next(each for each in passes if each.layer_type == layer_type)

    def load(row):
        if row.tensor_name in changed:
            return torch.zeros(changed[row.tensor_name], dtype=torch.bfloat16)
        return store.load(row)

    return [each.operation for each in matmuls(of_pass, load)]


def test_the_operands_of_a_dump_fit(store):
    assert operands(store, "linear") == ["linear"]
    assert operands(store, "attention") == ["qk", "pv"]


@pytest.mark.parametrize(
    ("layer_type", "name", "shape", "words"),
    [
        ("linear", "input", [8192], r"input of shape \[8192\], which has too few dimensions"),
        ("linear", "weight", [96], r"weight of shape \[96\]"),
        ("linear", "input", [64, 2, 63], r"do not fit together: input \[128, 63\]"),
        ("linear", "weight", [0, 64], "an empty operand"),
        ("attention", "query", [8192], r"query of shape \[8192\]"),
        ("attention", "key", [64, 2, 32], r"key of shape \[64, 2, 32\]"),
        ("attention", "key", [64, 2, 3, 32], "do not fit together"),
        ("attention", "value", [63, 2, 1, 32], "do not fit together"),
        ("attention", "grad_output", [64, 64], r"grad_output of shape \[64, 64\]"),
        ("attention", "grad_output", [63, 2, 64], "do not fit together"),
    ],
)
def test_other_shapes_are_refused_with_a_reason(store, layer_type, name, shape, words):
    with pytest.raises(NotCheckedError, match=words):
        operands(store, layer_type, **{name: shape})


def test_passes_that_are_left_out_for_one_reason_are_counted_together():
    why = "attention with dropout 0.1"
    assert counted([(why, "layer 3"), (why, "layer 0"), ("a mask", "layer 1")]) == {
        f"passes with {why} (first: layer 3)": 2,
        "passes with a mask (layer 1)": 1,
    }
