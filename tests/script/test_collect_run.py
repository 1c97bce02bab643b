"""Test the watcher of a collection as a command that starts a fake training."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.script.watching import (
    LIMIT,
    TRAINING,
    WATCHER,
    alive,
    collect,
    command,
    started,
    wait_for,
)


def test_a_good_run_is_reported_by_phase_component_operation_and_layer(tmp_path):
    done = collect(
        tmp_path, "ok", "--next", "bash run_tensor_draw.sh visualize mxfp8", iterations=2
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "mxfp8: 12 tensors, 12 kB, in " in done.stdout
    for line in (
        "phase      post 4, pre 8",
        "component  linear 12",
        "operation  backward 4, forward 8",
        "layer      0-1: 6 each",
        "iteration  1-2",
        "next       bash run_tensor_draw.sh visualize mxfp8",
    ):
        assert line in done.stdout
    [log] = (tmp_path / "logs").iterdir()
    assert "iteration        2/       2" in log.read_text()
    assert str(log) in done.stdout


def test_it_says_what_runs_before_it_runs(tmp_path):
    done = collect(tmp_path, "ok")
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith(f"Collecting mxfp8 into {tmp_path / 'tensors'}")
    assert "fake_training.py" in second


def test_an_index_without_a_run_card_counts_once_the_run_has_ended(tmp_path):
    done = collect(tmp_path, "no card")
    assert done.returncode == 0
    assert "mxfp8: 6 tensors" in done.stdout


def test_a_collection_up_to_a_limit_is_neither_complete_nor_failed(tmp_path):
    done = collect(tmp_path, "limited", "--control-iter", "3")
    assert done.returncode == 3
    assert done.stderr == (
        "[WARNING] the collection is not complete: --collect-max-files lets this rank write 6\n"
    )
    assert "mxfp8: 6 tensors" in done.stdout
    assert "  left out   7 tensors, 3.1 kB\n" in done.stdout


def test_the_report_says_what_became_of_a_ring(tmp_path):
    done = collect(tmp_path, "ring")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "kept loss nan at iteration 7" in lines
    assert "not kept the ring at SIGTERM" in lines


def test_the_report_says_how_to_look_at_the_statistics_of_a_run_without_tensors(tmp_path):
    done = collect(tmp_path, "statistics", "--may-be-empty")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "empty no event triggered the collection" in lines
    folder = tmp_path / "tensors" / "statistics"
    assert f"statistics python -m megatron.analysis history {folder}" in lines
    again = collect(tmp_path, "no tensor", "--may-be-empty")
    assert "statistics" not in again.stdout.replace(str(tmp_path), "")


def test_training_that_logs_iterations_it_does_not_collect_does_not_stall(tmp_path):
    done = collect(tmp_path, "slow", "--stall-timeout", "0.6")
    assert done.returncode == 0, done.stderr


def test_files_of_other_runs_are_neither_counted_nor_touched(tmp_path):
    tensors = tmp_path / "tensors"
    tensors.mkdir()
    older = subprocess.run(
        [sys.executable, TRAINING, tensors, "ok", "3"], check=True, timeout=LIMIT
    )
    assert older.returncode == 0
    before = {path: path.read_bytes() for path in tensors.iterdir()}
    # another run with another token, which begins after ours
    (tensors / "run_20250908_095201_other.json").write_text('{"environment": {}}')
    collecting = subprocess.Popen(command(tmp_path, "stall"), stdout=subprocess.PIPE, text=True)
    wait_for((tmp_path / "pids").exists)
    (tensors / "index_20250908_095201_other_rank00.jsonl").write_text('{"iteration": 1}\n')
    collecting.send_signal(signal.SIGINT)
    out, _ = collecting.communicate(timeout=LIMIT)
    assert "mxfp8: 6 tensors" in out
    assert {path: path.read_bytes() for path in before} == before


def test_a_stall_stops_the_run_and_shows_the_logs_last_lines(tmp_path):
    done = collect(tmp_path, "stall", "--stall-timeout", "0.6")
    assert done.returncode == 1
    assert (
        "[ERROR] no further tensor for 0.6 s (--stall-timeout): training was stopped" in done.stderr
    )
    assert "lm loss" in done.stderr
    assert "mxfp8: 6 tensors" in done.stdout
    assert len(list((tmp_path / "tensors").glob("*.pt"))) == 6
    assert not any(map(alive, started(tmp_path)))


def test_a_run_that_never_saves_a_tensor_stalls_too(tmp_path):
    done = collect(tmp_path, "hang", "--stall-timeout", "0.6")
    assert done.returncode == 1
    assert "[ERROR] no tensor for 0.6 s" in done.stderr
    assert "building the model" in done.stderr


def test_the_error_line_of_training_is_repeated(tmp_path):
    done = collect(tmp_path, "refuse")
    assert done.returncode == 1
    assert "[ERROR] training failed (exit status 2); the log is " in done.stderr
    assert "\n[ERROR] unknown flag --frobnicate; see --help\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_crash_shows_the_end_of_the_log_and_keeps_the_files(tmp_path):
    done = collect(tmp_path, "crash")
    assert done.returncode == 1
    assert "  | RuntimeError: the loss is NaN" in done.stderr
    assert "mxfp8: 6 tensors" in done.stdout
    assert len(list((tmp_path / "tensors").glob("*.pt"))) == 6


def test_training_that_is_killed_is_named_so(tmp_path):
    done = collect(tmp_path, "killed")
    assert done.returncode == 1
    assert "ended by SIGKILL; the machine may be out of memory" in done.stderr


def test_a_run_without_one_tensor_has_failed(tmp_path):
    done = collect(tmp_path, "no tensor")
    assert done.returncode == 1
    assert "[ERROR] training ended without saving a tensor" in done.stderr


def test_fewer_iterations_than_asked_for_is_a_failure(tmp_path):
    done = collect(tmp_path, "ok", "--control-iter", "3", iterations=2)
    assert done.returncode == 1
    assert "after 2 of 3 iterations; raise --train-iters" in done.stderr


@pytest.mark.parametrize("option", ["--tensor-dir", "--log-dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_start(tmp_path, option):
    (tmp_path / "file").write_text("not a folder")
    done = collect(tmp_path, "ok", option, str(tmp_path / "file" / "below"))
    assert done.returncode == 1
    assert done.stderr.startswith("[ERROR] cannot write to ")
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-dir", "x"], "no command; give it after --"),
        (["--tensor-dir", "x", "--stall-timeout", "-1", "--", "true"], "--stall-timeout is -1"),
        (["--tensor-dir", "x", "--stall-timeout", "nan", "--", "true"], "--stall-timeout is nan"),
        (["--tensor-dir", "x", "--control-iter", "-1", "--", "true"], "--control-iter is -1"),
    ],
)
def test_wrong_options(options, message):
    done = subprocess.run([sys.executable, WATCHER, *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_command_that_does_not_exist(tmp_path):
    words = command(tmp_path, "ok")
    words[words.index("--") + 1 :] = ["/nonexistent/python"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert "[ERROR] cannot start '/nonexistent/python'" in done.stderr


def test_verbose_shows_the_log_as_it_grows(tmp_path):
    done = collect(tmp_path, "ok", "--verbose")
    assert "lm loss: 1.0E+01" in done.stdout


def test_each_run_has_a_log_of_its_own(tmp_path):
    for _ in range(3):
        assert collect(tmp_path, "ok").returncode == 0
    assert len(list((tmp_path / "logs").iterdir())) == 3
