"""Test that collecting changes nothing that training computes.

Losses, gradients, new weights and random states are bit-identical with and without a collection, in
each parallel layout, for every kind of collection, and even if nothing can be written.
"""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

SLOW = pytest.mark.slow
WORKER = Path(__file__).with_name("interference_worker.py")
LAYOUTS = {
    "one-rank": (1, ()),
    "tensor": (2, ("--tp", "2")),
    "tensor-sequence": (2, ("--tp", "2", "--sequence-parallel")),
    "pipeline": (2, ("--pp", "2", "--micro-batches", "3")),
    "interleaved": (2, ("--pp", "2", "--vpp", "2", "--layers", "4")),
    "context": (2, ("--cp", "2")),
    "experts": (2, ("--ep", "2")),
    "data": (2, ()),
    "distributed-optimizer": (2, ("--distributed-optimizer",)),
    "recompute": (1, ("--recompute",)),
}
#: A layout that communicates in every matmul, and one whose backward passes belong to earlier
#: forward passes. Each value is the type that runs with few kinds of collection, so that each kind
#: runs in both layouts and with both types.
FAST = {"tensor-sequence": "none", "pipeline": "mxfp8:sr"}
KINDS = {"everything", "ring", "flag", "first_rank", "limited", "little_memory", "vanished"}
FEW = {"everything", "ring"}


@pytest.mark.parametrize(
    ("layout", "brief"),
    [
        *(pytest.param(name, brief, id=name) for name, brief in FAST.items()),
        *(
            pytest.param(name, None, id=f"{name}-whole" if name in FAST else name, marks=SLOW)
            for name in LAYOUTS
        ),
    ],
)
def test_training_is_the_same_bits_however_tensors_are_collected(tmp_path, layout, brief):
    ranks, options = LAYOUTS[layout]
    options = (*options, *(("--brief", brief) if brief else ()))
    dtype = ("--dtype", "bf16" if layout != "context" else "fp32")
    env = environment(PYTHONPATH=REPO)
    result = forks.run(WORKER, "--folder", tmp_path, *dtype, *options, ranks=ranks, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert_the_measure_is_sharp(found, last_stage="--pp" not in options or rank == 1)
        for quant_type, of_type in found.items():
            off = of_type.pop("off")["steps"]
            assert of_type.keys() == (FEW if quant_type == brief else KINDS)
            for way, run in of_type.items():
                where = f"{way}, {quant_type}, rank {rank}"
                for step, expected in zip(run["steps"], off, strict=True):
                    for what, value in expected.items():
                        assert step[what] == value, f"{what} differ: {where}"
                assert run["partial"] == 0
                assert (run["error"] is None) == (way != "vanished"), f"{run['error']}: {where}"
            files = {way: run["files"] for way, run in of_type.items()}
            assert files["everything"] == files["ring"]
            if quant_type == brief:
                continue
            assert files["vanished"] == 0
            assert files["everything"] == files["little_memory"]
            assert files["limited"] == 50
            assert 0 < files["flag"] < files["everything"]
            assert 0 < files["first_rank"] <= files["everything"]


def assert_the_measure_is_sharp(found: dict, *, last_stage: bool) -> None:
    """Check that the compared values differ between two iterations and between two formats."""
    plain, quantized = (of_type["off"]["steps"] for of_type in found.values())
    for steps in (plain, quantized):
        first, second = steps
        assert bool(first["losses"]) == last_stage
        assert first["grads"], "there are gradients"
        for name in first["grads"]:
            assert first["grads"][name] != second["grads"][name], name
        assert first["random"] != second["random"], "dropout draws"
        assert first["weights"] != second["weights"]
    assert plain[0]["grads"] != quantized[0]["grads"]
