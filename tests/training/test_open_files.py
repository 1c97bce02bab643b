"""Tests that a low soft limit of open files is raised, and that a low hard limit is an error."""

import shlex
import sys

import pytest

from tests.subprocesses import run
from tests.training.runs import ENTRY, MOCK_DATA


def limited(limit: str, *options: str):
    """Run `pretrain_gpt.py` after `ulimit`."""
    command = shlex.join([sys.executable, str(ENTRY), *MOCK_DATA, *options])
    return run(["bash", "-c", f"ulimit {limit} && exec {command}"])


@pytest.mark.parametrize("limit", [40, 64, 100])
def test_a_hard_limit_that_is_too_low_is_refused(limit):
    done = limited(f"-n {limit}")
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "[ERROR]" in line]
    assert f"only {limit} files may be open at a time (ulimit -n)" in line
    assert "needs at least 132; run `ulimit -n 4096`" in line
    assert "Traceback" not in done.stderr


def test_a_soft_limit_is_raised():
    done = limited("-Sn 64", "--train-iters", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        1/       1" in done.stdout
