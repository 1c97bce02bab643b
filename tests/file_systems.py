"""File systems for tests that need one of their own."""

import subprocess

import pytest


def mount_or_skip(folder, options: str, device: str = "tmpfs", kind: str = "tmpfs") -> None:
    """Mount a file system on `folder`, or skip the test where mounting is not allowed."""
    mount = ["mount", "-t", kind, "-o", options, device, str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system here: {error}")
