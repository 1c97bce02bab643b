"""Test the drivers from training to the figures, and a driver that is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.tensor_record import ON_REQUEST, TENSOR_NAMES, TensorRecord
from tests.script.drivers import COLLECT, DRAW, bash
from tests.subprocesses import REPO, environment


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run `run_tensor_draw.sh both mxfp8` on the default corpus."""
    folder = tmp_path_factory.mktemp("both")
    done = bash(
        DRAW,
        "both",
        "mxfp8",
        "--preset",
        "tiny",
        "--tensor-dir",
        folder / "logs",
        "--output-dir",
        folder / "draw",
    )
    return done, folder


def test_both_collects_every_tensor_name_and_draws(both):
    done, folder = both
    assert done.returncode == 0, done.stderr
    files = list((folder / "logs" / "mxfp8").glob("*.pt"))
    found = set()
    for path in files:
        payload = torch.load(path, weights_only=True)
        record = TensorRecord.from_metadata(payload["metadata"])
        assert record.filename == path.name
        assert list(payload["tensor"].shape) == record.shape
        found.add((record.layer_type, record.tensor_name))
    expected = {(kind, name) for kind, names in TENSOR_NAMES.items() for name in names}
    assert found == {(kind, name) for kind, name in expected if name not in ON_REQUEST}
    assert (folder / "draw" / "quick_analysis.png").stat().st_size > 10_000
    assert (folder / "draw" / "report.html").stat().st_size > 1_000_000
    text = (folder / "draw" / "tensor_stats.txt").read_text()
    assert f"{len(files)} tensors, " in text
    assert "could not be read" not in text


def test_both_reports_where_to_look(both):
    done, _ = both
    for word in ("phase", "component", "operation", "layer", "folder", "log ", "next"):
        assert f"\n  {word}" in done.stdout
    [log] = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("  log ")]
    assert "lm loss" in (REPO / log).read_text()


def test_an_audit_is_no_collection_that_failed(tmp_path):
    """Return the recipe that the page on recipes shows."""
    [text] = re.findall(r"```yaml\n(.*?)```", (REPO / "docs" / "recipes.md").read_text(), re.S)
    recipe = tmp_path / "my_recipe.yaml"
    recipe.write_text(text)
    words = ["single", "--quant-recipe", recipe, "--preset", "tiny", "--tensor-dir", tmp_path / "t"]
    done = bash(COLLECT, *words, "--", "--quant-audit")
    assert done.returncode == 0, done.stderr
    assert "> stopping before training (--quant-audit)" in done.stdout
    assert "nvfp4:sr" in done.stdout
    assert not (tmp_path / "t").exists()


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
