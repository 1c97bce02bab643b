"""Test that pip never installs outside the virtual environment of the peers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script.setup_tree import separate_python, wheel
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import peers_env


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace `.venv-peers` with a virtual environment of a stand-in for the user's Python."""
    python = separate_python(tmp_path)
    folder = tmp_path / ".venv-peers"
    subprocess.run([python, "-m", "venv", folder], check=True)
    wheel(tmp_path, "lab-peer", "1.0")
    monkeypatch.setattr(peers_env, "VENV", folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    return folder


def test_pip_installs_into_the_environment_and_nowhere_else(venv: Path) -> None:
    python = venv / "bin/python"
    (venv / "constraints.txt").write_text("lab-peer==1.0\n")
    assert peers_env.is_inside(python, venv)
    assert peers_env.install(python, venv / "constraints.txt", "lab-peer==1.0")
    assert peers_env.installed(python)["lab-peer"] == "1.0"

    (venv / "pyvenv.cfg").unlink()
    assert not peers_env.is_inside(python, venv)
    with pytest.raises(SystemExit, match="not a working virtual environment; delete it"):
        peers_env.install(python, venv / "constraints.txt", "lab-peer==1.0")
    home = venv.parent / "user's python"
    assert not list(home.rglob("*-packages/*"))
    assert not (venv.parent / "elsewhere").exists()

    shutil.rmtree(venv / "bin")
    assert not peers_env.is_inside(python, venv)
