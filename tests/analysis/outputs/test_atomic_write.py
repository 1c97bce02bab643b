"""Tests that errors contain the name of an output file that cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron.analysis.outputs.atomic_write import write


def test_a_full_disk_is_reported_with_the_file_and_leaves_no_part(tmp_path, monkeypatch):
    def full(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"cannot write .*study\.csv: No space left on device; free"):
        write(tmp_path / "study.csv", b"a,b\n")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_reported_with_the_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*out/study\.csv: .*; free some space"):
        write(tmp_path / "out" / "study.csv", b"")
