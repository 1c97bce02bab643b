"""Tests of single-rank runs of `pretrain_gpt.py`: its log, its files and its errors."""

import signal
import subprocess
import sys

import pytest

from tests.subprocesses import REPO, environment, run
from tests.training.corpus import make_corpus
from tests.training.runs import ENTRY, LINE, MOCK_DATA, MODEL, NO_DROPOUT, train, without_split


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run of six iterations with every kind of output, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    training = train(
        *("--data-path", corpus, "--bf16", "--save", folder / "ck", "--save-interval", "3"),
        *("--tensorboard-dir", folder / "tb", "--eval-iters", "1", "--eval-interval", "2"),
        *("--log-params-norm", "--lr-warmup-iters", "1"),
        steps=folder / "steps.json",
    )
    assert training.status == 0, training.errors
    return training, folder


def test_the_log_lines_are_megatron_lms(whole):
    training, _ = whole
    lines = [line for line in training.output.splitlines() if line.startswith(" [")]
    assert len(lines) == 6
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert [line["consumed"] for line in training.lines.values()] == [
        str(8 * i) for i in range(1, 7)
    ]


def test_the_loss_falls(whole):
    losses = whole[0].losses
    assert losses[6] < losses[1] - 0.1


def test_it_says_what_it_runs_on_once(whole):
    assert whole[0].output.count("> device: CPU") == 1
    assert "megatron.cpu_backend" in whole[0].output
    assert "Warning" not in whole[0].errors


def test_validation_and_test_losses_are_printed(whole):
    output = whole[0].output
    for iteration in (2, 4, 6):
        assert f" validation loss at iteration {iteration} | lm loss value: " in output
    assert " validation loss at iteration 6 on validation set | lm loss value: " in output
    assert " validation loss at iteration 6 on test set | lm loss value: " in output


def test_tensorboard_has_the_same_losses(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training, folder = whole
    events = EventAccumulator(str(folder / "tb")).Reload()
    shown = {event.step: f"{event.value:.6E}" for event in events.Scalars("lm loss")}
    assert shown == {i: line["loss"] for i, line in training.lines.items()}
    assert [event.step for event in events.Scalars("lm loss validation")] == [2, 4, 6]
    by_samples = {
        str(event.step): f"{event.value:.6E}" for event in events.Scalars("lm loss vs samples")
    }
    assert by_samples == {line["consumed"]: line["loss"] for line in training.lines.values()}
    tags = set(events.Tags()["scalars"])
    assert {"grad-norm vs samples", "learning-rate vs samples", "consumed-samples"} <= tags
    assert not tags & {"iteration-time vs samples", "consumed-samples vs samples", "throughput"}


def test_checkpoints_lie_where_megatron_lm_puts_them(whole):
    folder = whole[1] / "ck"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert sorted(p.name for p in folder.iterdir()) == [
        "iter_0000003",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_resumed_run_repeats_every_digit(whole, corpus, tmp_path):
    training, folder = whole
    resumed = train(
        *("--data-path", corpus, "--bf16", "--load", folder / "ck", "--ckpt-step", "3"),
        *("--eval-iters", "1", "--eval-interval", "2", "--log-params-norm"),
        *("--lr-warmup-iters", "1"),
        steps=tmp_path / "steps.json",
    )
    assert resumed.status == 0, resumed.errors
    assert resumed.steps == training.steps[3:]
    assert list(resumed.lines) == [4, 5, 6]
    for iteration, line in resumed.lines.items():
        assert line == training.lines[iteration]
    assert _final_losses(resumed.output) == _final_losses(training.output)
    assert len(_final_losses(resumed.output)) == 2


def _final_losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if "validation loss at iteration 6 on" in line]


def test_collection_stops_training_after_control_iter(tmp_path):
    training = train(
        *("--custom-quant-type", "mxfp8", "--save-tensors", "--tensor-save-dir", tmp_path / "t"),
        *("--control-iter", "2", "--collect-layers", "first"),
        model=(*MOCK_DATA, "--num-layers", "2"),
    )
    assert training.status == 0, training.errors
    assert list(training.lines) == [1, 2]
    assert "the tensors of 2 iteration(s) are collected" in training.output
    assert list((tmp_path / "t").glob("*_linear_mxfp8_input.pt"))


def test_a_limit_ends_the_collection_and_training_goes_on(tmp_path):
    folder = tmp_path / "t"
    training = train(
        *("--save-tensors", "--tensor-save-dir", folder, "--collect-max-files", "10"),
        *("--control-iter", "2"),
        model=(*MOCK_DATA, "--num-layers", "1"),
    )
    assert training.status == 0, training.errors
    assert list(training.lines) == [1, 2]
    assert len(list(folder.glob("*.pt"))) == 10
    assert training.errors.count("rank 0 stopped collecting at ") == 1
    assert "> the collection is not complete: --collect-max-files lets this" in training.output


def test_a_loss_that_is_not_finite_is_shown_and_stops_the_run():
    training = train("--lr", "1e30", "--clip-grad", "0", model=(*MOCK_DATA, *NO_DROPOUT))
    assert training.status == 1
    assert "[ERROR] " in training.errors
    assert "at iteration" in training.errors
    assert "--no-check-for-nan-in-loss-and-grad" in training.errors
    assert "Traceback" not in training.errors
    assert training.lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--custom-quant-type", "mxfp9"), "unknown quantization type 'mxfp9'"),
        (("--collect-layers", "0"), "--collect-layers was given, but no tensors are collected"),
        (("--control-iter", "3"), "--control-iter was given, but no tensors are collected"),
        (("--tensor-save-dir", "t"), "--tensor-save-dir was given, but no tensors are collected"),
        (
            ("--collect-plan", "--collect-modules", "linear_x"),
            "--collect-modules: 'linear_x' matches none of the 5 modules",
        ),
        (("--save-tensors", "--collect-start", "7"), "--collect-start 7 selects none of the"),
        (("--load", "nowhere/at/all"), "--load nowhere/at/all holds no checkpoint"),
        (("--save", "/proc/checkpoints"), "--save /proc/checkpoints cannot be created"),
    ],
    ids=["type", "unused", "iterations", "folder", "modules", "start", "load", "save"],
)
def test_mistakes_found_later_are_one_line(options, message):
    training = train(*options, model=(*MOCK_DATA, "--num-layers", "1"))
    assert training.status == 2
    (line,) = [line for line in training.errors.splitlines() if line.strip()]
    assert line.startswith("[ERROR] ")
    assert message in line


