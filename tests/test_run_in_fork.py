"""`run_in_fork`: status and output of a fork, and signals while it runs."""

import io
import os
import signal
import sys
import time

import pytest

from megatron.forks import run_in_fork

#: Functions to call in this process right after the next fork.
after_fork = []
os.register_at_fork(after_in_parent=lambda: after_fork and after_fork.pop()())


class StoppedError(Exception):
    """Raised by the handler of SIGTERM."""


@pytest.fixture
def handled():
    def stop(number, frame):
        raise StoppedError

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


def call(program, path):
    with path.open("wb") as log:
        return run_in_fork(program, log)


def test_status_and_output_are_those_of_the_function(tmp_path):
    def program():
        os.write(1, b"words\n")
        os.write(2, b"more")
        return 3

    assert call(program, tmp_path / "log") == 3
    assert (tmp_path / "log").read_bytes() == b"words\nmore"


def test_an_exception_is_written_and_a_signal_is_reported(tmp_path):
    def fails():
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False))  # pytest has replaced it
        raise ValueError("no such layer")

    assert call(fails, tmp_path / "log") == 1
    assert "no such layer" in (tmp_path / "log").read_text()
    killed = call(lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "log")
    assert killed == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [(143, 143, ""), (None, 0, ""), ("no such layer", 1, "no such layer\n")],
)
def test_sys_exit_ends_the_fork_as_it_ends_a_program(tmp_path, code, status, output):
    def program():
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False))  # pytest has replaced it
        sys.exit(code)

    assert call(program, tmp_path / "log") == status
    assert (tmp_path / "log").read_text() == output


def test_a_signal_to_the_new_fork_ends_it_without_a_traceback(tmp_path):
    """Linux delivers it as soon as the fork unblocks it, before the function runs."""

    def stop(number, frame):
        sys.exit(128 + number)

    os.register_at_fork(after_in_child=lambda: to_child and os.kill(os.getpid(), to_child.pop()))
    to_child = [signal.SIGTERM]
    before = signal.signal(signal.SIGTERM, stop)
    try:
        assert call(lambda: 0, tmp_path / "log") == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
        to_child.clear()
    assert (tmp_path / "log").read_bytes() == b""


def sleeper(path):
    """Return a program that writes its process id and sleeps."""

    def program():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        path.write_text(str(os.getpid()))
        time.sleep(60)
        return 0

    return program


@pytest.mark.parametrize("moment", ["in the fork", "while waiting"])
def test_a_signal_ends_the_fork_and_is_not_lost(tmp_path, handled, moment):
    path, parent = tmp_path / "pid", os.getpid()
    program = sleeper(path)
    if moment == "in the fork":
        after_fork.append(lambda: os.kill(parent, signal.SIGTERM))
    else:
        sleeping = program

        def program():
            os.kill(parent, signal.SIGTERM)
            return sleeping()

    started = time.monotonic()
    with pytest.raises(StoppedError):
        call(program, tmp_path / "log")
    assert time.monotonic() - started < 30, "the fork was ended, not waited for"
    if path.exists() and (pid := path.read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
