"""Test how the watcher of a collection ends a training: signals, a terminal, stray processes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.script.watching import (
    LIMIT,
    REPO,
    alive,
    collect,
    command,
    started,
    wait_for,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_stubborn_tree_and_reports_what_is_there(tmp_path, number):
    collecting = subprocess.Popen(
        command(tmp_path, "stubborn"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "pids").exists)
    pids = started(tmp_path)
    assert all(map(alive, pids))
    collecting.send_signal(number)
    out, err = collecting.communicate(timeout=LIMIT)
    assert collecting.returncode == 128 + number
    assert f"[ERROR] interrupted ({number.name}): training was stopped" in err
    assert "mxfp8: 6 tensors" in out
    assert not any(map(alive, pids))
    assert len(list((tmp_path / "tensors").glob("*.pt"))) == 6


def test_a_second_interrupt_does_not_wait_for_the_grace(tmp_path):
    collecting = subprocess.Popen(
        command(tmp_path, "stubborn", "--grace", "600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for((tmp_path / "pids").exists)
    collecting.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        collecting.wait(timeout=1.5)
    collecting.send_signal(signal.SIGINT)
    collecting.communicate(timeout=LIMIT)
    assert collecting.returncode == 130
    assert not any(map(alive, started(tmp_path)))


def test_training_has_time_to_write_what_waits(tmp_path):
    """Training gets four times the grace period as long as tensors arrive."""
    collecting = subprocess.Popen(
        command(tmp_path, "queue"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "pids").exists)
    collecting.send_signal(signal.SIGTERM)
    out, _ = collecting.communicate(timeout=LIMIT)
    assert collecting.returncode == 143
    assert "mxfp8: 126 tensors" in out, "6 before the signal, 20 times 6 after it"


def test_a_daemon_that_training_leaves_behind_is_stopped(tmp_path):
    done = collect(tmp_path, "orphan")
    assert done.returncode == 0, done.stderr
    assert not any(map(alive, started(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_training_ends_even_if_the_watcher_is_killed(tmp_path):
    collecting = subprocess.Popen(command(tmp_path, "stall"), stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "pids").exists)
    collecting.kill()
    collecting.wait(timeout=LIMIT)
    wait_for(lambda: not any(map(alive, started(tmp_path))))


def test_a_terminal_gets_a_bar_and_ctrl_c_reaches_it(tmp_path):
    pytest.importorskip("tqdm")
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    collecting = subprocess.Popen(
        command(tmp_path, "stall", "--control-iter", "4"), stdout=subprocess.DEVNULL, stderr=child
    )
    os.close(child)
    shown = b""
    while b"mxfp8: iteration 1 of 4, 6 tensors, 6 kB" not in shown:
        assert select.select([parent], [], [], LIMIT)[0], f"nothing more after {shown!r}"
        shown += os.read(parent, 4096)
    collecting.send_signal(signal.SIGINT)
    assert collecting.wait(timeout=LIMIT) == 130
    os.close(parent)


def test_ps_sees_what_proc_sees(monkeypatch):
    """Compare the process table of a system without /proc with `ps`, if there is one."""
    if not Path("/proc/self/stat").exists() or shutil.which("ps") is None:
        pytest.skip("needs both")
    monkeypatch.syspath_prepend(REPO / "script")
    import process_tree

    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        known, asked = process_tree._process_table(), process_tree._ask_ps()
        for pid in (os.getpid(), sleeper.pid):
            assert asked[pid].parent == known[pid].parent
            assert not asked[pid].dead
            assert asked[pid].started == process_tree._ask_ps()[pid].started
    finally:
        sleeper.kill()
    wait_for(lambda: process_tree._ask_ps()[sleeper.pid].dead)
    sleeper.wait()


@pytest.mark.parametrize("what", ["file", "folder", "cut"])
def test_a_log_that_is_removed_does_not_end_the_run(tmp_path, what):
    collecting = subprocess.Popen(
        command(tmp_path, "slow", "--verbose"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any("lm loss" in log.read_text() for log in (tmp_path / "logs").glob("*")))
    [log] = (tmp_path / "logs").iterdir()
    if what == "cut":
        os.truncate(log, 0)
    elif what == "file":
        log.unlink()
    else:
        shutil.rmtree(log.parent)
    out, err = collecting.communicate(timeout=LIMIT)
    assert collecting.returncode == 0, err
    assert "mxfp8: 6 tensors" in out
    assert " iteration 9\n" in out, "the log is read to its end"
    assert (f"{log} (it was removed during the run)" in out) == (what != "cut")
    if what == "cut":
        assert "\0" not in log.read_text()
        assert log.read_text().endswith(" iteration 9\n")


def test_the_end_of_a_removed_log_is_shown_after_a_failure(tmp_path):
    collecting = subprocess.Popen(
        command(tmp_path, "stall", "--stall-timeout", "1"), stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "pids").exists)
    shutil.rmtree(tmp_path / "logs")
    _, err = collecting.communicate(timeout=LIMIT)
    assert collecting.returncode == 1
    assert "training was stopped; the log is" in err
    assert "(it was removed during the run)" in err
    assert "lm loss" in err
