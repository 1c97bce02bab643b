"""Tests that training continues if the TensorBoard folder cannot be written, and reports it."""

import subprocess

import pytest

from tests.file_systems import mount_or_skip
from tests.training.faults import LAYOUTS, losses, start

SLOW = pytest.mark.slow
CONTINUES = "training continues without TensorBoard"
INCOMPLETE = "training is complete, but TensorBoard's event files are not: "


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_or_skip(folder, "size=64k")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


FILL = "dd if=/dev/zero of={0}/filler bs=4k 2>/dev/null; true"


@pytest.mark.parametrize("layout", ["one", pytest.param("tensor", marks=SLOW)])
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(FILL, "No space left on device", id="full"),
        pytest.param("rm -r {0}/tb", "No such file or directory", id="removed"),
    ],
)
def test_a_folder_that_is_lost_during_the_run(disk, tmp_path, layout, command, reason):
    folder = disk / "tb"
    flags = ("--tensorboard-dir", folder, "--save", tmp_path / "ck", "--train-iters", "30")
    faults = {"at": 2, "command": command.format(disk)}
    ended = start(tmp_path / "run", *flags, layout=layout, collect=False, **faults).end()
    plain = start(tmp_path / "plain", "--train-iters", "30", layout=layout, collect=False).end()
    assert losses(ended) == losses(plain), "training is the same to the last digit"
    assert ended.statuses == [1] * LAYOUTS[layout][0], ended.errors[-3000:]
    assert ended.said(CONTINUES) == 1
    assert ended.reported(INCOMPLETE) == 1
    assert ended.errors.count(reason) == 2
    assert "Traceback" not in ended.errors
    assert (tmp_path / "ck/latest_checkpointed_iteration.txt").read_text() == "30"


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, options):
    folder = tmp_path / "tb"
    folder.mkdir()
    mount_or_skip(folder, options)
    try:
        if options != "ro":
            subprocess.run(FILL.format(folder), shell=True, check=True)
        flags = ("--tensorboard-dir", folder)
        ended = start(tmp_path / "run", *flags, collect=False).end()
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert ended.statuses == [2]
    assert ended.steps == []
    assert ended.reported(f"--tensorboard-dir {folder} cannot be written (") == 1
    assert "Traceback" not in ended.errors


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "tb").write_text("mine")
    ended = start(tmp_path / "run", "--tensorboard-dir", tmp_path / "tb", collect=False).end()
    assert ended.statuses == [2]
    assert ended.reported("cannot be written (File exists)") == 1
