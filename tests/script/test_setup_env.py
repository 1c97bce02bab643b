"""Test script/setup_env.sh in copies of the tree whose only requirement is a wheel made here."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megatron.core._overlay import SUPPORTED
from tests.script.setup_tree import Tree, check_error, separate_python
from tests.subprocesses import REPO, environment, free_port, run


@pytest.fixture(scope="module")
def python(tmp_path_factory, linked_pip: Path) -> Path:
    """Return the Python of a virtual environment whose base has an `ensurepip` that links pip."""
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
    """Return the time of the fastest of three calls, in seconds; other tests may delay a call."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert tree.call(**changes).returncode == 0
        times.append(time.perf_counter() - started)
    return min(times)


# --- a Python that has everything -----------------------------------------------------------------


def test_the_python_in_path_is_used_if_its_packages_fit(tree):
    tree.python("python3")
    tree.require_the_real_packages()  # the tests' Python has them
    result = tree.call()
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable}\n", "")
    assert not (tree.root / ".venv").exists()
    assert fastest(tree) < 1


def test_lab_python_takes_the_place_of_python3(tree):
    tree.require_the_real_packages()
    tree.python("python3", "echo must not run; exit 1")
    assert tree.call(LAB_PYTHON=sys.executable).stdout == f"{sys.executable}\n"


def installed_in(folder: Path, **releases: str) -> str:
    """Make packages look installed in `folder`, for use in PYTHONPATH; return the folder."""
    for name, release in releases.items():
        info = folder / f"{name}-{release}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {release}\n")
    return str(folder)


def test_other_releases_within_the_ranges_are_used_as_they_are(tree, tmp_path):
    tree.pin("1.1")
    user = installed_in(tmp_path / "user", lab_runtime="1.2.0a0+nv25.01")
    result = tree.call(PYTHONPATH=user)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("/python\n")
    assert not (tree.root / ".venv").exists()


@pytest.mark.parametrize(
    ("release", "options", "reason"),
    [
        ("0.9", (), "because it has lab-runtime 0.9 (>=1.0 is needed); install the required"),
        ("1.0", ("--dev",), "because it lacks lab-lint==1.0; install the required"),
    ],
)
def test_a_line_names_the_packages_that_do_not_fit(tree, tmp_path, release, options, reason):
    (tree.root / ".venv.lock").mkdir()  # prevents making .venv; only the line is needed
    user = installed_in(tmp_path / "user", lab_runtime=release)
    result = tree.call(*options, PYTHONPATH=user)
    (note,) = [line for line in result.stderr.splitlines() if "[NOTE]" in line]
    assert reason in note


# --- the tables of setup.py -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(REPO / "setup.py"))


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.6.0a0+ecf3bae40a.nv25.01", ">=2.6", True),  # NVIDIA's containers
        ("2.5.1", ">=2.6", False),
        ("1.26", ">=1.26.0", True),
        ("3.0.1", ">=2,<3", False),
        ("0.16.1", "==0.16.1", True),
        ("0.16.10", "==0.16.1", False),
        ("0.17.1", "==0.16.1 or ==0.17.1", True),
        ("0.17.0", "==0.16.1 or ==0.17.1", False),
        ("2.1", ">=2,!=2.1.0", False),
        ("unknown", ">=1", False),
        ("unknown", "", True),
    ],
)
def test_a_release_is_compared_with_a_range(tables, version, wanted, expected):
    assert tables["fits"](version, wanted) is expected


def test_what_an_environment_lacks_is_one_line(tables):
    group = {"torch": ">=2.6", "numba": ">=0.58.1", "tqdm": ">=4.65"}
    misfits = tables["misfits"]
    assert misfits({"torch": "2.6", "numba": "1.0", "tqdm": "4.65.1"}.get, group) == ""
    assert misfits({"torch": "2.5.1", "tqdm": "5"}.get, group) == (
        "it has torch 2.5.1 (>=2.6 is needed) and it lacks numba>=0.58.1"
    )
    assert misfits({}.get, group) == "it has none of the required packages"


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_every_package_has_a_pin_within_its_range(tables, monkeypatch, minor):
    monkeypatch.setattr(sys, "version_info", (3, minor))
    groups = [tables[name] for name in ("RUNTIME", "TEST", "TRACKING", "LINT")]
    pins, ranges = tables["pins"](*groups), tables["ranges"](*groups)
    assert pins.keys() == ranges.keys()
    assert all(tables["fits"](pin, ranges[name]) for name, pin in pins.items())
    assert pins["numpy"] == ("2.2.6" if minor == 10 else "2.4.6")
    assert ("en_dtypes" in pins) == (minor < 13)


def test_the_tests_run_with_packages_that_fit(tables):
    """In .venv, the releases are those of script/constraints.txt."""
    groups = tables["RUNTIME"], tables["TEST"]
    assert tables["misfits"](version, *groups) == ""
    if Path(sys.prefix).resolve() == (REPO / ".venv").resolve():
        pins = tables["pins"](*groups)
        assert {name: version(name).split("+")[0] for name in pins} == pins


def test_the_page_shows_the_ranges(tables):
    text = (REPO / "docs/requirements.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| ((?:==|>=)[^|]*) \| .* \|$", text, re.M))
    optional = tables["OPTIONAL"] | tables["CLUSTER"] | tables["EXPLORER"]
    assert rows == tables["RUNTIME"] | optional


def test_requirements_have_markers(tables):
    lines = tables["requirements"](tables["TEST"])
    assert "en_dtypes>=0.0.4; python_version < '3.13'" in lines
    assert "triton>=3.2; sys_platform == 'linux'" in lines
    (wanted,) = tables["requirements"]({"megatron-core": "==0.16.1 or ==0.17.1 or ==0.18.2"})
    assert wanted == "megatron-core>=0.16.1,<=0.18.2"
    assert tables["RUNTIME"]["megatron-core"] == " or ".join(f"=={s}" for s in SUPPORTED)


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
        PIP_RETRIES="1",
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
    (tree.root / ".venv.lock").mkdir()  # even root cannot open a folder as a file
    check_error(tree.call(), "cannot write")


@pytest.mark.slow
def test_the_real_requirements(tree):
    """A complete installation downloads what pip has not cached, up to some GB."""
    tree.require_the_real_packages()
    python = sys._base_executable
    settings = {k: v for k, v in environment().items() if k.startswith(("PIP_", "PATH", "HOME"))}
    result = run(tree.command(), env=settings | {"LAB_PYTHON": python})
    if result.stdout == f"{python}\n":
        pytest.skip(f"{python} has the requirements itself, so that there is nothing to make")
    assert result.stdout == f"{tree.venv_python}\n", result.stderr
    check = "import megatron.core, transformers, seaborn, pytest, sys; print(sys.prefix)"
    assert run([tree.venv_python, "-c", check]).stdout == f"{tree.root}/.venv\n"
