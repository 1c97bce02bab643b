"""Start the drivers and the training script as a user would, and read the commands they print."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

COLLECT = REPO / "run_tensor_collection.sh"
DRAW = REPO / "run_tensor_draw.sh"
TRAIN = REPO / "examples" / "llama" / "train_llama32_1b_h100_fp8.sh"
ALL = pytest.mark.parametrize("script", [COLLECT, DRAW, TRAIN], ids=lambda path: path.name)


def bash(script, *arguments, cwd=REPO, **variables):
    """Run a driver with a Python that looks up quantization types in forks."""
    done = run(
        ["bash", script, *arguments],
        cwd=cwd,
        env=environment(**{"LAB_PYTHON": forks.interpreter("analysis")} | variables),
    )
    assert "Traceback" not in done.stderr
    assert "unbound variable" not in done.stderr
    return done


def dry(script, *arguments, **variables):
    """Return the commands that a driver would run, as lists of words.

    The output for equal words is cached, unless one of them is a Path, whose content may change.
    """
    if any(isinstance(each, Path) for each in (*arguments, *variables.values())):
        output = _dry(script, arguments, variables)
    else:
        key = (script, arguments, tuple(sorted(environment(**variables).items())))
        if key not in _outputs:
            _outputs[key] = _dry(script, arguments, variables)
        output = _outputs[key]
    return [shlex.split(line) for line in output.splitlines()]


_outputs: dict[tuple, str] = {}  #: output of each dry run in this process


def _dry(script, arguments, variables):
    done = bash(script, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def value(words, flag):
    """Return the value of the last occurrence of a flag, which takes effect."""
    assert flag in words, f"{flag} is not in {words}"
    return words[len(words) - 1 - words[::-1].index(flag) + 1]
