"""A checkpoint that cannot be written or read ends the run with one line, and nothing is lost."""

import os
import shutil
from pathlib import Path

import pytest

from megatron.training.checkpointing import files
from tests.training.runs import refused

HALF = "half"
GONE = "gone"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("*.distcp", HALF, "cannot be read: "),
        ("*.distcp", GONE, "cannot be read: "),
        ("common.pt", HALF, "cannot be read: "),
        ("common.pt", GONE, "is not a complete torch_dist checkpoint"),
        (".metadata", HALF, "cannot be read: "),
        ("metadata.json", HALF, "is not a complete torch_dist checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused(run_quickly, checkpoints, tmp_path, file, damage, message):
    copy = Path(shutil.copytree(checkpoints, tmp_path / "copy"))
    checkpoint = copy / "iter_0000004"
    for path in checkpoint.glob(file):
        if damage == GONE:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    line = refused(run_quickly("--load", copy))
    assert f"{checkpoint} {message}" in line
    assert "give --ckpt-step with " in line
    assert len(line) < 800


@pytest.mark.parametrize("file_bytes", [20_000, 4_000], ids=["tensors", "common"])
def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoints(
    run_quickly,
    checkpoints,
    tmp_path,
    file_bytes,
):
    """A limit on the size of a file acts like a full disk."""
    copy = Path(shutil.copytree(checkpoints, tmp_path / "copy"))
    options = ("--load", copy, "--save", copy, "--ckpt-step", "2", "--exit-interval", "3")
    training = run_quickly(*options, file_bytes=file_bytes)
    errors = [line for line in training.errors.splitlines() if "[ERROR]" in line]
    assert training.status == 1, training.errors
    assert "Traceback" not in training.errors
    (line,) = errors
    assert f"the checkpoint {copy / 'iter_0000003'} could not be written: " in line
    assert "make room or choose another --save, then resume with --load" in line
    assert (copy / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not (copy / "iter_0000003").exists()


def test_a_name_that_is_taken_ends_the_run(run_quickly, checkpoints, tmp_path):
    copy = Path(shutil.copytree(checkpoints, tmp_path / "copy"))
    options = ("--load", copy, "--save", copy, "--ckpt-step", "2", "--exit-interval", "3")
    (copy / "iter_0000003.partial").touch()
    line = refused(run_quickly(*options), status=1)
    assert "iter_0000003 could not be written: " in line
    assert "File exists" in line
    (copy / "iter_0000003.partial").unlink()
    (copy / "latest_checkpointed_iteration.txt.partial").mkdir()
    line = refused(run_quickly(*options), status=1)
    assert "iter_0000003 could not be written: " in line
    assert "latest_checkpointed_iteration.txt" in line


def test_what_killed_runs_have_left_is_removed(tmp_path):
    """Leftovers of any iteration are removed, and no other files."""
    names = ["iter_0000002", "iter_0000004.partial", "iter_0000002.old", "iter_0000003.old"]
    for name in (*names, "my.partial", "iter_0000001.partial.kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").touch()
    partial = files.begin(tmp_path / "iter_0000007")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001.partial.kept",
        "iter_0000002",
        "iter_0000003.old",  # the only copy of that checkpoint
        "iter_0000007.partial",
        "my.partial",
    ]
    assert not any(partial.iterdir())


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files and folders are flushed to the disk before a rename publishes them, then the rename."""
    happened = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def name_of(handle):
        return Path(f"/proc/self/fd/{handle}").resolve().name

    monkeypatch.setattr(os, "fsync", lambda h: (happened.append(name_of(h)), fsync(h)))
    for name, really in (("rename", rename), ("replace", replace)):

        def moved(path, target, really=really):
            happened.append(f"{path.name} -> {target.name}")
            return really(path, target)

        monkeypatch.setattr(Path, name, moved)
    partial = files.begin(tmp_path / "iter_0000002")
    for name in ("common.pt", "metadata.json", "__0_0.distcp"):
        (partial / name).touch()
    files.put_in_place(partial, tmp_path / "iter_0000002")
    files.write_tracker(tmp_path, 2)
    tracker = files.TRACKER
    assert set(happened[:3]) == {"common.pt", "metadata.json", "__0_0.distcp"}
    assert happened[3:] == [
        "iter_0000002.partial",
        "iter_0000002.partial -> iter_0000002",
        tmp_path.name,
        f"{tracker}.partial",
        f"{tracker}.partial -> {tracker}",
        tmp_path.name,
    ]


def test_a_tracker_that_cannot_be_read_is_one_line(run_quickly, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("four")
    assert "holds 'four', not an iteration" in refused(run_quickly("--save", tmp_path))


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_a_mistake_on_another_machine_is_said_there(run_quickly, local_rank, lines):
    """Data that is missing on one machine is reported there, before the ranks are connected."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": local_rank}
    training = run_quickly("--data-path", "nowhere", **variables)
    assert training.status == 2
    assert training.errors.count("[ERROR] data file nowhere.bin does not exist") == lines
    assert len(training.errors.splitlines()) == lines
