"""Test that a collecting process may end at any instant, by a kill or by a handled signal."""

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.dumps import assert_sound, index_lines, partial_files
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("nursery_worker.py")
TENSORS = 4 * 2 * 8  #: tensors that a child writes
TIMES = 30
PROMPT = 20.0  #: seconds in which a run must end, much less than the 300 s allowed for a disk


class Nursery:
    """The worker's process; the first child, which nothing ends, gives the duration of a run."""

    def __init__(self, process: subprocess.Popen, folder: Path, seed: int):
        self._process, self._folder, self._random = process, folder, random.Random(seed)
        whole = self._raise_one("first", 0.0)
        assert whole["status"] == 0
        self._writing = whole["seconds"]
        self._life = whole["first"] + whole["seconds"]

    def _raise_one(self, since: str, seconds: float, *numbers: int) -> dict:
        request = json.dumps([str(self._folder), since, seconds, *map(int, numbers)])
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self, times: int, *numbers: int) -> Iterator[dict]:
        """Yield children that signals ended: a third at any instant, the others while writing."""
        ended = 0
        for attempt in range(5 * times):
            since, length = [("first", self._writing), ("birth", self._life)][attempt % 3 == 0]
            at = self._random.uniform(0.0, length)
            found = self._raise_one(since, at, *numbers) | {"at": at}
            if found["status"] != 0:  # otherwise, it had already ended
                ended += 1
                yield found
            if ended == times:
                return
        pytest.fail(f"{ended} of {5 * times} processes were still running when a signal was sent")


@pytest.fixture(scope="module")
def worker():
    """Return the process that forks the children for all tests."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                cwd=REPO,
                env=environment(PYTHONPATH=REPO),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)
        yield process


@pytest.fixture
def nursery(worker, tmp_path):
    return Nursery(worker, tmp_path, seed=20)


def test_kills_at_any_instant_leave_a_sound_folder(nursery, tmp_path):
    """All children write to one folder."""
    known = assert_sound(tmp_path)
    assert len(known) == TENSORS
    cut_short, unfinished, cards = 0, 0, set()
    for end in nursery.end(TIMES, signal.SIGKILL):
        assert end["status"] == -signal.SIGKILL
        before, known = known, assert_sound(tmp_path, known)
        cut_short += 0 < len(known) - len(before) < TENSORS
        for path in new(tmp_path, cards):
            unfinished += json.loads(path.read_text())["status"] == "running"
    assert cut_short >= TIMES // 5, "many were killed while they wrote, even on a busy machine"
    assert unfinished >= cut_short


def new(folder: Path, seen: set[Path]) -> set[Path]:
    """Return the run cards that were not there before."""
    found = set(folder.glob("run_*.json")) - seen
    seen |= found
    return found


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]], ids=["once", "passed-on-twice"]
)
def test_signals_at_any_instant_end_a_run_soon_and_lose_nothing(nursery, tmp_path, numbers):
    """Tensors taken before the signal are on disk, and the card holds the cause of the end.

    The cause is the signal that Python handled first. Of two signals sent at once, it may be either
    one, because the system may deliver the second one to a writer thread.
    """
    known, cards, aborted = assert_sound(tmp_path), set(), 0
    new(tmp_path, cards)
    for end in nursery.end(TIMES, *numbers):
        cause = signal.Signals(end["status"] - 128)
        assert cause in numbers
        assert end["seconds"] < end["at"] + PROMPT
        known = assert_sound(tmp_path, known)
        assert partial_files(tmp_path) == []
        for path in new(tmp_path, cards):
            card = json.loads(path.read_text())
            written = card["ranks"][0]["tensors"]
            if card["status"] == "finished":
                assert written == TENSORS, "the signal came after the last of them"
            else:
                assert (card["status"], card["reason"]) == ("aborted", cause.name)
                aborted += 0 < written < TENSORS
            index = tmp_path / f"index_{card['run_id']}_rank00.jsonl"
            lines = index_lines(index) if written else []
            assert sorted(line["counter"] for line in lines) == list(range(1, written + 1))
    assert aborted >= TIMES // 3
