"""Test the writer threads: copies, the limit on them, and failing disks."""

import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.collection import session, session_end, settings
from megatron.collection.background_writer import BackgroundWriter
from megatron.collection.host_buffers import HostBuffers
from megatron.collection.record_writer import RecordWriter
from megatron.collection.training_clock import MicroBatch, clock
from megatron.tensor_record import read_events, read_index
from tests.collection.samples import SIZE, TENSOR, nothing, record, save


class Gate(RecordWriter):
    """A disk that writes only after `open` is set."""

    def __init__(self, folder: Path):
        super().__init__(folder, "run", 0)
        self.open = threading.Event()
        self.failure: Exception | None = None

    def write(self, tensor, record, index, scales):
        self.open.wait()
        if self.failure is not None:
            raise self.failure
        super().write(tensor, record, index, scales)


@pytest.fixture
def disk(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open.set()  # no thread is left waiting


def fill(writer: BackgroundWriter, tensors: int) -> None:
    for counter in range(1, tensors + 1):
        copy = writer.hold(TENSOR, {}, nothing)
        assert copy is not None
        writer.submit(copy, record(counter))


def test_training_waits_for_the_disk_where_memory_is_used_up(disk):
    writer = BackgroundWriter(disk, HostBuffers(3 * SIZE))
    fill(writer, 3)
    assert (writer.pending, writer.written) == (3, (0, 0)), "nothing has waited so far"
    went_on = threading.Event()

    def train() -> None:
        fill(writer, 1)
        went_on.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not went_on.wait(0.2)
    disk.open.set()
    assert went_on.wait(30)
    thread.join()
    writer.drain()
    assert (writer.pending, writer.written[0], writer.memory.used) == (0, 4, 0)
    assert writer.memory.peak <= 3 * SIZE
    writer.close()


def test_training_does_not_wait_so_long_that_other_ranks_give_up(disk):
    """The end of the wait acts as a limit: tensors that were accepted are still written."""
    writer = BackgroundWriter(disk, HostBuffers(3 * SIZE), longest=0.3)
    fill(writer, 3)
    began = time.monotonic()
    assert writer.hold(TENSOR, {}, nothing) is None
    assert writer.hold(TENSOR, {}, nothing) is None, "the limit applies to all waits together"
    writer.wait()
    assert 0.3 <= time.monotonic() - began < 5.0
    assert re.search(r"training has waited [\d.]+ s for it in one iteration", writer.slow)
    assert writer.error is None
    writer.begin_iteration()
    assert writer.slow is None
    assert not writer.drain(0.1), "not yet"
    disk.open.set()
    assert writer.drain()
    fill(writer, 1)
    writer.close()
    assert writer.written[0] == 4


@pytest.mark.usefixtures("fresh_saver")
def test_at_the_end_no_rank_waits_long_for_another_that_still_writes(tmp_path, monkeypatch):
    write, told = RecordWriter.write, []

    def slow(*args):
        time.sleep(0.5)
        write(*args)

    def from_all(answer):
        told.append(answer)
        return [answer]

    session.configure(save_tensors=True, save_dir=str(tmp_path))
    monkeypatch.setattr(RecordWriter, "write", slow)
    monkeypatch.setattr(settings, "TURN", 0.1)
    monkeypatch.setattr(session_end, "from_all_ranks", from_all)
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    save()
    session.end_iteration()
    session_end.settle()
    assert told[:-1] == [False] * (len(told) - 2) + [True]
    assert len(told) >= 4, "several turns, then the outcome of each rank"
    assert told[-1]["tensors"] == 1
    session_end.close()


def test_what_is_written_is_whole_and_in_the_index_once(tmp_path):
    writer = BackgroundWriter(RecordWriter(tmp_path, "run", 0), HostBuffers(16 * SIZE))
    fill(writer, 60)
    writer.close()
    lines = list(read_index(tmp_path / "index_run_rank00.jsonl"))
    assert sorted(line["counter"] for line in lines) == list(range(1, 61))
    assert {path.name for path in tmp_path.glob("*.pt")} == {line["file"] for line in lines}
    for line in lines:
        path = tmp_path / line["file"]
        content = torch.load(path, weights_only=True)
        assert torch.equal(content["tensor"], TENSOR)
        assert content["metadata"]["counter"] == line["counter"]
        assert path.stat().st_size == line["bytes"] < SIZE + 4096
    assert writer.bytes == sum(line["bytes"] for line in lines)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), RuntimeError("torch"), KeyError("a bug")]
)
def test_a_write_that_fails_ends_the_writing_and_nothing_else(disk, caplog, failure):
    disk.failure = failure
    writer = BackgroundWriter(disk, HostBuffers(9 * SIZE))
    fill(writer, 8)
    copy = writer.hold(TENSOR, {}, nothing)
    disk.open.set()
    writer.drain()
    assert writer.error.startswith("collection stopped after 0 tensors: cannot write to ")
    writer.submit(copy, record(9))  # from a layer that has not noticed the failure
    assert writer.hold(TENSOR, {}, nothing) is None
    writer.close()
    assert caplog.messages == [writer.error], "reported once"
    assert (writer.pending, writer.memory.used) == (0, 0)
    (event,) = read_events(disk.directory / "index_run_rank00.jsonl")
    assert (event["event"], event["why"]) == ("failed", writer.error)


