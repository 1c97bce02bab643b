"""Test the limits of a collection, and its reports when one is reached."""

import json
import os
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron.collection import limits as collection_limits
from megatron.collection import memory_limit, session, session_end
from megatron.collection import settings as collection_settings
from megatron.collection.limits import GIB, OVERHEAD, Limits, default_host_bytes, gib
from megatron.collection.plan import CollectionPlan, Segment, Share
from megatron.collection.plan_report import report
from megatron.collection.ring_buffer import RingSettings
from megatron.collection.selection import Selection
from megatron.collection.settings import Settings, read_settings
from megatron.collection.training_clock import MicroBatch, clock
from megatron.collection.write_budget import WriteBudget
from megatron.tensor_record import read_events, read_index
from tests.collection.samples import save

pytestmark = pytest.mark.usefixtures("fresh_saver")


def collect(folder, tensors: int = 6, **limits):
    """Save tensors of 64 KiB in one iteration; return the records, events and run card."""
    session.configure(save_tensors=True, save_dir=str(folder), **limits)
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    for _ in range(tensors):
        save(torch.ones(16, 16, 64))
    session.end_iteration()
    assert session.finished(), "the iteration counts, so that training ends as requested"
    lines = session_end.settle()
    assert session_end.close() is None, "a limit is not a failure"
    (index,) = folder.glob("index_*.jsonl")
    (card,) = folder.glob("run_*.json")
    found = list(read_index(index))
    assert {path.name for path in folder.glob("*.pt")} == {r["file"] for r in found}
    return found, read_events(index), json.loads(card.read_text()), lines


class WriterThatFinishesMeanwhile:
    """Writer whose pending file another thread finishes as soon as the free space is queried."""

    records = bytes = 0
    pending, pending_bytes = 1, 100

    @property
    def disk(self):
        usage = SimpleNamespace(free=150 - (100 - self.pending_bytes), total=1000)
        self.pending = self.pending_bytes = 0
        return usage

    def wait(self):
        self.pending = self.pending_bytes = 0


def test_a_file_that_is_finished_meanwhile_is_counted(tmp_path, monkeypatch):
    """150 bytes are free, the pending file takes 100, and 100 more do not fit."""
    queried = SimpleNamespace(free=50, total=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: queried)
    limits = SimpleNamespace(exceeded_by_files=lambda *_: None)
    limits.exceeded_on_disk = lambda folder, needed, disk: (
        "full" if (disk or shutil.disk_usage(folder)).free < needed else None
    )
    settings = SimpleNamespace(limits=limits, directory=tmp_path)
    budget = WriteBudget(settings, WriterThatFinishesMeanwhile(), rank=0)
    assert budget._exceeded(100) == "full"
    queried.free = 100  # the file turned out to be small
    budget = WriteBudget(settings, WriterThatFinishesMeanwhile(), rank=0)
    assert budget.take(100 - OVERHEAD, {})


def test_a_slice_that_leaves_nothing_of_a_tensor_is_said_once(tmp_path, caplog):
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_slice=["s=2:9"])
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    for tokens in (2, 4, 1):
        save(torch.ones(tokens, 3, 4))
    session.end_iteration()
    session_end.settle()
    session_end.close()
    (said,) = [m for m in caplog.messages if "--collect-slice" in m]
    assert "selects nothing of input of decoder.layers.0.mlp.linear_fc1, whose dim" in said
    assert "s b h are [2, 3, 4]; rank 0 leaves out this tensor" in said
    (card,) = tmp_path.glob("run_*.json")
    (rank,) = json.loads(card.read_text())["ranks"]
    assert (rank["tensors"], rank["outside_slice"]) == (1, 2)


SIZE = 16 * 16 * 64 * 4


