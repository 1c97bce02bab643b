"""Tests that training continues if its log cannot be written."""

import contextlib
import os
import shlex
from pathlib import Path

import pytest

from megatron.training import printing
from tests import forks
from tests.subprocesses import run
from tests.training.runs import ENTRY, MOCK_DATA


def trained_to(where: str, folder: Path):
    """Train two iterations with stdout redirected to `where`, and save a checkpoint."""
    python = str(forks.interpreter("training"))
    words = [python, str(ENTRY), *MOCK_DATA, "--train-iters", "2", "--save", str(folder)]
    script = f"{shlex.join(words)} {where}; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", script])
    tracker = folder / "latest_checkpointed_iteration.txt"
    what_is_left = (done.returncode, done.stdout, done.stderr, list(folder.rglob("*")))
    assert tracker.exists(), what_is_left
    assert tracker.read_text() == "2"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


def test_a_reader_that_leaves_is_no_failure(tmp_path):
    done = trained_to("| head -n 1", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[WARNING] the log cannot be written (Broken pipe)") == 1
    assert trained_to("2>&1 | head -n 1", tmp_path / "both").returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_said_at_once_and_at_the_end(tmp_path):
    done = trained_to("> /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("[WARNING] the log cannot be written (No space left on device)") == 1
    assert "[ERROR] training is complete, but its log is not: No space left" in done.stderr


def test_what_other_packages_print_does_not_end_training_either(monkeypatch, capfd):
    """megatron-core calls `print`, which raises an error once the pipe has no reader."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(printing, "_write_errors", [])
    with os.fdopen(write, "w") as stream, contextlib.redirect_stdout(printing.Log(stream)):
        print("nobody reads this", flush=True)
        print("nor this", flush=True)
    assert capfd.readouterr().err.count("[WARNING] the log cannot be written (Broken pipe)") == 1
