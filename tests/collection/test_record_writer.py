"""Test a full disk: files and index lines stay whole, and the run card reports it."""

import json
import os
import threading

import pytest

from megatron.collection.record_writer import RecordWriter
from tests.collection.samples import TENSOR, record


class HalfFull:
    """An index on a disk that accepts only half of the next line."""

    def __init__(self, file):
        self._file, self._left = file, 100

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if not self._left:
            raise OSError(28, "No space left on device")
        taken, self._left = self._file.write(data[: self._left]), 0
        return taken


def test_a_file_whose_line_the_disk_does_not_take_goes_again(tmp_path):
    writer = RecordWriter(tmp_path, "run", 0)
    lock = threading.Lock()
    writer.write(TENSOR, record(1), lock, {})
    whole, writer._index = writer._index, HalfFull(writer._index)
    with pytest.raises(OSError, match="No space left"):
        writer.write(TENSOR, record(2), lock, {})
    writer._index = whole
    writer.write(TENSOR, record(3), lock, {})
    lines = [json.loads(line) for line in (tmp_path / "index_run_rank00.jsonl").open()]
    assert [line["counter"] for line in lines] == [1, 3], "the incomplete line was removed"
    assert {path.name for path in tmp_path.glob("*.pt")} == {line["file"] for line in lines}
    assert writer.records == 2
    writer.close()


def test_room_for_the_last_run_card_is_there_from_the_start(tmp_path):
    writer = RecordWriter(tmp_path, "run", 0)
    writer.write_run_card({"status": "running"}, last=False)
    card, room = tmp_path / "run_run.json", tmp_path / "run_run.json.partial"
    assert room.stat().st_blocks * 512 >= room.stat().st_size == 1 << 16
    file = room.stat().st_ino
    writer.write_run_card({"status": "failed"}, last=True)
    assert json.loads(card.read_text()) == {"status": "failed"}
    assert card.stat().st_ino == file, "the card is in the reserved blocks"
    assert not room.exists()


def test_a_finished_file_is_sent_to_the_disk(tmp_path, monkeypatch):
    """The whole file has left Python's buffer by then; a file system may refuse the request."""
    sent = []

    def posix_fadvise(file: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        sent.append(os.fstat(file).st_size)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    writer = RecordWriter(tmp_path, "run", 0)
    writer.write(TENSOR, record(1), threading.Lock(), {})
    writer.close()
    assert sent == [path.stat().st_size for path in tmp_path.glob("*.pt")] != []