def test_a_disk_that_hangs_does_not_hang_training(disk, caplog):
    writer = BackgroundWriter(disk, HostBuffers(2 * SIZE), patience=0.3)
    fill(writer, 2)
    started = time.monotonic()
    assert writer.hold(TENSOR, {}, nothing) is None
    assert "no write has finished for 0.3 s" in writer.error
    assert len(caplog.messages) == 1
    writer.append({"event": "dropped"})
    writer.write_run_card({}, last=True)
    writer.close()
    assert time.monotonic() - started < 30
    assert not list(disk.directory.iterdir()), "a disk that hangs is not touched again"


def test_a_thread_that_hangs_does_not_hang_the_end_where_another_one_failed(tmp_path):
    class Half(RecordWriter):
        def write(self, tensor, record, index, scales):
            if record.counter == 1:
                hangs.wait(60)
            raise OSError("No space left on device")

    hangs = threading.Event()
    writer = BackgroundWriter(Half(tmp_path, "run", 0), HostBuffers(4 * SIZE), patience=0.3)
    for counter in (1, 2):
        writer.submit(writer.hold(TENSOR, {}, nothing), record(counter))
    started = time.monotonic()
    while writer.error is None and time.monotonic() - started < 30:
        time.sleep(0.01)
    writer.close()
    writer.append({"event": "dropped"})
    assert time.monotonic() - started < 30
    assert "No space left" in writer.error
    assert len(read_events(tmp_path / "index_run_rank00.jsonl")) == 1, "not touched again"
    hangs.set()


def test_where_no_thread_can_be_started_the_caller_writes(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = BackgroundWriter(RecordWriter(tmp_path, "run", 0), HostBuffers(2 * SIZE))
    fill(writer, 5)
    writer.close()
    assert (writer.error, writer.written[0], writer.memory.used) == (None, 5, 0)
    assert len(list(tmp_path.glob("*.pt"))) == 5


@pytest.mark.gpu
def test_what_is_written_of_a_cuda_tensor_is_what_it_was_when_it_was_shown(tmp_path):
    writer = BackgroundWriter(RecordWriter(tmp_path, "run", 0), HostBuffers(64 << 20))
    torch.manual_seed(1)
    shown = []
    for counter in range(1, 41):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(512, 1024, device="cuda")
            view = x[:, ::2].t() if counter % 2 else x
            shown.append(view.cpu())
            copy = writer.hold(view, {"tensor": x[0, 0]}, nothing)
            assert copy is not None
            assert copy.tensor.is_pinned()
            writer.submit(copy, record(counter))
            x.zero_()  # immediately after the submission
            del x, view
    writer.close()
    assert writer.error is None
    assert writer.memory.peak <= 64 << 20
    for number, path in enumerate(sorted(tmp_path.glob("*.pt"))):
        content = torch.load(path, weights_only=True)
        assert torch.equal(content["tensor"], shown[number])


def test_patience_counts_from_the_last_write_and_not_from_the_first(disk):
    disk.open.set()
    writer = BackgroundWriter(disk, HostBuffers(2 * SIZE), patience=0.5)
    fill(writer, 1)
    writer.drain()
    time.sleep(0.6)  # there is nothing to write
    fill(writer, 8)
    writer.close()
    assert (writer.error, writer.written[0]) == (None, 9)


def test_an_event_stands_between_whole_lines(tmp_path):
    writer = BackgroundWriter(
        RecordWriter(tmp_path, "run", 0),
        HostBuffers(64 * SIZE),
        complete=lambda event: event | {"run_id": "run"},
    )
    for _ in range(20):
        fill(writer, 3)
        writer.append({"event": "switched"})
    writer.close()
    with contextlib.closing((tmp_path / "index_run_rank00.jsonl").open()) as lines:
        found = [json.loads(line) for line in lines]
    assert sum("event" in line for line in found) == 20
    assert len(found) == 80


def test_memory_that_cannot_be_had_ends_the_collection_and_not_the_training(
    tmp_path, monkeypatch, fresh_saver
):
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    session.configure(save_tensors=True, save_dir=str(tmp_path))
    monkeypatch.setattr(HostBuffers, "copy", no_memory)
    clock.micro_batch = MicroBatch(1, 0)
    save()
    assert "no memory to copy input: Default" in session.current().error
    assert "select less, or lower --collect-max-host-gib" in session_end.close()


def test_a_thread_that_hangs_with_the_index_holds_up_no_event(disk):
    writer = BackgroundWriter(disk, HostBuffers(2 * SIZE))
    fill(writer, 1)
    with writer._index:  # as a hanging thread does
        started = time.monotonic()
        writer.append({"event": "switched"})
        assert time.monotonic() - started < 30
    disk.open.set()
    writer.close()
    (event,) = read_events(disk.directory / "index_run_rank00.jsonl")
    assert event["event"] == "switched", "the event is written as soon as possible"


def test_while_threads_write_training_does_not_ask_the_disk(tmp_path, monkeypatch, fresh_saver):
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_micro_batches=0)
    asked = []
    usage = shutil.disk_usage

    def ask(folder):
        asked.append(threading.current_thread() is threading.main_thread())
        return usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", ask)
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    for _ in range(200):
        save(torch.ones(64, 64, 8))
    session.end_iteration()
    assert session_end.close() is None
    assert 1 <= sum(asked) < 200
    assert len(asked) - sum(asked) == 200, "one query after each write"
