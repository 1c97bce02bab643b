"""Test the cache: it moves with its dump, may be damaged, and never blocks a call."""

from __future__ import annotations

import os
import shutil
import sqlite3

import numpy as np
import pandas as pd
import pytest

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.stats import cache as caching
from megatron.analysis.stats import jobs
from megatron.analysis.stats.cache import NAME, Cache
from megatron.analysis.stats.logical_tensors import logical_tensors
from megatron.analysis.stats.measure import measure_dump
from megatron.analysis.stats.merge import ResultMerger
from megatron.analysis.stats.serialization import pack, unpack
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import LAYER, write_dump

FORMATS = ["mxfp8", "hifp8"]
NUMBER = len(LAYER)


@pytest.fixture
def dump(tmp_path):
    write_dump(tmp_path / "dump", layers=1)
    return tmp_path / "dump"


@pytest.fixture
def computed(monkeypatch):
    """Return a list that records every job that is computed from now on."""
    computed, original = [], jobs.measure_job

    def spy(job):
        computed.append(job)
        return original(job)

    monkeypatch.setattr(jobs, "measure_job", spy)
    monkeypatch.setattr("megatron.analysis.stats.merge.measure_job", spy)
    return computed


def compute(dump, cache=None, **options):
    return stats.compute(TensorStore(dump), FORMATS, cache=cache or dump / ".statistics", **options)


def same(one, other):
    pd.testing.assert_frame_equal(
        one.tensors.drop(columns="path"), other.tensors.drop(columns="path")
    )
    pd.testing.assert_frame_equal(one.formats, other.formats)


def parts(cache):
    base = sqlite3.connect(cache / NAME)
    [(known,)] = base.execute("SELECT count(*) FROM parts")
    [(kept,)] = base.execute("SELECT count(DISTINCT key) FROM results")
    assert known == kept
    base.close()
    return known


def test_results_in_a_dump_move_with_it_and_those_elsewhere_are_of_one_place(dump, computed):
    first = compute(dump)
    moved = dump.rename(dump.with_name("moved"))
    del computed[:]
    same(compute(moved), first)
    assert computed == []
    elsewhere = moved.with_name("elsewhere")
    compute(moved, elsewhere)
    copy = shutil.copytree(moved, moved.with_name("copy"))  # keeps the modification times
    del computed[:]
    same(compute(copy, elsewhere), first)
    assert len(computed) == NUMBER


def test_files_and_versions_that_are_no_more_are_let_go(dump, computed, monkeypatch):
    cache = dump / ".statistics"
    compute(dump)
    assert parts(cache) == NUMBER
    store = TensorStore(dump)
    compute(dump, select=store.select(tensor_name="input"))
    assert parts(cache) == NUMBER  # the results that were not selected are still cached
    gone, changed = (next(dump.glob(f"*_{name}.pt")) for name in ("weight", "query"))
    gone.unlink()
    os.utime(changed, ns=(1, 1))
    compute(dump)
    assert parts(cache) == NUMBER - 1
    monkeypatch.setattr(caching, "code_version", lambda: "another")
    del computed[:]
    compute(dump)
    assert len(computed) == parts(cache) == NUMBER - 1


def test_a_file_of_an_earlier_layout_is_begun_anew(dump, computed):
    cache = dump / ".statistics"
    cache.mkdir()
    base = sqlite3.connect(cache / NAME)
    base.execute("CREATE TABLE results (key TEXT, name TEXT, content BLOB)")
    base.execute("INSERT INTO results VALUES ('a', 'b', 'c')")
    base.execute(f"PRAGMA application_id={caching.APPLICATION_ID}")
    base.commit()
    base.close()
    compute(dump)
    assert parts(cache) == NUMBER
    del computed[:]
    compute(dump)
    assert computed == []


def test_a_damaged_file_is_thrown_away_and_said(dump, computed, capsys):
    first = compute(dump)
    path = dump / ".statistics" / NAME
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    assert main(["stats", str(dump), "--formats", *FORMATS]) == 0
    assert "was damaged" in capsys.readouterr().err
    del computed[:]
    again = compute(dump)
    assert (computed, again.remarks) == ([], [])
    same(again, first)


def test_a_damaged_row_is_computed_again(dump, computed):
    first = compute(dump)
    base = sqlite3.connect(dump / ".statistics" / NAME)
    rows = base.execute("SELECT key, name, content FROM results").fetchall()
    for place, (key, name, content) in enumerate(rows[:6]):
        wrong = [content[:-9], bytes([content[0] ^ 1]) + content[1:], 7, "text", b"", None][place]
        base.execute(
            "UPDATE results SET content = ? WHERE key = ? AND name = ?", (wrong, key, name)
        )
    base.commit()
    base.close()
    damaged = {key for key, _, _ in rows[:6]}
    del computed[:]
    same(compute(dump), first)
    assert len(computed) == len(damaged)
    del computed[:]
    same(compute(dump), first)
    assert computed == []


def test_two_processes_can_use_one_folder_and_one_that_is_locked_is_done_without(
    dump, tmp_path, monkeypatch
):
    monkeypatch.setattr(caching, "PATIENCE", 0.1)
    folder = tmp_path / "cache"
    one, other = Cache(folder, dump), Cache(folder, dump)
    tensors = list(logical_tensors(TensorStore(dump).records))
    entries = [one.entry(tensor.parts[()]) for tensor in tensors[:2]]
    one.put(entries[0], {"values": b"1"})  # a long computation may follow
    other.put(entries[1], {"values": b"2"})
    assert (one.get(entries[1]), other.get(entries[0])) == ({"values": b"2"}, {"values": b"1"})
    assert (one.remark, other.remark) == ("", "")
    one.close()
    other.close()
    first = compute(dump)
    blocker = sqlite3.connect(folder / NAME, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    found = compute(dump, folder)
    same(found, first)
    assert "is locked" in found.remarks[0]
    blocker.close()


def test_results_are_read_one_at_a_time(dump, monkeypatch):
    compute(dump)
    got, original = [], Cache.get
    monkeypatch.setattr(Cache, "get", lambda self, entry: got.append(1) or original(self, entry))
    kept = Cache(dump / ".statistics", dump)
    assembly = ResultMerger(list(logical_tensors(TensorStore(dump).records)), FORMATS, kept)
    assert assembly.jobs() == []
    assert got == []
    for number, _ in enumerate(assembly.results(iter(())), 1):
        assert len(got) == number
    assert number == NUMBER
    kept.close()


def test_the_quick_look_takes_what_compute_kept(dump, computed):
    compute(dump)
    del computed[:]
    measured = measure_dump(TensorStore(dump), cache=dump / ".statistics")
    assert computed == []
    fresh = measure_dump(TensorStore(dump))
    assert len(computed) == NUMBER
    pd.testing.assert_frame_equal(measured.table, fresh.table)
    assert (measured.histogram().counts == fresh.histogram().counts).all()


def test_packed_arrays_are_the_same_and_small():
    arrays = [
        np.arange(5),
        np.zeros((3, 4)),
        np.array([[0.1, np.nan], [np.inf, -0.0]]),
        np.zeros(0, np.int64),
        np.array(7.5),
    ]
    found = unpack(pack(*arrays))
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert len(pack(np.zeros(1 << 16, np.int64))) < 100


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    (tmp_path / "statistics.sqlite").write_text("something else, longer than a header" * 10)
    with pytest.raises(ValueError, match=r"cannot be used as a cache.*choose another folder"):
        Cache(tmp_path, tmp_path)
