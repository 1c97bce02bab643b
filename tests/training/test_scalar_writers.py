"""Tests that Weights & Biases and MLflow receive the same scalars as TensorBoard.

Most tests replace both packages by stand-ins that record calls. The last two use the real packages,
offline, and are skipped if these are not installed (`pip install -e .[tracking]`).
"""

import argparse
import json
import math
from pathlib import Path

import pytest

from megatron.training.arguments.parse_args import parse_args
from megatron.training.errors import UserError
from megatron.training.scalar_writers import MLflow, WeightsAndBiases
from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.runs import (
    MINIMAL,
    MOCK_DATA,
    NO_DROPOUT,
    Training,
    refused,
    scalars,
    succeeded,
)

WORKER = Path(__file__).with_name("trackers_worker.py")
SIZE = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2")
SERVICES = (
    *("--wandb-project", "formats", "--wandb-exp-name", "first", "--wandb-entity", "team"),
    *("--mlflow-experiment", "formats", "--mlflow-run-name", "first"),
)


def run(folder: Path, *options: str, **variables: str) -> tuple[Training, list]:
    """Train for two iterations, and return the run and the calls of both packages."""
    calls = folder / "calls.json"
    words = (*MOCK_DATA, *NO_DROPOUT, *SIZE, "--train-iters", "2", *SERVICES)
    done = forks.run(
        *(WORKER, *words, "--wandb-save-dir", str(folder / "local"), *options),
        env=environment(PYTHONPATH=REPO, CALLS=str(calls), **variables),
    )
    lines = calls.read_text().splitlines() if calls.exists() else []
    return Training(done.returncode, done.stdout, done.stderr), [json.loads(x) for x in lines]


def test_all_services_receive_the_same_scalars(tmp_path):
    training, calls = run(
        tmp_path,
        *("--tensorboard-dir", str(tmp_path / "board"), "--tensor-statistics", "2"),
        *("--tensor-save-dir", str(tmp_path / "dump"), "--custom-quant-type", "mxfp4"),
        *("--log-throughput", "--log-memory-to-tensorboard", "--mlflow-tracking-uri", "file:x"),
        *("--eval-iters", "1", "--eval-interval", "2"),
    )
    succeeded(training)
    [(_, _, started)] = [call for call in calls if call[0] == "wandb.init"]
    names = {name: started[name] for name in ("project", "name", "entity", "dir")}
    folder = str(tmp_path / "local")
    assert names == {"project": "formats", "name": "first", "entity": "team", "dir": folder}
    assert Path(folder).is_dir()
    assert started["config"]["hidden_size"] == 32
    assert started["settings"] == {"console": "off"}, "the log of the run stays as it is"
    assert ["mlflow.set_tracking_uri", ["file:x"], {}] in calls
    assert ["mlflow.start_run", [], {"run_name": "first"}] in calls
    assert [calls[-2][0], calls[-1]] == ["wandb.finish", ["mlflow.end_run", ["FINISHED"], {}]]
    parameters = [values[0] for name, values, _ in calls if name == "mlflow.log_params"]
    assert all(len(part) <= MLflow.MOST_PARAMETERS for part in parameters)
    assert {key for part in parameters for key in part} == set(started["config"])

    board = scalars(tmp_path / "board")
    for service in ("wandb.log", "mlflow.log_metrics"):
        received: dict[str, dict[int, float]] = {}
        for name, values, how in calls:
            for key, value in values[0].items() if name == service else ():
                received.setdefault(key, {})[how["step"]] = value
        by_iteration = {tag for tag in board if not tag.endswith(" vs samples")}
        assert set(received) == by_iteration
        for tag, values in received.items():
            assert values == pytest.approx(board[tag], rel=1e-6), tag
    assert {"lm loss validation", "lm loss validation vs samples"} <= set(board)
    assert {"throughput", "mem-allocated-bytes", "mem-max-allocated-bytes"} <= by_iteration
    assert not {tag for tag in board if tag.startswith("mem-") and tag.endswith("vs samples")}
    assert any(tag.startswith("sqnr_db/decoder.layers.0.") for tag in by_iteration)
    assert 0 < board["mem-allocated-bytes"][2] <= board["mem-max-allocated-bytes"][2] * 1.01


