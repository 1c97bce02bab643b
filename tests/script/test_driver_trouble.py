"""Test that a driver whose collection cannot write fails with a reason and keeps files readable."""

import subprocess

import pytest

from megatron.tensor_record import run_card_name
from tests import forks
from tests.core.dumps import assert_sound, partial_files, run_of
from tests.file_systems import mount_or_skip
from tests.script.drivers import COLLECT, bash
from tests.subprocesses import REPO


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_or_skip(folder, "size=3m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_makes_the_driver_fail_at_the_end_of_training(disk):
    where = ("--preset", "tiny", "--tensor-path", disk, "--collect-keep-free-gib", "0")
    python = forks.interpreter("training")
    done = bash(COLLECT, "single", "mxfp8", *where, LAB_PYTHON=python)
    assert done.returncode == 1
    assert "[ERROR] training failed (exit status 1); the log is " in done.stderr
    reason = f"cannot write to {disk}/mxfp8: [Errno 28] No space left on device"
    assert done.stderr.count(reason) == 1
    assert "the reasons are above" not in done.stderr, "one type has one error"
    [log] = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("  log ")]
    assert "> stopping after iteration 1" in (REPO / log).read_text(), "training went on to its end"
    files = assert_sound(disk / "mxfp8")
    assert f"mxfp8: {len(files)} tensors" in done.stdout
    assert partial_files(disk / "mxfp8") == []
    (index,) = (disk / "mxfp8").glob("index_*.jsonl")
    assert '"status": "failed"' in (disk / "mxfp8" / run_card_name(run_of(index))).read_text()