@pytest.mark.parametrize(
    ("limits", "written", "flag"),
    [
        ({"collect_max_files": 2}, 2, "--collect-max-files lets this rank write 2"),
        ({"collect_max_gib": 3.5 * SIZE / GIB}, 3, "--collect-max-gib lets this rank write 224 K"),
        ({"collect_max_gib": SIZE / GIB}, 0, "--collect-max-gib"),
        ({"collect_keep_free_gib": 1e9}, 0, "--collect-keep-free-gib reserves 1e.09 GiB"),
    ],
)
def test_a_limit_ends_the_collection_and_everyone_says_so(tmp_path, caplog, limits, written, flag):
    found, events, card, lines = collect(tmp_path, **limits)
    assert len(found) == written
    (line,) = lines
    assert f"; {6 - written} tensors, {gib((6 - written) * SIZE)}, were dropped" in line
    (warning,) = [m for m in caplog.messages if "stopped collecting" in m]
    assert "at 64 KiB of input of decoder.layers.0.mlp.linear_fc1, iteration 1" in warning
    assert [event["event"] for event in events] == ["limited", "dropped"]
    assert (events[1]["tensors"], events[1]["bytes"]) == (6 - written, (6 - written) * SIZE)
    assert card["status"] == "limited"
    assert card["ranks"][0]["dropped_tensors"] == 6 - written
    for text in (line, warning, events[0]["why"], card["limit"]):
        assert re.search(flag, text), text


def test_within_the_limits_nothing_is_said(tmp_path, caplog):
    enough = {"collect_max_files": 6, "collect_max_gib": 6 * (SIZE + OVERHEAD) / GIB}
    found, events, card, lines = collect(tmp_path, collect_keep_free_gib=0, **enough)
    assert (len(found), events, lines, caplog.messages) == (6, [], [], [])
    assert (card["status"], card["limit"]) == ("finished", None)


def test_no_file_is_larger_than_the_limits_reckon_with(tmp_path):
    found, *_ = collect(tmp_path)
    assert all(SIZE < r["bytes"] <= SIZE + OVERHEAD for r in found)


def test_the_disk_s_free_space_is_kept_before_it_is_full(small_disk):
    """The default for a small disk is a twentieth: 51 KiB of one MiB."""
    found, _, card, _ = collect(small_disk, tensors=20)
    assert 10 <= len(found) < 16
    assert shutil.disk_usage(small_disk).free >= (1 << 20) // 20
    assert "--collect-keep-free-gib reserves 51.2 KiB" in card["limit"]
    assert not list(small_disk.glob("*.partial"))


def test_by_default_a_gib_stays_free_on_a_large_disk(tmp_path, monkeypatch):
    usage = SimpleNamespace(total=1000 * GIB, free=GIB + 100, used=0)
    monkeypatch.setattr(collection_limits.shutil, "disk_usage", lambda _: usage)
    assert Limits().exceeded_on_disk(tmp_path, 100) is None
    assert "reserves 1 GiB" in Limits().exceeded_on_disk(tmp_path, 101)
    assert Limits.parse(collect_keep_free_gib=0.5).exceeded_on_disk(tmp_path, GIB // 2) is None


def test_ranks_have_equal_shares():
    limits = Limits.parse(collect_max_gib=1.0, collect_max_files=10).share(4)
    assert (limits.max_bytes, limits.max_files) == (GIB // 4, 2)
    with pytest.raises(ValueError, match=r"--collect-max-files 3 is less than one for each of the"):
        Limits.parse(collect_max_files=3).share(4)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("collect_max_gib", 0.0),
        ("collect_max_gib", float("nan")),
        ("collect_max_files", 0),
        ("collect_keep_free_gib", -1.0),
        ("collect_keep_free_gib", float("inf")),
        ("collect_max_gib", 1e300),
        ("collect_max_host_gib", 1e300),
    ],
)
def test_limits_that_let_nothing_through_are_refused(flag, value):
    said = f"--{flag.replace('_', '-')} is {value}; give "
    with pytest.raises(ValueError, match=re.escape(said)):
        Limits.parse(**{flag: value})


def test_a_tiny_limit_of_memory_is_not_taken_for_none():
    assert Limits.parse(collect_max_host_gib=1e-12).share(1).host_bytes == 0
    assert Limits.parse().share(2, 2).host_bytes == default_host_bytes() // 2


