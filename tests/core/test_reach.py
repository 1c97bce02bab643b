"""Test the coverage matrix: every trainer and model, whether quantized, collected or refused."""

import json
from pathlib import Path

import pytest

from megatron.analysis.store import TensorStore
from megatron.analysis.verification.verify import Verification
from tests import forks
from tests.core.coverage_matrix import EXPECTED, PLAIN, TRAINERS, chinese_tables, tables
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("reach_worker.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the worker's reports and messages by trainer, and the folder of all tensors."""
    folder = tmp_path_factory.mktemp("reach")
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp8")
    reports = {}
    for trainer in TRAINERS:
        models = [*EXPECTED, PLAIN]
        done = forks.run(WORKER, trainer, folder / trainer, *models, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        reports[trainer] = {line["model"]: line for line in lines} | {"log": done.stderr}
    return reports, folder


cells = pytest.mark.parametrize("model", EXPECTED)
trainers = pytest.mark.parametrize("trainer", TRAINERS)


@trainers
@cells
def test_every_layer_is_named_and_quantized(runs, trainer, model):
    report, expected = runs[0][trainer][model], EXPECTED[model]
    assert report["error"] is None
    layers = report["layers"]
    assert len(layers) == expected.layers
    assert set(expected.quantized) <= {name for name, quantized in layers.items() if quantized}
    assert {name for name, quantized in layers.items() if not quantized} == set(
        expected.high_precision
    )


@trainers
@cells
def test_every_layer_is_collected_and_verified(runs, trainer, model):
    reports, folder = runs
    report, expected = reports[trainer][model], EXPECTED[model]
    assert (report["failure"], report["card"]["status"]) == (None, "finished")
    store = TensorStore(folder / trainer / model)
    assert set(store.records["module"]) == set(report["layers"]) - set(expected.high_precision)
    numbers = dict(zip(store.records["module"], store.records["layer_idx"], strict=True))
    assert all(number == expected_number(name) for name, number in numbers.items())
    assert set(store.records["micro_batch"]) == {0, 1}
    verdict = Verification(store).run()
    assert verdict.errors == []
    assert verdict.checked["results of linear layers, bit for bit"] > 0


def expected_number(name: str) -> int:
    """Return the layer number that the name of a module contains; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


@trainers
@cells
def test_modules_that_are_not_reached_are_named(runs, trainer, model):
    reports, expected = runs[0][trainer], EXPECTED[model]
    card = reports[model]["card"]
    assert card["not_reached"] == list(expected.named)
    multiplied = {name for name in expected.named if "itself" not in name}
    assert set(card["outside_of_the_audit"]) == multiplied
    assert card["not_called"] == []
    if expected.named:
        line = f"not quantized and not collected: {', '.join(expected.named)}"
        assert line in reports["log"]


@trainers
@cells
def test_layers_of_another_class_are_refused(runs, trainer, model):
    message = runs[0][trainer][model]["refusal"]
    assert message.startswith("format mxfp8 ")
    assert EXPECTED[model].refused in message


@trainers
def test_a_model_without_any_layer_is_refused(runs, trainer):
    message = runs[0][trainer][PLAIN]["error"]
    assert message.startswith("format mxfp8 reaches no layer of the model Plain: its modules are ")
    assert "first (Linear), attention (MultiheadAttention)" in message


def test_the_documentation_has_the_tables():
    page = (REPO / "docs" / "coverage_matrix.md").read_text()
    assert tables() in page
    assert chinese_tables() in page
