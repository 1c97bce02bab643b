"""Test that a frozen weight is quantized like any other and has no gradient."""

import json

import pytest

from tests.core.gpt_runs import reports
from tests.subprocesses import REPO, environment

FROZEN = ("layers.0.mlp.linear_fc1.weight", "layers.1.self_attention.linear_proj.weight")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, (), id="one-rank"),
        pytest.param(2, ("--tp", "2", "--sequence-parallel"), id="tensor-sequence"),
    ],
)
@pytest.mark.parametrize("quant_type", ["mxfp8", "bf16"])
def test_the_others_have_the_gradients_that_they_had(tmp_path, ranks, layout, quant_type):
    dump = tmp_path / "dump"
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE=quant_type)
    saving = env | {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(dump)}
    trained = reports(tmp_path / "trained", env, ranks, *layout)
    frozen = reports(tmp_path / "frozen", saving, ranks, *layout, "--freeze", *FROZEN)
    for before, after in zip(trained, frozen, strict=True):
        assert before["losses"] == after["losses"]
        without = {name for name, grad in after["grads"].items() if grad is None}
        assert without == {f"0.decoder.{name}" for name in FROZEN}
        others = before["grads"].keys() - without
        assert all(before["grads"][name] == after["grads"][name] for name in others)

    records = [
        json.loads(line)
        for index in sorted(dump.rglob("index_*.jsonl"))
        for line in index.read_text().splitlines()
    ]
    of_frozen = [
        record["tensor_name"]
        for record in records
        if f"{record['module'].removeprefix('decoder.')}.weight" in FROZEN
    ]
    assert of_frozen.count("grad_weight") == 0
    assert of_frozen.count("grad_input") == of_frozen.count("weight") == len(FROZEN) * ranks