def test_a_service_that_fails_does_not_stop_training(tmp_path):
    training, calls = run(tmp_path, BROKEN="wandb.log")
    assert training.status == 1
    assert set(training.losses) == {1, 2}
    failure = "cannot log to project formats at iteration 1 (the server is away)"
    assert f"[WARNING] {failure}: training continues without Weights & Biases" in training.errors
    assert f"training is complete, but its scalars in Weights & Biases are not: {failure}" in (
        training.errors
    )
    assert "Traceback" not in training.errors
    assert calls[-1] == ["mlflow.end_run", ["FINISHED"], {}], "the other service goes on"


def test_a_service_that_cannot_be_reached_at_the_start_ends_the_run(tmp_path):
    training, _ = run(tmp_path, BROKEN="mlflow.set_experiment")
    line = refused(training)
    assert "cannot log to experiment formats at the start (the server is away); check" in line
    assert training.losses == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--wandb-project", "p"), "--wandb-project needs the wandb package; run `pip install"),
        (("--mlflow-experiment", "p"), "needs the mlflow package; run `pip install mlflow-skinny"),
        (("--wandb-exp-name", "a"), "--wandb-exp-name acts only with --wandb-project"),
        (("--mlflow-run-name", "a"), "--mlflow-run-name acts only with --mlflow-experiment"),
        (("--log-memory-to-tensorboard",), "acts only with --tensorboard-dir, --wandb-project or"),
    ],
)
def test_flags_without_effect_or_package_are_refused(flags, message, monkeypatch):
    monkeypatch.setattr("megatron.training.arguments.validation.installed", lambda module: False)
    with pytest.raises(UserError) as error:
        parse_args([*MINIMAL, *flags])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "needs the name of the run; give --wandb-exp-name"),
        (("--wandb-exp-name", "a"), "needs a folder for its local files; give --wandb-save-dir or"),
    ],
)
def test_a_run_in_weights_and_biases_needs_a_name_and_a_folder(flags, message, monkeypatch):
    monkeypatch.setattr("megatron.training.arguments.validation.installed", lambda module: True)
    with pytest.raises(UserError) as error:
        parse_args([*MINIMAL, "--wandb-project", "p", *flags])
    assert message in str(error.value)


VALUES = {f"amax/decoder.layers.{i}.mlp.linear_fc1/linear_fprop_input": i / 8 for i in range(1200)}


def arguments(folder: Path) -> argparse.Namespace:
    fields = {"wandb_project": "p", "wandb_exp_name": "a", "wandb_entity": None, "save": None}
    fields |= {"wandb_save_dir": str(folder), "hidden_size": 32, "lr": 1e-3}
    store = f"sqlite:///{folder}/mlflow.db"
    return argparse.Namespace(
        **fields, mlflow_experiment="e", mlflow_run_name="a", mlflow_tracking_uri=store
    )


def test_the_real_wandb_keeps_the_scalars_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = WeightsAndBiases(arguments(tmp_path))
    writer.add({"lm loss": 2.5} | VALUES, 1)
    writer.add({"lm loss": math.inf}, 2)
    writer.close(failed=False)
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]


def test_the_real_mlflow_stores_the_scalars(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    writer = MLflow(arguments(tmp_path))
    writer.add({"lm loss": 2.5} | VALUES, 1)
    writer.close(failed=True)
    [stored] = mlflow.search_runs(experiment_names=["e"], output_format="list")
    assert stored.info.status == "FAILED"
    assert stored.data.metrics == {"lm loss": 2.5} | VALUES
    assert stored.data.params["hidden_size"] == "32"