def test_a_split_without_documents_is_refused(corpus):
    training = train("--data-path", corpus, "--split", "1000,1,0", "--eval-iters", "1")
    assert training.status == 2
    assert "the valid part of" in training.errors
    assert "--eval-iters 0" in training.errors


def test_data_of_another_tokenizer_is_refused(corpus):
    training = train("--data-path", corpus, "--vocab-size", "50")
    assert training.status == 1
    assert "the data holds token id" in training.errors
    assert "Traceback" not in training.errors


def test_a_data_set_for_each_split(corpus, tmp_path):
    """Without a test set, no test loss is printed at the end, and the log reports this."""
    training = train(
        *("--train-data-path", "0.4", corpus, "0.6", make_corpus(tmp_path, seed=1)),
        *("--valid-data-path", corpus),
        *("--eval-iters", "1"),
        model=without_split(MODEL),
    )
    assert training.status == 0, training.errors
    assert "iteration 6 on validation set" in training.output
    assert "on test set" not in training.output
    assert "> no --test-data-path: there will be no test at the end" in training.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_the_run_without_a_traceback(number):
    command = [sys.executable, ENTRY, *MOCK_DATA, "--num-layers", "1", "--train-iters", "1000000"]
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=REPO,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if LINE.fullmatch(line.rstrip("\n")):
                break
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert errors.endswith(f"[INTERRUPTED] {number.name}: training stopped\n")
    assert "Traceback" not in errors


def test_the_overlay_must_be_in_place(tmp_path):
    """A `megatron` package earlier on the path would train without formats, so it is refused.

    This tree comes before the installed megatron-core, because releases from 0.17 on contain a
    package `megatron.training` too.
    """
    code = (
        "import sys; sys.path.insert(1, sys.argv[1])\n"
        "import megatron.core; import megatron.training"
    )
    other = tmp_path / "megatron"
    (other / "core").mkdir(parents=True)
    for file in (other / "__init__.py", other / "core" / "__init__.py"):
        file.write_text(
            "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
        )
    result = run([sys.executable, "-c", code, REPO], cwd=tmp_path)
    assert result.returncode != 0
    assert f"start Python in {REPO}" in result.stderr
