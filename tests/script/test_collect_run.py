"""The watcher of a collection, run as a command around a fake training."""

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
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
WATCHER = REPO / "script" / "collect_run.py"
TRAINING = Path(__file__).with_name("fake_training.py")
LIMIT = 30.0  #: seconds; none of these needs more than three


def command(folder: Path, behaviour: str, *options: str, iterations: int = 1) -> list[str]:
    return [
        sys.executable, str(WATCHER), "--tensor-dir", str(folder / "tensors"), "--name", "mxfp8",
        "--log-dir", str(folder / "logs"), "--grace", "0.5", *options, "--",
        sys.executable, str(TRAINING), str(folder / "tensors"), behaviour, str(iterations),
        str(folder / "pids"),
    ]  # fmt: skip


def collect(
    folder: Path, behaviour: str, *options: str, **more: int
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, behaviour, *options, **more), capture_output=True, text=True, timeout=LIMIT
    )


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie is not alive
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def started(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


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
    # one that begins after ours, with another token
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
    assert "ended by SIGKILL; was memory short?" in done.stderr


def test_a_run_without_one_tensor_has_failed(tmp_path):
    done = collect(tmp_path, "no tensor")
    assert done.returncode == 1
    assert "[ERROR] training ended without one tensor" in done.stderr


def test_fewer_iterations_than_asked_for_is_a_failure(tmp_path):
    done = collect(tmp_path, "ok", "--control-iter", "3", iterations=2)
    assert done.returncode == 1
    assert "after 2 of 3 iterations; raise --train-iters" in done.stderr


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
    """Four times the grace, as long as tensors arrive."""
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
    """The table of a system without /proc, where there is a `ps` to compare with."""
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
