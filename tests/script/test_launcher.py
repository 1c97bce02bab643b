"""Test that script/study.py trains several runs at a time, with programs that only wait."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from loss_gaps.launcher import Launcher, Run
from loss_gaps.run_log import has_ended

#: Program that creates its first argument, and waits until its second argument exists.
PROGRAM = """
import os, pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
own.write_text(str(os.getpid()))
print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))
while not other.exists():
    time.sleep(0.02)
print("done")
"""


def runs_of(folder: Path, pairs: dict[str, str]) -> list[Run]:
    return [
        Run([str(folder / own), str(folder / other)], folder / f"{own}.log", f"head of {own}\n")
        for own, other in pairs.items()
    ]


@pytest.fixture
def launcher():
    return Launcher([sys.executable, "-c", PROGRAM], forks=True)


def test_two_runs_at_a_time_wait_for_each_other(tmp_path, launcher):
    runs = runs_of(tmp_path, {"a": "b", "b": "a", "c": "a"})
    assert sorted(launcher.train_all(runs, 2)) == [0, 1, 2]
    for run in runs:
        text = run.log.read_text()
        assert text.startswith(run.head)
        assert "done" in text
        assert has_ended(text)


def test_runs_at_a_time_use_different_gpus(tmp_path):
    launcher = Launcher([sys.executable, "-c", PROGRAM], forks=False, gpus=["4", "7"])
    runs = runs_of(tmp_path, {"a": "b", "b": "a"})
    list(launcher.train_all(runs, 2))
    assert ["GPU 4" in run.log.read_text() for run in runs] == [True, False]
    assert ["GPU 7" in run.log.read_text() for run in runs] == [False, True]


def test_runs_in_progress_are_stopped_if_the_caller_stops(tmp_path, launcher):
    ended = launcher.train_all(runs_of(tmp_path, {"a": "b", "b": "a", "c": "never"}), 3)
    next(ended)
    while not (tmp_path / "c").exists() or not (tmp_path / "c").read_text():
        time.sleep(0.02)
    process = int((tmp_path / "c").read_text())
    ended.close()
    for _ in range(500):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.02)
    os.kill(process, 9)
    pytest.fail("the run was not stopped")


def test_a_run_that_ignores_the_request_to_end_is_killed_with_its_children(tmp_path, monkeypatch):
    stubborn = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
    launcher = Launcher([sys.executable, "-c", stubborn], forks=False)
    ended = launcher.train_all(runs_of(tmp_path, {"a": "b", "c": "d"}), 2)
    files = [tmp_path / "a", tmp_path / "c"]

    def stop(_) -> None:
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.connection.wait", stop)
    with pytest.raises(KeyboardInterrupt):
        next(ended)
    for file in files:
        for process in file.read_text().split():
            assert not Path(f"/proc/{process}").exists(), "it was not stopped"


def test_a_run_that_cannot_start_is_an_error_that_names_its_log(tmp_path):
    launcher = Launcher([str(tmp_path / "no such program")], forks=False)
    with pytest.raises(RuntimeError, match=r"watched a run ended with status 1; see .*a\.log"):
        list(launcher.train_all(runs_of(tmp_path, {"a": "a"}), 2))
