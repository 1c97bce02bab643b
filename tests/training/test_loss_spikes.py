"""Tests that a diverging run keeps the iterations around its loss spike, even after a resume."""

import json
from pathlib import Path

import pytest
import torch

from megatron.analysis.bands import excursions
from megatron.analysis.statistics_history import read_statistics
from megatron.tensor_record import read_events, read_index
from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.runs import MODEL, NO_DROPOUT, Training, succeeded, train

KEEP = ("--collect-ring", "2", "--collect-ring-events", "1", "--no-check-for-nan-in-loss-and-grad")
TOO_FAST = ("--lr", "3", "--lr-decay-style", "constant", "--clip-grad", "0")


def kept(folder) -> list[int]:
    """Return the iterations that the ring wrote at its first event."""
    (index,) = folder.glob("index_*.jsonl")
    event = next(event for event in read_events(index) if event["event"] == "kept")
    return event["iterations"]


def test_a_learning_rate_that_is_too_high_is_kept_at_the_jump(run_quickly, tmp_path):
    options = ("--save-tensors", "--tensor-save-dir", tmp_path, *KEEP, *TOO_FAST)
    run = succeeded(run_quickly(*options))
    assert run.losses[2] > 4 * run.losses[1], "the first update is too large"
    assert kept(tmp_path) == [1, 2]
    assert "times the level before at iteration 2: the ring is kept (event 1 of 1)" in run.output


@pytest.mark.parametrize("plant", [("norm", 2, 30.0), ("nan", 3, 0.0)])
def test_a_poisoned_weight_is_kept_with_the_iteration_before(corpus, tmp_path, plant):
    size = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2")
    flags = (*MODEL, *NO_DROPOUT, *size, "--train-iters", "4", "--data-path", corpus)
    worker = (Path(__file__).with_name("planted_worker.py"), *plant, tmp_path / "curve.jsonl")
    done = forks.run(
        *(*worker, *flags, *KEEP, "--save-tensors", "--tensor-save-dir", tmp_path / "dump"),
        *("--tensor-statistics", "1"),
        env=environment(PYTHONPATH=REPO),
    )
    succeeded(Training(done.returncode, done.stdout, done.stderr))
    assert kept(tmp_path / "dump") == [plant[1] - 1, plant[1]]
    if plant[0] == "nan":  # the history beside the ring names the poisoned weight
        first = excursions(read_statistics(tmp_path / "dump" / "statistics")).iloc[0]
        assert (first.iteration, first.tensor) == (plant[1], "weight")
        assert first.module == "decoder.layers.0.mlp.linear_fc2"


def test_a_resumed_run_judges_by_what_was_usual_before(run_quickly, tmp_path):
    ck, dump = tmp_path / "ck", tmp_path / "dump"
    succeeded(run_quickly("--save", ck, "--train-iters", "6", "--lr", "1e-5"))
    common = torch.load(ck / "iter_0000006" / "common.pt", weights_only=False)
    levels = common["progress"]["levels"]
    assert [len(levels["loss"]), len(levels["gradient norm"])] == [6, 6]
    run = succeeded(
        run_quickly(
            *("--load", ck, "--train-iters", "9", "--override-opt_param-scheduler"),
            *("--save-tensors", "--tensor-save-dir", dump, *KEEP, *TOO_FAST),
        )
    )
    first = run.losses[8] / levels["loss"][-1]
    assert first > 1.33, "above the limit for six values: 1 + 0.25 * 8 / 6"
    assert kept(dump) == [7, 8]
    card = json.loads(next(dump.glob("run_*.json")).read_text())
    assert card["ring"]["loss_jump"] == 1.25


@pytest.mark.parametrize(
    "layout", [("--pipeline-model-parallel-size", "2"), ()], ids=["pipeline", "data"]
)
def test_all_ranks_keep_the_same_iterations(corpus, tmp_path, layout):
    size = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2")
    options = ("--save-tensors", "--tensor-save-dir", tmp_path, *KEEP, *TOO_FAST)
    succeeded(train(*NO_DROPOUT, "--data-path", corpus, *size, *layout, *options, ranks=2))
    indexes = sorted(tmp_path.glob("index_*.jsonl"))
    assert len(indexes) == 2
    for index in indexes:
        (event,) = [event for event in read_events(index) if event["event"] == "kept"]
        assert event["iterations"] == [1, 2]
        assert {record["iteration"] for record in read_index(index)} == {1, 2}
