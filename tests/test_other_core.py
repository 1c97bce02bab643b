"""Test that tests/other_core.sh makes environments with the requested release of megatron-core."""

import shutil
import subprocess
import sys

import pytest

from tests.subprocesses import REPO, run

ASK = "import importlib.metadata as m; print(m.version('megatron-core'))"


@pytest.fixture
def made(tmp_path):
    """Return the command, and the stub of release 9.9 in an environment that was moved."""
    (tmp_path / "tests").mkdir()
    script = shutil.copy(REPO / "tests" / "other_core.sh", tmp_path / "tests")
    venv = tmp_path / ".megatron-core" / f"9.9-py{sys.version_info[0]}.{sys.version_info[1]}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    info = venv / "core" / "megatron_core-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.9\n")
    [packages] = venv.glob("lib/*/site-packages")
    (packages / "other_core.pth").write_text("/nowhere/core\n")
    (venv / "complete").touch()
    return ["bash", script, sys.executable, "9.9"], info


def test_a_moved_environment_has_its_release(made):
    command, _ = made
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert run([done.stdout.strip(), "-c", ASK]).stdout == "9.9\n"


def test_another_release_is_an_error(made):
    command, info = made
    shutil.rmtree(info)
    done = run(command)
    assert done.returncode == 1
    assert "[ERROR] " in done.stderr
    assert "remove this folder, and start again" in done.stderr
