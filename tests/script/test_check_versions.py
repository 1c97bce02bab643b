"""Test which packages script/check_versions.py installs, and which environments it refuses."""

import sys
from pathlib import Path

import pytest

import check_versions


def test_each_environment_has_the_releases_that_its_name_promises():
    lowest, pins, older, newest = map(check_versions.requirements, check_versions.ENVIRONMENTS)
    assert {"torch==2.6", "megatron-core==0.16.1", "numba==0.60", "pytest==8.0"} <= set(lowest)
    assert not [line for line in lowest if ">=" in line]
    assert "torch==2.11.0" in older
    assert sorted(older[1:]) == sorted(line for line in newest if not line.startswith("torch"))
    assert pins == newest, "pip also gets script/constraints.txt"
    assert not [line for line in newest if line.startswith("triton")], "torch chooses its triton"


def test_an_environment_that_the_tests_would_not_use_is_refused(tmp_path, monkeypatch):
    environment = check_versions.ENVIRONMENTS[0]
    check_versions.check(environment, Path(sys.executable))
    setup = (check_versions.REPO / "setup.py").read_text().replace('"numpy": ">=', '"numpy": ">=9')
    (tmp_path / "setup.py").write_text(setup)
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (core / "_overlay.py").write_text(
        (check_versions.REPO / "megatron/core/_overlay.py").read_text()
    )
    monkeypatch.setattr(check_versions, "REPO", tmp_path)
    with pytest.raises(SystemExit, match=r"would not use .* it has numpy [\d.]+ \(>=9"):
        check_versions.check(environment, Path(sys.executable))


def test_a_python_that_fails_is_named(tmp_path, monkeypatch):
    environment = check_versions.ENVIRONMENTS[0]
    base = tmp_path / f"python{environment.python}"
    base.write_text("#!/bin/sh\nexit 127\n")
    base.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="could not create a virtual environment; see the message"):
        check_versions.install(environment, tmp_path / "versions")
