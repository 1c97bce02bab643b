"""Compare each of the 18 operand slots of a transformer layer of the model with float64."""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("slots_worker.py")
#: the results that each slot may change: everything downstream of its GEMM
DOWNSTREAM = {
    "linear": {"fprop": ["y"], "dgrad": ["dx"], "wgrad": ["dw"]},
    # P follows from S and affects all results; dQ and dK affect no other result.
    "qk": {"fprop": ["o", "dq", "dk", "dv"], "dgrad": ["dq"], "wgrad": ["dk"]},
    "pv": {"fprop": ["o"], "dgrad": ["dq", "dk"], "wgrad": ["dv"]},
}


@pytest.fixture(scope="module")
def report():
    done = forks.run(WORKER, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["mxfp4", "hifp8"])
@pytest.mark.parametrize("slot", ["fprop_a", "fprop_b", "dgrad_c", "dgrad_b", "wgrad_c", "wgrad_a"])
@pytest.mark.parametrize("operation", ["linear", "qk", "pv"])
def test_a_slot_s_gemm_is_that_of_the_quantized_operand(report, operation, slot, name):
    found = report[f"{operation} {slot} {name}"]
    assert found["quantized"] == 1, "exactly one operand is quantized"
    assert found["operand"] < 1e-6, "the operand differs from that of the float64 chain"
    # float32 sums of at most 64 terms, through a softmax
    assert all(error < 2e-6 for error in found["errors"].values()), found["errors"]
    assert found["changed"] == DOWNSTREAM[operation][slot.partition("_")[0]]


@pytest.mark.parametrize("name", ["mxfp4", "hifp8"])
@pytest.mark.parametrize("operation", ["linear", "qk", "pv"])
def test_a_straight_through_backward_pass_has_the_forward_operands(report, operation, name):
    found = report[f"{operation} straight_through {name}"]
    assert found["quantized"] == 2, "only the two operands of the forward pass are quantized"
    assert found["operand"] < 1e-6
    assert all(error < 2e-6 for error in found["errors"].values()), found["errors"]
    assert len(found["changed"]) == len(found["errors"])


@pytest.mark.parametrize("name", ["mxfp4", "hifp8"])
def test_unnormalized_probabilities_are_quantized_before_their_sum_divides(report, name):
    found, normalized = report[f"pv unnormalized {name}"], report[f"pv fprop_a {name}"]
    assert found["quantized"] == 1
    assert found["operand"] < 1e-6, "the operand is not exp(s - rowmax)"
    assert all(error < 2e-6 for error in found["errors"].values()), found["errors"]
    assert found["changed"] == ["o"]
    assert found["errors"] != normalized["errors"]
