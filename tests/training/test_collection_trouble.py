"""Tests of real runs whose collection fails: the disk is full, hangs or disappears.

Training continues with unchanged results, each rank logs the failure once, and the exit status is
not zero.
"""

import functools
import signal
import subprocess
import time

import pytest

from megatron.tensor_record import read_events, read_index
from tests.core.dumps import assert_sound, partial_files, run_of
from tests.file_systems import mount_or_skip
from tests.training.faults import LAYOUTS, STOPPED, TENSORS, Ended, losses, start, verify

SLOW = pytest.mark.slow
LAYOUT = pytest.mark.parametrize("layout", ["one", pytest.param("tensor", marks=SLOW)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A function that returns the losses of a layout without a collection; results are cached."""

    @functools.cache
    def losses_of(layout: str) -> list[tuple[float, float]]:
        ended = start(tmp_path_factory.mktemp("plain"), layout=layout, collect=False).end()
        assert set(ended.statuses) == {0}, ended.errors[-3000:]
        numbers = losses(ended)
        assert len(set(numbers)) == 6
        return numbers

    return losses_of


@pytest.fixture
def disk(tmp_path):
    """A file system of 24 MiB; one iteration fills more than half of it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_or_skip(folder, "size=24m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def assert_stopped(ended: Ended, ranks: int, expected: list[tuple[float, float]]) -> None:
    """Assert that every rank stopped collecting and continued to train."""
    assert losses(ended) == expected, "training is the same to the last digit"
    assert set(ended.statuses) == {1}, ended.errors[-3000:]
    assert ended.said(STOPPED) == ranks, "each rank reports it once"
    assert ended.reported(STOPPED) == 1, "the run ends with the reason"
    assert "Traceback" not in ended.errors


@LAYOUT
def test_a_full_disk(plain, disk, tmp_path, layout):
    ended = start(tmp_path / "run", layout=layout, dump=disk).end()
    assert_stopped(ended, LAYOUTS[layout][0], plain(layout))
    assert "No space left on device" in ended.errors
    assert len(assert_sound(disk)) > 100
    assert partial_files(disk) == []
    (card,) = ended.cards
    assert card["status"] == "failed"
    assert STOPPED in card["error"]
    assert sum(rank["tensors"] for rank in card["ranks"]) == len(list(disk.glob("*.pt")))
    for index in disk.glob("index_*.jsonl"):
        (event,) = [event for event in read_events(index) if event["event"] != "trained"]
        assert event["event"] == "failed"


#: command that retries while the folder is busy, because a file is being written to it
READ_ONLY = (
    "mount --bind {0} {0} && for i in $(seq 200); do "
    "mount -o remount,bind,ro {0} 2>/dev/null && exit 0; sleep 0.01; done; exit 32"
)


@pytest.mark.parametrize(
    "command",
    [
        # new files fail, but the index is already open
        pytest.param(READ_ONLY, id="read-only"),
        pytest.param("mv {0} {0}-elsewhere", id="vanishes", marks=SLOW),
        pytest.param("until rm -r {0} 2>/dev/null; do :; done", id="deleted"),
    ],
)
@LAYOUT
def test_a_folder_that_is_lost_during_the_run(plain, disk, tmp_path, layout, command):
    """The disk is slow, so that the queue is never empty. `disk` skips if it cannot mount."""
    dump, elsewhere = tmp_path / "t", tmp_path / "t-elsewhere"
    faults = {"at": 2, "command": command.format(dump), "slow": 0.003}
    options = ("--collect-max-host-gib", "0.002")
    ended = start(tmp_path / "run", *options, layout=layout, dump=dump, **faults).end()
    if command == READ_ONLY:
        subprocess.run(["umount", str(dump)], check=True)
    assert_stopped(ended, LAYOUTS[layout][0], plain(layout))
    left = next((path for path in (elsewhere, dump) if path.exists()), None)
    assert (left is None) == command.startswith("until"), "a deleted folder is not recreated"
    waiting = 50  # the largest number of tensors that 2 MiB of memory can hold
    assert left is None or len(assert_sound(left)) >= TENSORS - waiting


def test_a_read_only_folder_is_refused_before_training(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    mount_or_skip(folder, "ro")
    try:
        ended = start(tmp_path / "run", layout="one", dump=folder).end()
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert ended.statuses == [2]
    assert ended.steps == []
    assert ended.reported("cannot write to the tensor folder") == 1
    assert "Traceback" not in ended.errors


@LAYOUT
def test_two_runs_at_a_time_in_one_folder(plain, tmp_path, layout):
    dump, ranks = tmp_path / "dump", LAYOUTS[layout][0]
    options = ("--collect-iterations", "1-2", "--collect-layers", "first,last")
    both_runs = [
        start(tmp_path / name, *options, layout=layout, dump=dump) for name in ("first", "second")
    ]
    for started in both_runs:
        ended = started.end()
        assert set(ended.statuses) == {0}, ended.errors[-3000:]
        assert losses(ended) == plain(layout)[: len(losses(ended))]
    assert partial_files(dump) == []
    files = assert_sound(dump)
    runs = {run_of(path) for path in dump.glob("index_*.jsonl")}
    assert len(runs) == 2
    counts = set()
    for run in runs:
        indexes = sorted(dump.glob(f"index_{run}_*.jsonl"))
        assert len(indexes) == ranks
        numbers = [[line["counter"] for line in read_index(path)] for path in indexes]
        assert all(sorted(rank) == list(range(1, len(rank) + 1)) for rank in numbers)
        counts.add(tuple(map(len, numbers)))
        verified = verify(dump, run)
        assert verified.returncode == 0, verified.stdout[-3000:] + verified.stderr
    assert len(counts) == 1, "both runs have the same tensors"
    assert sum(sum(run) for run in counts) * 2 == len(files)


@LAYOUT
def test_a_disk_that_hangs_does_not_hang_training(plain, tmp_path, layout):
    """The writers of every rank wait forever in the kernel."""
    options = ("--collect-max-host-gib", "0.002")
    ended = start(tmp_path / "run", *options, layout=layout, hang_after=50, patience=2).end()
    assert_stopped(ended, LAYOUTS[layout][0], plain(layout))
    assert "no write has finished for 2 s" in ended.errors
    assert 0 < len(assert_sound(tmp_path / "run" / "dump")) <= 50 * LAYOUTS[layout][0]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
@LAYOUT
def test_a_signal_while_tensors_wait(tmp_path, layout, number):
    """Every rank receives the signal, as torchrun sends it."""
    ranks = LAYOUTS[layout][0]
    started = start(tmp_path / "run", "--train-iters", "1000", layout=layout, slow=0.02)
    end = time.monotonic() + 120
    while len(list(started.dump.glob("*.pt"))) < 50:
        assert time.monotonic() < end, "no tensors in two minutes"
        time.sleep(0.05)
    for process in started.processes:
        process.send_signal(number)
    sent, written = time.monotonic(), len(list(started.dump.glob("*.pt")))
    ended = started.end()
    assert ended.statuses == [128 + number] * ranks, ended.errors[-3000:]
    assert time.monotonic() - sent < 100
    assert "Traceback" not in ended.errors
    (card,) = ended.cards
    assert (card["status"], card["reason"]) == ("aborted", number.name)
    assert partial_files(started.dump) == []
    assert len(assert_sound(started.dump)) > written + 20, "queued tensors are written"
    for index in started.dump.glob("index_*.jsonl"):
        counters = sorted(record["counter"] for record in read_index(index))
        assert counters == list(range(1, len(counters) + 1))


@pytest.mark.parametrize(
    "layout", [pytest.param("one", marks=SLOW), "pipeline", pytest.param("tensor", marks=SLOW)]
)
def test_an_error_in_training_keeps_the_ring_of_every_rank(tmp_path, layout):
    options = ("--lr", "1e30", "--clip-grad", "0", "--collect-ring", "2")
    ended = start(tmp_path / "run", *options, layout=layout).end()
    dump = tmp_path / "run" / "dump"
    assert set(ended.statuses) == {1}
    assert ended.reported("--no-check-for-nan-in-loss-and-grad") == 1
    (card,) = ended.cards
    assert card["status"] == "aborted"
    assert "; lower --lr" in card["reason"]
    assert_sound(dump)
    last = len(ended.steps)
    kept_iterations = {}
    for index in dump.glob("index_*.jsonl"):
        (event,) = [event for event in read_events(index) if event["event"] != "trained"]
        assert event["event"] == "kept"
        kept_iterations[index.name[-8:-6]] = event["iterations"]
        assert {record["iteration"] for record in read_index(index)} == set(event["iterations"])
    iterations = [number for number in (last - 1, last) if number > 0]
    ranks = range(LAYOUTS[layout][0])
    assert kept_iterations == {f"{rank:02d}": iterations for rank in ranks}


def test_little_host_memory_only_costs_time(plain, tmp_path):
    limit = 1 << 20
    options = ("--collect-max-host-gib", str(limit / 2**30), "--collect-iterations", "1-2")
    ended = start(tmp_path / "run", *options).end()
    assert ended.statuses == [0], ended.errors[-3000:]
    assert losses(ended) == plain("one")[: len(losses(ended))]
    assert ended.memory["limit"] == limit
    assert limit / 2 < ended.memory["peak"] <= limit
    assert len(assert_sound(tmp_path / "run" / "dump")) == 2 * TENSORS


@SLOW
def test_kills_of_two_ranks_leave_a_sound_folder(tmp_path):
    """Three runs write to one folder, and each is killed while it collects."""
    dump, known = tmp_path / "dump", {}
    for number, tensors in enumerate((1, 300, 900)):
        before = len(known)
        started = start(tmp_path / str(number), layout="tensor", dump=dump)
        end = time.monotonic() + 120
        while len(list(dump.glob("*.pt"))) < before + tensors:
            assert time.monotonic() < end, "no tensors in two minutes"
        for process in started.processes:
            process.kill()
        ended = started.end()
        assert ended.statuses == [-signal.SIGKILL] * 2
        known = assert_sound(dump, known)
        assert len(known) >= before + tensors
        assert [card["status"] for card in ended.cards] == ["running"] * (number + 1)
