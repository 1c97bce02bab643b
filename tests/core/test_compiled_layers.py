"""Test that quantized layers under torch.compile give the same bits as in eager mode."""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment
from tests.torch_releases import traces_all

WORKER = Path(__file__).with_name("compiled_worker.py")
CASES = (
    "mxfp8 column/whole row/whole attention/parts block/parts",
    "mxfp4:sr column/parts",
    "fp8_e4m3:global column/whole",
)


@pytest.fixture(scope="module")
def report():
    done = forks.run(WORKER, *CASES, env=environment(PYTHONPATH=REPO), libraries_only=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@traces_all
@pytest.mark.parametrize("layer", ["column", "row", "attention", "block"])
def test_two_steps_of_a_compiled_layer_have_the_bits_of_eager_ones(report, layer):
    found = report[f"mxfp8 {layer}"]
    assert found.get("equal") == [True, True], found
    assert found["matmuls"] >= 2, "the quantized matmuls are in the graphs"


@traces_all
@pytest.mark.parametrize("layer", ["column", "row"])
def test_a_linear_layer_is_one_graph(report, layer):
    assert report[f"mxfp8 {layer}"]["graphs"] == 1


def test_stochastic_rounding_takes_the_layer_s_seed_when_compiled(report):
    assert report["mxfp4:sr column"].get("equal") == [True, True], report


@traces_all
def test_the_amax_of_a_global_scale_is_in_the_graph(report):
    found = report["fp8_e4m3:global column"]
    assert (found.get("equal"), found["graphs"]) == ([True, True], 1), found
