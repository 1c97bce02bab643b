"""A collection of the test's own, and a disk to fill."""

import subprocess

import pytest

from megatron.core import tensor_saver
from megatron.fake_quant import policy


@pytest.fixture
def fresh_saver(monkeypatch, tmp_path):
    """No environment of the developer's, and a saver and clock of the test's own."""
    for variable in ("TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(policy, "_current", None)
    yield
    tensor_saver.close()
    tensor_saver.configure()


def mount_or_skip(folder, options: str, device: str = "tmpfs", kind: str = "tmpfs") -> None:
    mount = ["mount", "-t", kind, "-o", options, device, str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system here: {error}")


@pytest.fixture
def read_only_disk(tmp_path):
    """A file system that nobody can write to, not even root."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    mount_or_skip(folder, "ro")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB, which needs the right to mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount_or_skip(folder, "size=1m")
    yield folder
    tensor_saver.close()  # also after a failure: an open index would hold the mount
    subprocess.run(["umount", str(folder)], check=True)
