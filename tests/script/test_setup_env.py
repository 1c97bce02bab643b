"""Test script/setup_env.sh in copies of the tree whose only requirement is a wheel made here."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.script.setup_tree import Tree, check_error, separate_python
from tests.subprocesses import REPO, environment, free_port, run


@pytest.fixture(scope="module")
def python(tmp_path_factory, linked_pip: Path) -> Path:
    """Return the Python of a virtual environment, as the tests' own, whose base only links pip."""
    folder = tmp_path_factory.mktemp("python")
    try:
        base = separate_python(folder, linked_pip=linked_pip)
    except pytest.skip.Exception:  # slower, but no less strict: only .venv is checked here
        return Path(sys.executable)
    run([base, "-m", "venv", "--without-pip", folder / "venv"])
    return folder / "venv/bin/python"


@pytest.fixture
def tree_with_ensurepip(tmp_path: Path) -> Tree:
    """Return a tree whose python3 is the one that runs the tests."""
    return Tree(tmp_path)


@pytest.fixture
def tree(tree_with_ensurepip: Tree, python: Path) -> Tree:
    tree_with_ensurepip.python("python3", f'exec "{python}" "$@"')
    return tree_with_ensurepip


def fastest(tree: Tree, **changes: str) -> float:
    """Return the seconds of the fastest of three calls; other tests may delay the others."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert tree.call(**changes).returncode == 0
        times.append(time.perf_counter() - started)
    return min(times)


# --- a Python that has everything -----------------------------------------------------------------


def test_the_python_in_path_is_used_if_it_has_the_pins(tree):
    tree.python("python3")
    shutil.copy(REPO / "setup.py", tree.root)  # the real pins, which the tests' Python satisfies
    result = tree.call()
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable}\n", "")
    assert not (tree.root / ".venv").exists()
    assert fastest(tree) < 1


def test_lab_python_takes_the_place_of_python3(tree):
    shutil.copy(REPO / "setup.py", tree.root)
    tree.python("python3", "echo must not run; exit 1")
    assert tree.call(LAB_PYTHON=sys.executable).stdout == f"{sys.executable}\n"


def test_pins_are_what_the_tests_run_with():
    pins = runpy.run_path(str(REPO / "setup.py"))
    wanted = pins["pins"](pins["RUNTIME"], pins["TEST"])
    assert {name: version(name).split("+")[0] for name in wanted} == wanted


def test_every_pin_has_a_requirement_for_each_supported_python():
    pins = runpy.run_path(str(REPO / "setup.py"))
    lines = pins["requirements"](pins["RUNTIME"])
    assert "torch==2.13.0" in lines
    assert "numpy==2.4.6; python_version >= '3.11'" in lines
    assert "numpy==2.2.6; python_version < '3.11'" in lines


# --- a Python that cannot be used -----------------------------------------------------------------


@pytest.mark.parametrize("answer", ["3.8.10\n/usr/bin/python3", "Python 3.8.10"])
def test_an_old_python_is_named(tree, answer):
    tree.python("python3", f"printf '%b\\n' '{answer}'")
    check_error(tree.call(), "3.8.10", "3.10 or newer")


def test_a_newer_python_in_path_is_suggested(tree):
    tree.python("python3", "echo 3.9.2")
    tree.python("python3.12")
    check_error(tree.call(), "3.9.2", f"LAB_PYTHON={tree.bin}/python3.12")


def test_no_python(tree):
    (tree.bin / "python3").unlink()
    check_error(tree.call(), "no 'python3' in PATH", "install")


def test_a_python_that_does_not_run(tree):
    tree.python("python3", "echo 'cannot open shared object' >&2; exit 127")
    check_error(tree.call(), "does not run", "cannot open shared object")


def test_a_python_without_venv(tree):
    (tree.root / "ensurepip.py").write_text("raise ImportError('no ensurepip')\n")
    result = tree.call(PYTHONPATH=str(tree.root))
    check_error(result, "no venv module", "apt install python3.", "LAB_PYTHON")
    assert not (tree.root / ".venv").exists()


def test_options(tree):
    assert "LAB_PYTHON" in tree.call("--help").stdout
    check_error(tree.call("--verbose"), "--verbose", "--dev")


# --- making .venv ---------------------------------------------------------------------------------


def test_venv_is_made_once_and_then_found_without_a_network(tree_with_ensurepip):
    tree = tree_with_ensurepip
    tree.check_made(tree.call())
    unreachable = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/simple"}
    again = tree.call(**unreachable)
    assert (again.stdout, again.stderr) == (f"{tree.venv_python}\n", "")
    assert fastest(tree, **unreachable) < 1

    tree.python("python3", "echo 3.8.10")
    assert tree.call().stdout == f"{tree.venv_python}\n", "a complete .venv needs no other Python"

    tree.python("python3")
    tree.pin("1.1")
    changed = tree.call()
    assert "Completing" in changed.stderr
    assert tree.installed() == "1.1\n"


def test_an_unreachable_index_is_explained_and_the_next_call_repairs(tree):
    result = tree.call(
        PIP_NO_INDEX="0",
        PIP_FIND_LINKS="",
        PIP_RETRIES="0",
        PIP_INDEX_URL=f"http://127.0.0.1:{free_port()}/simple",
    )
    check_error(result, "cannot reach its package index", "PIP_INDEX_URL", "PIP_FIND_LINKS")
    tree.check_made(tree.call())


def test_a_release_that_is_nowhere(tree):
    tree.pin("9.9")
    result = tree.call()
    check_error(result, "cannot install the requirements")
    assert "lab-runtime==9.9" in result.stderr, "pip's own message stays visible"


def test_a_killed_build_is_made_anew(tree):
    build = subprocess.Popen(
        tree.command(),
        env=tree.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    marker = tree.root / ".venv/.lab-making"
    while not marker.exists() and build.poll() is None:
        time.sleep(0.01)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    (tree.root / ".venv/leftover").touch()
    tree.check_made(tree.call())
    assert not (tree.root / ".venv/leftover").exists()


def test_a_damaged_venv_is_repaired(tree):
    tree.check_made(tree.call())
    (info,) = tree.root.glob(".venv/lib/*/site-packages/lab_runtime-1.0.dist-info")
    shutil.rmtree(info)
    tree.check_made(tree.call())
    assert info.exists()

    # The same happens if the interpreter that it was made from is uninstalled.
    tree.venv_python.unlink()
    tree.venv_python.symlink_to("/nonexistent/python")
    tree.check_made(tree.call())


def test_your_own_venv_is_completed_in_place(tree, python):
    run([python, "-m", "venv", "--without-pip", tree.root / ".venv"])
    (tree.root / ".venv/mine").touch()
    tree.check_made(tree.call())
    assert (tree.root / ".venv/mine").exists()


def test_two_calls_at_once_build_once(tree):
    calls = [
        subprocess.Popen(
            tree.command(),
            env=tree.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [call.communicate(timeout=120) for call in calls]
    assert [out for out, _ in outputs] == [f"{tree.venv_python}\n"] * 2
    assert sum("Installing" in err for _, err in outputs) == 1


def test_a_tree_that_cannot_be_written(tree):
    (tree.root / ".venv.lock").mkdir()  # also root cannot open a folder as a file
    check_error(tree.call(), "cannot write")


@pytest.mark.slow
def test_the_real_requirements(tree):
    """A complete installation downloads what pip has not cached, up to some GB."""
    shutil.copy(REPO / "setup.py", tree.root)
    python = sys._base_executable
    settings = {k: v for k, v in environment().items() if k.startswith(("PIP_", "PATH", "HOME"))}
    result = run(tree.command(), env=settings | {"LAB_PYTHON": python})
    if result.stdout == f"{python}\n":
        pytest.skip(f"{python} has the requirements itself, so that there is nothing to make")
    assert result.stdout == f"{tree.venv_python}\n", result.stderr
    check = "import megatron.core, transformers, seaborn, pytest, sys; print(sys.prefix)"
    assert run([tree.venv_python, "-c", check]).stdout == f"{tree.root}/.venv\n"
