"""Tests that the same weights and data give the same losses in every parallel layout."""

import pytest

from tests.subprocesses import torchrun
from tests.training.runs import ENTRY, MODEL, NO_DROPOUT, Training, train

TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
CONTEXT = ("--context-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    """A run of six iterations on one rank, and its checkpoints after every second iteration."""
    folder = tmp_path_factory.mktemp("single") / "ck"
    whole = train("--data-path", corpus, *NO_DROPOUT, "--save", folder, "--save-interval", "2")
    assert whole.status == 0, whole.errors
    assert f"model parallel rank (0, 0): {whole.parameters}\n" in whole.output
    return whole, folder


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param((*TENSOR, "--sequence-parallel"), id="tensor-sequence"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param(INTERLEAVED, id="pipeline-interleaved"),
        pytest.param(CONTEXT, id="context"),
        pytest.param((), id="data"),
    ],
)
def test_a_checkpoint_of_one_rank_goes_on_in_every_layout(single, corpus, layout):
    """The weights, the optimizer, the schedule and the sample order move to another layout."""
    whole, folder = single
    moved = train(
        *("--data-path", corpus, *NO_DROPOUT, "--load", folder, "--ckpt-step", "2", *layout),
        ranks=2,
    )
    assert moved.status == 0, moved.errors[-3000:]
    assert list(moved.losses) == [3, 4, 5, 6]
    assert moved.parameters == whole.parameters
    for iteration, loss in moved.losses.items():
        assert loss == pytest.approx(whole.losses[iteration], rel=1e-5)
        expected_norm = float(whole.lines[iteration]["norm"])
        assert float(moved.lines[iteration]["norm"]) == pytest.approx(expected_norm, abs=2e-3)


def test_torchrun_itself_starts_what_the_other_tests_fork(corpus):
    """Two ranks that torchrun starts print the same as two forks of a prepared process."""
    options = ("--data-path", corpus, *NO_DROPOUT, *TENSOR, "--custom-quant-type", "mxfp8")
    forked = train(*options, ranks=2)
    started = torchrun(ENTRY, *MODEL, *options, ranks=2)
    assert started.returncode == 0, started.stderr[-3000:]
    real = Training(started.returncode, started.stdout, started.stderr)
    assert list(real.losses) == [1, 2, 3, 4, 5, 6]
    assert real.losses == forked.losses


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((*TENSOR, "--sequence-parallel", "--bf16"), id="tensor-sequence-bf16"),
        pytest.param((*DISTRIBUTED, "--bf16"), id="data-distributed-optimizer-bf16"),
        pytest.param(("--custom-quant-type", "mxfp4:sr"), id="stochastic-rounding"),
        pytest.param((*CONTEXT, "--bf16"), id="context-bf16", marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, id="pipeline-interleaved", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_repeats_every_digit(corpus, tmp_path, layout):
    """The model has dropout, so that the random states of every rank must be restored as well."""
    save = ("--save", tmp_path / "ck", "--save-interval", "3")
    evaluate = ("--eval-iters", "1", "--eval-interval", "2")
    steps = tmp_path / "steps.json"
    whole = train("--data-path", corpus, *layout, *save, *evaluate, ranks=2, steps=steps)
    assert whole.status == 0, whole.errors[-3000:]
    load = ("--load", tmp_path / "ck", "--ckpt-step", "3")
    resumed = train("--data-path", corpus, *layout, *load, *evaluate, ranks=2, steps=steps)
    assert resumed.status == 0, resumed.errors[-3000:]
    assert list(resumed.lines) == [4, 5, 6]
    assert resumed.steps == whole.steps[3:]
    for iteration, line in resumed.lines.items():
        assert line == whole.lines[iteration]


def test_the_loss_falls_over_both_kinds_of_ranks_in_mxfp8(corpus):
    training = train(
        *("--data-path", corpus, *TENSOR, "--sequence-parallel", *PIPELINE, "--bf16"),
        *("--custom-quant-type", "mxfp8"),
        ranks=4,
    )
    assert training.status == 0, training.errors[-3000:]
    assert training.losses[6] < training.losses[1] - 0.1


def test_one_rank_reports_a_mistake(corpus):
    training = train("--data-path", corpus, "--load", "nowhere", ranks=2)
    assert training.status != 0
    assert training.errors.count("[ERROR] --load nowhere holds no checkpoint") == 1
    assert 'pretrain_gpt.py", line' not in training.errors, "a rank printed a traceback"
