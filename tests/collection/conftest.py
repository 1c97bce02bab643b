"""Fixtures: a collection that belongs to one test, and small or read-only disks."""

import subprocess

import pytest

from megatron.collection import session, session_end
from megatron.fake_quant import policy
from tests.file_systems import mount_or_skip
from tests.subprocesses import NO_SETTINGS


@pytest.fixture
def fresh_saver(monkeypatch):
    """Remove the developer's environment, and end the collection after the test."""
    for variable in ("TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(NO_SETTINGS))
    monkeypatch.setattr(policy, "_current", None)
    yield
    session_end.close()
    session.configure()


@pytest.fixture
def read_only_disk(tmp_path):
    """Return a file system that nobody can write to, not even root."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    mount_or_skip(folder, "ro")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of one MiB; mounting it requires permission."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount_or_skip(folder, "size=1m")
    yield folder
    session_end.close()  # even after a failure: an open index would hold the mount
    subprocess.run(["umount", str(folder)], check=True)
