"""Test the default job's trained model: its name, its training, and jobs that continue from it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from collect import train_model
from configs import trained_model
from configs.resolve import Files, default_corpus
from configs.trained_model import TrainedModel, why_random
from loss_gaps.run_log import ending
from tests.script.drivers import COLLECT, DRAW, bash, dry, value

LINE = " [x] iteration {:8d}/ {} | lm loss: {:.6E} | loss scale: 1.0 | grad norm: 1.0 |\n"


@pytest.fixture
def files(tmp_path):
    """Return a made-up tokenizer and data."""
    prefix = tmp_path / "data"
    for name in ("tok.model", "data.bin", "data.idx"):
        (tmp_path / name).write_text(name)
    return Files(tokenizer=str(tmp_path / "tok.model"), data=str(prefix))


@pytest.fixture
def trainings(tmp_path, files, monkeypatch):
    """Replace training with a fake in a temporary folder; return the list of its commands."""
    started = []

    class Fake:
        def __init__(self, words, *, forks, drivers, watch):
            pass

        def train(self, arguments, log, head):
            started.append(arguments)
            iterations = int(value(arguments, "--train-iters"))
            lines = [LINE.format(i, iterations, 8 - i) for i in range(1, iterations + 1)]
            log.parent.mkdir()
            time.sleep(0.2)
            status = 1 if iterations == 5 else 0
            text = "[ERROR] no luck\n" if status else "".join(lines)
            log.write_text(head + text + ending(status, 1.0))
            (log.parent / "latest_checkpointed_iteration.txt").write_text(str(iterations))
            return status

    monkeypatch.setattr(train_model, "Launcher", Fake)
    monkeypatch.setattr(train_model, "default_corpus", lambda: files)
    monkeypatch.setattr(trained_model, "at_home", lambda path: str(tmp_path / path))
    return started


def test_the_name_changes_with_all_that_determines_the_weights(tmp_path, files, monkeypatch):
    folders = [TrainedModel(300, files).folder, TrainedModel(299, files).folder]
    for name in ("tok.model", "data.bin", "data.idx"):
        (tmp_path / name).write_text("other")
        folders.append(TrainedModel(300, files).folder)
    for name, other in (("VERSION", 2), ("PACKAGES", ("numpy",)), ("START_SEED", 1)):
        monkeypatch.setattr(trained_model, name, other)
        folders.append(TrainedModel(300, files).folder)
    assert len(set(folders)) == len(folders)
    assert all(folder.name.startswith("llama32_tiny_bf16_") for folder in folders)


def test_the_name_does_not_change_with_the_place_of_the_files(tmp_path, files):
    (tmp_path / "moved").mkdir()
    for path in list(tmp_path.glob("*.*")):
        (tmp_path / "moved" / path.name).write_bytes(path.read_bytes())
    moved = Files(tokenizer=str(tmp_path / "moved/tok.model"), data=str(tmp_path / "moved/data"))
    assert TrainedModel(3, moved).folder == TrainedModel(3, files).folder


def test_two_calls_train_once_and_a_killed_one_leaves_nothing(files, trainings, capsys):
    model = TrainedModel(3, files)
    leftover = model.folder.with_name(f"{model.folder.name}.partial")
    leftover.mkdir(parents=True)
    (leftover / "half").touch()
    model.folder.mkdir()  # without a checkpoint
    assert not model.exists()
    calls = [threading.Thread(target=train_model.main, args=[["--iterations", "3"]]) for _ in "ab"]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(trainings) == 1
    assert value(trainings[0], "--save") == str(leftover)
    assert value(trainings[0], "--custom-quant-type") == "bf16"
    assert model.exists()
    assert sorted(path.name for path in model.folder.parent.iterdir()) == sorted(
        [".training.lock", model.folder.name]
    )
    assert not (model.folder / "half").exists()
    said = capsys.readouterr().err
    assert "Waiting for another process, which trains the model" in said
    assert said.count(f"Starting from the weights in {model.folder}: 3 iterations in bf16") == 2
    assert "loss 7.00 at first and 6.00 at the end" in said


def test_a_training_that_fails_leaves_no_model(files, trainings, capsys):
    model = TrainedModel(5, files)
    for _ in range(2):
        assert train_model.main(["--iterations", "5"]) == 1
        assert not model.exists()
    assert len(trainings) == 2
    assert "[ERROR] the model was not trained: no luck; see " in capsys.readouterr().err


def test_a_model_without_its_log_is_used(files, trainings, capsys):
    assert train_model.main(["--iterations", "3"]) == 0
    log = TrainedModel(3, files).log
    log.unlink()
    assert train_model.main(["--iterations", "3"]) == 0
    assert len(trainings) == 1
    said = capsys.readouterr().err
    assert f"the losses are unknown, because {log} is missing or has none" in said


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, files, trainings, capsys):
    (tmp_path / "model").write_text("a file")
    assert train_model.main(["--iterations", "3"]) == 1
    assert "make the folder writable, or give --start-iterations 0" in capsys.readouterr().err
    assert not trainings


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--seed 7 --lr 1e-3 --collect-layers 0 --adam-beta2 0.9 --log-throughput", None),
        ("--quant-accumulate hopper_fp8", None),
        ("--num-layers 2", "--num-layers is given"),
        ("--seed 7 --load=x", "--load is given"),
        ("--seeds 7", "--seeds is given"),
    ],
)
def test_flags_that_change_more_than_the_formats_are_no_default_job(flags, why):
    assert why_random(default_corpus(), flags.split(), "bf16") == why


def test_other_data_and_dtypes_are_no_default_job(files):
    assert why_random(files, [], "bf16") == f"the data are {files.data}"
    other = dataclasses.replace(default_corpus(), tokenizer="x")
    assert why_random(other, [], "bf16") is not None
    assert why_random(default_corpus(), [], "fp16") == "--dtype is fp16"
    assert why_random(default_corpus(), [], "fp8") is None


def test_every_type_of_the_default_job_continues_from_the_same_weights():
    [one] = dry(COLLECT, "single", "mxfp8")
    both, _ = dry(DRAW, "both", "mxfp4", "--start-iterations", "300")
    assert one[-1] == "--finetune"
    assert "llama32_tiny_bf16_300_" in value(one, "--load")
    assert value(both, "--load") == value(one, "--load")
    [fewer] = dry(COLLECT, "single", "mxfp8", START_ITERATIONS="20")
    assert "llama32_tiny_bf16_20_" in value(fewer, "--load")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--start-iterations", "0"], "No trained model is loaded (--start-iterations 0)."),
        (["--checkpoint-path", "ck"], "not the default job: --checkpoint-path is given."),
        (["--", "--hidden-size", "128"], "not the default job: --hidden-size is given."),
    ],
)
def test_other_jobs_say_why_they_load_nothing(words, why):
    done = bash(COLLECT, "single", "mxfp8", "--dry-run", *words)
    assert done.returncode == 0
    assert why in done.stderr
    assert "--load" not in done.stdout


def test_iterations_for_another_job_are_refused():
    done = bash(COLLECT, "single", "mxfp8", "--preset", "tiny", "--start-iterations", "9")
    assert done.returncode == 2
    assert "--start-iterations 9 belongs to the default job, but --preset is given" in done.stderr
    done = bash(COLLECT, "single", "mxfp8", "--dry-run", START_ITERATIONS="many")
    assert done.returncode == 2
    assert "environment variable START_ITERATIONS: 'many' is not an integer" in done.stderr
