"""Test that a collection ends soon and loses nothing if only its driver script is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.fake_dump import write_dump
from tests.script.stub_tree import stub_drawing, stub_tree
from tests.script.watching import LIMIT, alive, command, started, wait_for
from tests.subprocesses import REPO, environment

WORDS = {
    "run_tensor_collection.sh": ("single", "mxfp8"),
    "run_tensor_draw.sh": ("both", "mxfp8"),
}
NUMBERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command line or environment names a folder."""
    needle, found = os.fsencode(folder), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if alive(pid)]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("script", WORDS)
def test_the_collection_ends_with_its_driver(tmp_path, files, script, number):
    tree, dump = stub_tree(tmp_path / "tree", "stall"), tmp_path / "dump"
    words = [*WORDS[script], "--preset", "tiny", "--tensor-dir", dump, *files]
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(
            ["bash", tree / script, *words],
            env=environment(LAB_PYTHON=sys.executable),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    wait_for((dump / "mxfp8" / "pids").exists)
    training = started(dump / "mxfp8")
    assert all(map(alive, training))
    driver.send_signal(number)
    driver.wait(timeout=LIMIT)
    wait_for(lambda: not processes_of(tmp_path))
    assert not any(map(alive, training))
    said = (tmp_path / "output").read_text()
    assert "mxfp8: 6 tensors" in said, "the report is written in any case"
    assert "training was stopped; the log is" in said
    if number == signal.SIGKILL:
        assert f"[ERROR] the driver script (process {driver.pid}) has ended" in said
    else:
        assert driver.returncode == 128 + number
    assert len(list((dump / "mxfp8").glob("*.pt"))) == 6
    assert not (tmp_path / "tree" / "draw").exists()


def test_a_driver_that_ended_before_the_start_counts_too(tmp_path):
    """The outer of two drivers is killed while the inner one still creates the environment."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    done = subprocess.run(
        command(tmp_path, "hang"),
        env=os.environ | {"LAB_DRIVERS": f"{os.getpid()} {ended.pid}"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert f"[ERROR] the driver script (process {ended.pid}) has ended" in done.stderr


def test_a_driver_that_lives_is_no_reason_to_stop(tmp_path):
    done = subprocess.run(
        command(tmp_path, "slow"),
        env=os.environ | {"LAB_DRIVERS": str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [*NUMBERS, signal.SIGINT], ids=lambda number: number.name)
def test_the_drawing_ends_with_its_driver(tmp_path, number):
    tree, dump = stub_tree(tmp_path / "tree", "ok"), tmp_path / "dump"
    dump.mkdir()
    stub_drawing(tree)
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(
            ["bash", tree / "run_tensor_draw.sh", "visualize", "--tensor-dir", dump],
            env=environment(LAB_PYTHON=sys.executable),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    wait_for((dump / "pids").exists)
    drawing = started(dump)
    assert len(drawing) == 2
    assert all(map(alive, drawing))
    driver.send_signal(number)
    driver.wait(timeout=LIMIT)
    wait_for(lambda: not processes_of(tmp_path))
    assert not any(map(alive, drawing))
    told = (tmp_path / "output").read_text()
    assert told.count("[ERROR]") == 1
    assert "the drawing was stopped; finished files stay, and the same command draws the" in told
    assert "Traceback" not in told
    if number == signal.SIGKILL:
        assert f"[ERROR] the driver script (process {driver.pid}) has ended" in told
    else:
        assert driver.returncode == 128 + number


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_drawing_is_one_line_and_leaves_whole_files(tmp_path, number):
    """The real program draws in several processes, which all get the terminal's signal."""
    write_dump(tmp_path / "dump", layers=1)
    words = [sys.executable, "-m", "megatron.analysis", "draw", tmp_path / "dump"]
    words += ["--output-dir", tmp_path / "draw", "--workers", "2", "--formats", "mxfp8"]
    drawing = subprocess.Popen(
        [str(word) for word in words],
        env=environment(PYTHONPATH=REPO),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert drawing.stdout is not None
    assert drawing.stdout.readline().startswith("Wrote ")
    os.killpg(drawing.pid, number)
    _, errors = drawing.communicate(timeout=LIMIT)
    assert drawing.returncode == 128 + number
    assert errors == ("[ERROR] interrupted\n" if number == signal.SIGINT else "")
    wait_for(lambda: not processes_of(tmp_path))
    assert not list((tmp_path / "draw").rglob("*.partial"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_processes_that_draw_end_with_a_parent_that_is_killed(tmp_path):
    write_dump(tmp_path / "dump", layers=1)
    words = [sys.executable, "-m", "megatron.analysis", "draw", tmp_path / "dump"]
    words += ["--output-dir", tmp_path / "draw", "--workers", "2", "--formats", "mxfp8"]
    drawing = subprocess.Popen(
        [str(word) for word in words], env=environment(PYTHONPATH=REPO), stdout=subprocess.PIPE
    )
    assert drawing.stdout is not None
    assert drawing.stdout.readline().startswith(b"Wrote ")
    assert len(processes_of(tmp_path)) > 1
    drawing.kill()
    drawing.wait()
    drawing.stdout.close()
    wait_for(lambda: not processes_of(tmp_path))
