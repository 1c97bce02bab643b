"""Test that every script answers --help with exit status 0 and an example that names it."""

import itertools
import os
import re
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

FOLDERS = ("", "examples", "script", "benchmarks", "tests")


def is_script(path: Path) -> bool:
    """Return whether a file is a program rather than a module or a sourced script."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return text.startswith("#!")
    of_tests = path.is_relative_to(REPO / "tests")
    return '__name__ == "__main__"' in text and not of_tests and path.name != "setup.py"


def scripts() -> list[Path]:
    """Return all scripts of the tree, recognized by their content."""
    found = set()
    for folder in FOLDERS:
        walk = (REPO / folder).glob if not folder else (REPO / folder).rglob
        found |= {path for suffix in ("py", "sh") for path in walk(f"*.{suffix}")}
    return sorted(path for path in found if is_script(path))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Run every script with --help, from another folder and without PYTHONPATH."""
    env = environment(LAB_PYTHON=sys.executable)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def ask(path: Path) -> tuple[int, str, str]:
        if path.suffix == ".py":
            done = forks.run(path, "--help", cwd=elsewhere, env=env, libraries_only=True)
        else:
            done = run(["bash", path, "--help"], cwd=elsewhere, env=env)
        return done.returncode, done.stdout, done.stderr

    found = {name_of(path): ask(path) for path in scripts()}
    assert not list(elsewhere.iterdir()), "--help writes no file"
    return found


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def test_scripts_of_every_kind_are_found():
    names = {name_of(path) for path in scripts()}
    assert {
        "pretrain_gpt.py",
        "run_tensor_collection.sh",
        "examples/python/recompute_gemm.py",
        "examples/slurm/pretrain.sh",
        "benchmarks/training_worker.py",
        "script/data/preprocess.py",
        "script/llama31-8b/pretrain_llama31-8b_dolma_bf16.sh",
        "tests/run_tests.sh",
    } <= names
    assert "script/driver.sh" not in names, "it is sourced"


@pytest.mark.parametrize("path", scripts(), ids=name_of)
def test_it_explains_itself_with_an_example(answers, path):
    status, output, errors = answers[name_of(path)]
    assert status == 0, errors
    assert "Traceback" not in errors
    # A forwarding script prints the help of the script that it starts, which has the same name.
    called = "script/configs" if path.name == "__main__.py" else path.name
    lines = [line for line in output.splitlines() if re.search(rf"{re.escape(called)}\b", line)]
    examples = [line for line in lines if not line.lower().startswith("usage:")]
    assert examples, f"no example of {called} in\n{output}"
    for line in examples:
        assert not re.search(r"\S {3,}--", line), f"an example has lost its line break: {line}"
    for line, following in itertools.pairwise(output.splitlines()):
        if line in examples and re.match(" +--", following):
            assert line.endswith("\\"), f"an example continues without a backslash: {line}"
