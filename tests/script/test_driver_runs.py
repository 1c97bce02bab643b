"""Test an audit by a driver, and a driver that is interrupted.

tests/test_readme.py runs the drivers from training to the figures.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import forks
from tests.script.drivers import COLLECT, DRAW, bash
from tests.script.stub_tree import stub_tree
from tests.subprocesses import REPO, environment, run


def test_an_audit_is_no_collection_that_failed(tmp_path):
    """The recipe that docs/recipes.md shows is audited."""
    [text] = re.findall(r"```yaml\n(.*?)```", (REPO / "docs" / "recipes.md").read_text(), re.S)
    recipe = tmp_path / "my_recipe.yaml"
    recipe.write_text(text)
    words = ["single", "--quant-recipe", recipe, "--preset", "tiny", "--tensor-dir", tmp_path / "t"]
    python = forks.interpreter("analysis", "training")
    done = bash(COLLECT, *words, "--", "--quant-audit", LAB_PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert "> stopping before training (--quant-audit)" in done.stdout
    assert "nvfp4:sr" in done.stdout
    assert not (tmp_path / "t").exists()


def test_a_run_that_collects_nothing_is_not_drawn(tmp_path, files):
    """An older run is not drawn in place of a run whose ring was never written."""
    tree = stub_tree(tmp_path / "tree", "'no tensor'")
    older = tmp_path / "dump" / "mxfp8" / "older.pt"
    older.parent.mkdir(parents=True)
    words = ["both", "mxfp8", "--preset", "tiny", "--tensor-dir", tmp_path / "dump", *files]
    for _ in range(2):
        done = run(
            ["bash", tree / "run_tensor_draw.sh", *words, "--collect-ring", "2"],
            env=environment(LAB_PYTHON=sys.executable),
        )
        assert done.returncode == 0, done.stderr
        assert "no event triggered the collection" in done.stdout
        assert "Nothing is drawn, because this run collected no tensor." in done.stderr
        assert not (tree / "draw").exists()
        older.touch()


def test_an_interrupt_ends_training_too(tmp_path):
    """Only the outermost script gets a signal, as from a job scheduler."""
    words = [
        "bash",
        DRAW,
        "both",
        "mxfp8",
        "--preset",
        "tiny",
        "--control-iter",
        "0",
        "--tensor-dir",
        tmp_path,
    ]
    driver = subprocess.Popen(
        [str(word) for word in words],
        cwd=REPO,
        env=environment(LAB_PYTHON=sys.executable),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not list(tmp_path.glob("mxfp8/*.pt")):
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, "no tensor in two minutes"
        time.sleep(0.1)
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "[ERROR] interrupted (SIGTERM): training was stopped" in err
    assert "mxfp8: " in out
    assert list(tmp_path.glob("mxfp8/*.pt"))
    assert not processes_with(str(tmp_path))


def processes_with(word):
    """Return the command lines of all living processes that contain a word."""
    if not Path("/proc/self").exists():
        return subprocess.run(
            ["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True
        ).stdout.count(word)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in line:
                found.append(line)
    return found
