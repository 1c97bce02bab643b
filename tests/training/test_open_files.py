"""Tests that a low soft limit of open files is raised, and that a low hard limit is an error."""

import shlex
import sys

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run
from tests.training.runs import ENTRY, MOCK_DATA

#: Program that sets the soft and the hard limit, and then runs `pretrain_gpt.py`.
LIMITED = """
import resource, runpy, sys
_, soft, hard, *sys.argv = sys.argv
hard = int(hard) if hard != "-" else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), hard))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def limited(soft: int, hard: int | None, *options: str):
    """Run `pretrain_gpt.py` under limits, which also apply while it imports megatron-core."""
    words = (str(soft), str(hard or "-"), ENTRY, *MOCK_DATA, *options)
    return forks.run("-c", LIMITED, *words, env=environment(PYTHONPATH=REPO), libraries_only=True)


def by_ulimit(limit: int):
    """Run `pretrain_gpt.py` in a new process after `ulimit`."""
    command = shlex.join([sys.executable, str(ENTRY), *MOCK_DATA])
    return run(["bash", "-c", f"ulimit -n {limit} && exec {command}"])


@pytest.mark.parametrize("limit", [40, 64, 100])
def test_a_hard_limit_that_is_too_low_is_refused(limit):
    done = by_ulimit(limit) if limit == 40 else limited(limit, limit)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "[ERROR]" in line]
    assert f"only {limit} files may be open at a time (ulimit -n)" in line
    assert "needs at least 132; run `ulimit -n 4096`" in line
    assert "Traceback" not in done.stderr


def test_a_soft_limit_is_raised():
    done = limited(64, None, "--train-iters", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        1/       1" in done.stdout