def test_the_disk_is_asked_once_a_tensor(tmp_path, monkeypatch):
    asked = []

    def usage(folder):
        asked.append(folder)
        return SimpleNamespace(total=1000 * GIB, free=900 * GIB, used=0)

    monkeypatch.setattr(collection_limits.shutil, "disk_usage", usage)
    assert Limits().exceeded_on_disk(tmp_path, 100) is None
    assert asked == [tmp_path]


@pytest.mark.parametrize(
    ("variables", "devices", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "8"}, 8, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1, 8),
        ({"SLURM_NTASKS_PER_NODE": "99"}, 0, 16),  # applies to the job, not to this run
        ({}, 8, 8),
        ({}, 0, 16),
    ],
)
def test_ranks_of_a_machine_share_its_memory_whoever_started_them(
    monkeypatch, variables, devices, ranks
):
    for name in collection_settings.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    found = read_settings(
        {"world_size": 16},
        save_dir=None,
        control_iter=None,
        flags={"collect_max_host_gib": 16.0},
    )
    assert found.limits.host_bytes == 16 * GIB // ranks


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": 5 << 20, "job/step/memory.max": "max"}, 5 << 20),
        ("0::/of/the/host\n", {"memory.max": 7 << 20}, 7 << 20),
        (
            "3:cpu:/a\n2:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": 3 << 20, "a/memory.max": 1},
            3 << 20,
        ),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {}, None),
        (None, {"memory.max": 1}, None),
    ],
    ids=["job", "container", "version 1", "no limit", "no file", "no groups"],
)
def test_the_memory_of_a_container_or_a_job_is_what_counts(
    tmp_path, monkeypatch, own, files, limit
):
    monkeypatch.setattr(memory_limit, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limit, "OWN", tmp_path / "own")
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit.machine_memory() == (limit or machine)


def test_a_read_only_folder_is_refused_before_training(read_only_disk):
    with pytest.raises(ValueError, match=r"cannot write to the tensor folder .*--tensor-save-dir"):
        session.configure(save_tensors=True, save_dir=str(read_only_disk))


def test_a_folder_that_vanishes_ends_the_collection_and_not_the_training(tmp_path, caplog):
    session.configure(save_tensors=True, save_dir=str(tmp_path / "dump"), control_iter=0)
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    save()
    session_end.flush()
    shutil.rmtree(tmp_path / "dump")
    save()
    save()
    session.end_iteration()
    session_end.flush()
    assert sum("collection stopped after 1 tensors" in m for m in caplog.messages) == 1
    assert "cannot write to" in session_end.close()


@pytest.mark.parametrize(
    ("host_bytes", "ring", "verdict"),
    [
        (100, None, "100 bytes for 1 iteration(s): holds"),
        (99, None, "training will wait for the disk"),
        (59, None, "DOES NOT HOLD, one tensor takes 60 bytes"),
        (299, RingSettings(3), "300 bytes for 3 iteration(s): DOES NOT HOLD, the ring will have 2"),
        (99, RingSettings(3), "DOES NOT HOLD, the ring will have the first part of one"),
    ],
)
def test_a_plan_says_what_memory_has_room_for(tmp_path, host_bytes, ring, verdict):
    name = (0, "linear", "input")
    segment = Segment(0, 1, Counter({name: 2}), Counter({name: 100}), held=100, largest=60)
    share = Share(0, [segment], "here", free=1 << 20, kept=0)
    limits = Limits(host_bytes=host_bytes)
    settings = Settings(tmp_path, "bf16", 1, Selection(), limits, ring)
    lines = report(CollectionPlan([1], [share], settings))
    (line,) = [line for line in lines if "memory of a rank" in line]
    assert line.endswith(verdict)
    (disk,) = [line for line in lines if "disk of here" in line]
    needed = "100 bytes needed" if ring is None else "300 bytes needed for 3 events"
    assert disk.endswith(f"{needed}: holds")
