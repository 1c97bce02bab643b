"""Tests of the records, tensors and numbers that the pages show."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pandas as pd
import pytest

from megatron.analysis.serve import follower, maps
from megatron.analysis.serve.address import Address
from megatron.analysis.serve.application import _Views, create
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.follower import Follower
from megatron.analysis.serve.statistics import BY_NAME, Numbers
from megatron.analysis.serve.training import Series, Training, _read_events
from megatron.analysis.stats import compute
from megatron.analysis.stats.logical_tensors import first_passes, logical_tensors
from megatron.analysis.store import TensorStore
from megatron.tensor_record import index_name
from tests.analysis.fake_dump import RUNS, records, write_dump
from tests.analysis.serve.conftest import FORMATS, opened_explorer, wait_for


def by_path(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("path").reset_index(drop=True)


def test_the_records_equal_those_of_the_store(explorer, dump):
    records = explorer.catalog.records
    pd.testing.assert_frame_equal(
        by_path(records.frame(range(len(records)))), by_path(TensorStore(dump).records)
    )


def test_every_tensor_has_an_id_that_a_restart_does_not_change(explorer, dump):
    catalog = explorer.catalog
    ids = [catalog.id_of(tensor) for tensor in range(len(catalog))]
    assert len(set(ids)) == len(catalog) == 28
    again = Follower(dump)
    again.poll_all()
    assert [again.catalog.find(text) for text in ids] == [*range(28)]
    for forged in ("0" * 16, "../../etc/passwd", "", "g" * 16, ids[0].upper() + " "):
        assert catalog.find(forged) is None


@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2", "dp2", "ep2"])
def test_shards_form_the_same_tensors_as_in_the_statistics(dumps, layout):
    follows = Follower(dumps / layout)
    follows.poll_all()
    catalog = follows.catalog
    expected = first_passes([*logical_tensors(TensorStore(dumps / layout).records)])
    assert len(catalog) == len(expected)
    found = sorted(
        sorted(catalog.records.path(row) for row in catalog.records_of([tensor]))
        for tensor in range(len(catalog))
    )
    paths = [
        sorted(
            path
            for part in tensor.parts.values()
            for path in (*part.paths, *(r for copies in part.replicas for r in copies))
        )
        for tensor in expected
    ]
    assert found == sorted(paths)


def test_an_index_is_read_on_from_where_it_ended(tmp_path):
    paths = write_dump(tmp_path, layers=1)
    index = tmp_path / index_name(next(iter(RUNS.values())), 0)
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    for path in paths[5:]:
        path.rename(path.with_suffix(".later"))
    follows = Follower(tmp_path)
    follows.poll_all()
    assert (len(follows.catalog), follows.catalog.version) == (5, 1)
    with index.open("ab") as file:
        file.write(lines[5][40:] + b"".join(lines[6:]))
        file.write(b'{"event": "kept", "iteration": 3, "loss": 7.5}\n')
    follows.poll_all()
    assert (len(follows.catalog), follows.catalog.version) == (14, 2)
    assert follows.events == [{"event": "kept", "iteration": 3, "loss": 7.5}]
    assert follows.problems == []


def write_long_index(folder, rows):
    with (folder / index_name(RUNS["mxfp8"], 0)).open("w") as index:
        for row in rows:
            index.write(json.dumps(row) + "\n")


def rows_of_three_iterations():
    found = records(run_id=RUNS["mxfp8"], quant_type="mxfp8", layers=2, iterations=3)
    return [record.to_metadata() | {"file": record.filename} for record, _, _ in found]


def test_the_newest_iteration_of_a_long_index_comes_first(tmp_path, monkeypatch):
    rows = rows_of_three_iterations()
    write_long_index(tmp_path, [*rows, {"event": "kept", "iteration": 2, "loss": 7.5}])
    monkeypatch.setattr(follower, "FIRST_STEP", 4000)
    follows = Follower(tmp_path)
    assert follows.poll()
    newest = follows.catalog
    assert (follows.newest_only, len(newest), newest.runs[0]["iterations"]) == (True, 28, [3])
    assert follows.poll()
    assert follows.catalog is newest, "the rest of the index is not read yet"
    follows.poll_all()
    whole = follows.catalog
    assert (follows.newest_only, len(whole), whole.runs[0]["iterations"]) == (False, 84, [1, 2, 3])
    known = dict(zip(whole.ids.tolist(), whole.stamps.tolist(), strict=True))
    assert (
        dict(zip(newest.ids.tolist(), newest.stamps.tolist(), strict=True)).items() <= known.items()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[-28:],  # the beginning of the iteration may be missing
        lambda rows: [*rows[:-20], rows[0], *rows[-20:]],  # lines of two iterations are mixed
        lambda rows: [*rows[:-9], *rows[-8:]],  # a record is missing
        lambda rows: [*rows, {"file": "x.pt"}],
        lambda rows: [*rows, rows[-1] | {"layer_idx": "x"}],
    ],
)
def test_an_iteration_that_may_lack_records_does_not_come_first(tmp_path, monkeypatch, change):
    write_long_index(tmp_path, change(rows_of_three_iterations()))
    monkeypatch.setattr(follower, "FIRST_STEP", 4000)
    follows = Follower(tmp_path)
    follows.poll()
    assert not follows.newest_only


def test_all_runs_and_ranks_show_their_newest_iteration_or_none(dumps, tmp_path, monkeypatch):
    monkeypatch.setattr(follower, "FIRST_STEP", 4000)
    for name in ("one", "pp2", "tp2"):
        shutil.copytree(dumps / name, tmp_path / name)

    def newest():
        follows = Follower(tmp_path)
        follows.poll()
        return follows.catalog if follows.newest_only else None

    whole = Follower(tmp_path)
    whole.poll_all()
    last = {run["id"]: run["iterations"][-1] for run in whole.catalog.runs}
    found = newest()
    assert {run["id"]: run["iterations"] for run in found.runs} == {r: [i] for r, i in last.items()}
    known = dict(zip(whole.catalog.ids.tolist(), whole.catalog.stamps.tolist(), strict=True))
    assert (
        dict(zip(found.ids.tolist(), found.stamps.tolist(), strict=True)).items() <= known.items()
    )

    (index,) = (tmp_path / "tp2").glob("index_*rank01.jsonl")
    started = index.with_name(index_name("20261123_000000_000001", 0))
    for content in ('{"event": "kept"}\n', '{"iteration": 1, '):  # no record so far
        started.write_text(content)
        assert len(newest()) == len(found)
    started.write_text("{}\n")
    assert newest() is None, "this run may be the newest"
    started.unlink()
    rows = [json.loads(line) for line in index.read_text().splitlines()]
    last_row = [row for row in rows if "event" not in row][-1]
    changes = {"iteration": last_row["iteration"] + 1, "counter": last_row["counter"] + 1}
    with index.open("a") as file:
        file.write(json.dumps(last_row | changes | {"file": "next.pt"}) + "\n")
    assert newest() is None, "one rank is an iteration ahead"


def test_a_stamp_does_not_depend_on_the_order_of_the_ranks(dumps, tmp_path):
    shutil.copytree(dumps / "tp2", tmp_path / "a")
    found = []
    for names in (("rank00", "rank01"), ("rank01", "rank00")):
        follows = Follower(tmp_path)
        for name in names:  # the second index appears when the first one has been read
            (index,) = (tmp_path / "a").glob(f"index_*{name}.jsonl*")
            index.rename(index.with_suffix(".jsonl"))
            follows._walked, follows._check_unlisted = -1e9, False
            follows.poll()
        catalog = follows.catalog
        assert (catalog.files == 2).sum() > 10
        found.append(dict(zip(catalog.ids.tolist(), catalog.stamps.tolist(), strict=True)))
        for index in (tmp_path / "a").glob("index_*.jsonl"):
            index.rename(index.with_suffix(".jsonl_"))
    assert found[0] == found[1]


def test_nothing_takes_the_place_of_what_is_not_read_yet(tmp_path, monkeypatch):
    write_long_index(tmp_path, rows_of_three_iterations())
    monkeypatch.setattr(follower, "FIRST_STEP", 4000)
    explorer = Explorer(tmp_path, FORMATS, cache=None, in_process=True)
    views, client = _Views(explorer), create(explorer).server.test_client()
    assert "Reading the index" in str(views.show("?v=runs", None, None, [], [])[0])
    explorer.follower.poll()
    assert explorer.follower.newest_only
    assert "28 tensors of the newest iteration" in str(views._status())
    cases = {"": False, "?it=3": False, "?it=2": True, "?run=x": True, "?with=x": True}
    cases |= {"?by=iteration&place=x": True, f"?run={RUNS['mxfp8']}&by=iteration": False}
    before = {search: views.show(search, None, None, [], []) for search in cases}
    for search, awaits in cases.items():
        assert explorer.awaits(search) == awaits
        assert ("Reading the index" in str(before[search][0])) == awaits
        status = client.get(f"/csv?panel=map&{search[1:]}").status_code
        assert (status == 404) == awaits
    address = explorer.resolved("?by=iteration")
    assert "More iterations appear" in str(
        views.panel({"search": address.search()}, {"name": "map"})
    )
    assert "1 (3) so far" in str(views.show("?v=runs", None, None, [], [])[0])
    assert "28 files so far" in str(views.panel({"search": "?v=training"}, {"name": "numbers"}))
    for name in ("curves", "events"):
        assert "Reading the index" in str(views.panel({"search": "?v=training"}, {"name": name}))
    explorer.follower.poll_all()
    for search, awaits in cases.items():
        assert not explorer.awaits(search)
        assert (views._key(explorer.resolved(search), search) != before[search][1]) == awaits
    assert "3 (1 to 3)" in str(views.show("?v=runs", None, None, [], [])[0])
    assert "so far" not in str(views.panel({"search": "?v=training"}, {"name": "numbers"}))
    key = views._key(explorer.resolved("?v=runs"), "?v=runs")
    rows = rows_of_three_iterations()
    write_long_index(tmp_path, [*rows, rows[-1] | {"iteration": 4, "file": "new.pt"}])
    explorer.follower.poll_all()
    assert views._key(explorer.resolved("?v=runs"), "?v=runs") != key, "a run is followed"
    explorer.close()


def test_a_tensor_whose_shards_were_not_all_written_is_measured_again(dumps, tmp_path):
    shutil.copytree(dumps / "tp2", tmp_path / "dump")
    (second,) = (tmp_path / "dump").glob("index_*rank01.jsonl")
    later = [second, *(tmp_path / "dump").glob("*rank01*.pt")]
    hidden = [path.rename(tmp_path / path.name) for path in later]
    explorer = opened_explorer(tmp_path / "dump")
    explorer.measurer.start()
    wait_for(lambda: explorer.measurer.total and explorer.measurer.done == explorer.measurer.total)
    parts = explorer.catalog
    for path, place in zip(hidden, later, strict=True):
        path.rename(place)
    explorer.follower._walked = -1e9
    explorer.follower.poll_all()
    whole = explorer.catalog
    assert (parts.ids == whole.ids).all()
    changed = parts.stamps != whole.stamps
    assert changed.sum() == (whole.files > 1).sum() > 10
    wait_for(lambda: (explorer.numbers.rows_of(whole.ids, whole.stamps) >= 0).all())
    rows = explorer.numbers.rows_of(whole.ids, whole.stamps)
    found = explorer.numbers.column(BY_NAME["rms"], rows, "", np.zeros(len(rows), np.int64))
    fields = ["iteration", "micro_batch", "module", "operation", "phase", "tensor_name"]
    table = compute(TensorStore(tmp_path / "dump"), ["mxfp8"]).tensors.set_index(fields)["rms"]
    keys = whole.records.frame(whole.rows)[fields].itertuples(index=False, name=None)
    np.testing.assert_allclose(found, [table[key] for key in keys], rtol=1e-6)
    explorer.close()


def test_files_without_an_index_are_opened(tmp_path):
    write_dump(tmp_path, layers=1, index=False)
    follows = Follower(tmp_path)
    follows.poll_all()
    assert len(follows.catalog) == 14
    assert set(follows.catalog.records.sources.distinct) == {"file"}


def test_a_damaged_index_is_named_and_its_files_are_opened(tmp_path):
    write_dump(tmp_path, layers=1)
    index = tmp_path / index_name(next(iter(RUNS.values())), 0)
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:3], b"{not json\n", *lines[3:]]))
    follows = Follower(tmp_path)
    follows.poll_all()
    assert len(follows.catalog) == 14
    (problem,) = follows.problems
    assert problem.path == index
    assert "its files are opened instead" in problem.why


def test_the_numbers_are_those_of_the_statistics(explorer, dump):
    statistics = compute(TensorStore(dump), FORMATS)
    tensors, formats = statistics.tensors, statistics.formats
    catalog = explorer.catalog
    rows = explorer.numbers.rows_of(catalog.ids, catalog.stamps)
    assert (rows >= 0).all()
    path_of = [catalog.records.path(int(row)) for row in catalog.rows]
    number = {path: at for at, path in enumerate(tensors["path"])}
    order = [number[path] for path in path_of]
    zeros = np.zeros(len(catalog), np.int64)
    for name in ("rms", "amax", "kurtosis", "outlier_channels"):
        found = explorer.numbers.column(BY_NAME[name], rows, "", zeros)
        np.testing.assert_allclose(found, tensors[name].to_numpy(float)[order], rtol=1e-6)
    for at, axis in enumerate(("row", "column")):
        own = formats[(formats["quantized_format"] == "mxfp4") & (formats["axis"] == axis)]
        own = own.set_index("tensor").loc[order]
        for name in ("sqnr_db", "gain", "underflow"):
            found = explorer.numbers.column(BY_NAME[name], rows, "mxfp4", zeros + at)
            np.testing.assert_allclose(found, own[name].to_numpy(float), rtol=1e-5, atol=1e-9)


def test_a_cell_is_the_median_and_opens_the_worst_tensor(explorer):
    address = explorer.resolved("?stat=sqnr_db&format=mxfp4")
    found = maps.build(explorer.catalog, explorer.numbers, address)
    assert found.rows == ["L0"]
    assert found.columns == [
        *("qkv input", "qkv weight", "core query", "core key", "core value"),
        *("core grad_output", "qkv grad_output"),
    ]
    measured = dict(zip(found.chosen.tolist(), found.measured, strict=True))
    for value, tensor in zip(found.values[0], found.tensors[0], strict=True):
        assert value == pytest.approx(measured[int(tensor)])
    cell, values = np.array([1, 0, 0, 0, 1]), np.array([5.0, 3.0, np.nan, 1.0, 9.0])
    medians, tensors, counts = maps._cells(cell, values, np.arange(10, 15), 3, BY_NAME["sqnr_db"])
    np.testing.assert_array_equal(medians, [2.0, 7.0, np.nan])
    assert (tensors.tolist(), counts.tolist()) == ([13, 10, -1], [3, 2, 0])


def test_the_numbers_survive_a_restart(explorer, tmp_path):
    catalog = explorer.catalog
    explorer.numbers.save(tmp_path)
    (path,) = tmp_path.glob("explorer_*.npy")
    again = Numbers()
    again.load(tmp_path)
    assert len(again) == 28
    rows = [numbers.rows_of(catalog.ids, catalog.stamps) for numbers in (explorer.numbers, again)]
    columns = [
        numbers.column(BY_NAME["gain"], own, "mxfp8", catalog.first_axis)
        for numbers, own in zip((explorer.numbers, again), rows, strict=True)
    ]
    np.testing.assert_array_equal(*columns)
    assert (again.rows_of(catalog.ids, catalog.stamps + np.uint64(1)) == -1).all()
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-5], b"\x93NUMPY" + b"x" * 300):
        path.write_bytes(damaged)
        empty = Numbers()
        empty.load(tmp_path)
        assert len(empty) == 0


def test_an_address_survives_the_way_through_a_query():
    address = Address(
        view="tensor", run="20250908_a&b=c", format="nvfp4:2d", statistic="gain", gemm="dgrad",
        by="iteration", iteration=12, place="fc1 input", show="all", tensor="0123456789abcdef",
        beside="fedcba9876543210", image="errors", zoom="1-20-3-40", head=3, sequence=1,
    )  # fmt: skip
    assert Address.parse(address.search()) == address
    assert Address.parse("") == Address.parse(None) == Address()
    assert Address().search() == "?"


@pytest.mark.parametrize(
    "search",
    [
        "?format=nonsense&stat=x&it=1e9&v=admin&t=../../x&z=1-2&gemm=all&head=a",
        "?" + "a=b&" * 3000,
        "?z=99999999999-1-1-1&t=<script>alert(1)</script>",
        "?%ff%fe=%00&run=" + "x" * 500,
    ],
)
def test_an_address_of_any_content_is_understood(explorer, search):
    address = explorer.resolved(search)
    assert address.run in RUNS.values()
    assert address.tensor == address.zoom == ""


def test_training_is_read_from_logs_and_event_files(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    log = tmp_path / "run.log"
    line = (
        " [2026-11-23 06:00:00] iteration        1/     100 | consumed samples:            4 |"
        " elapsed time per iteration (ms): 250.0 | learning rate: 1.000000E-04 |"
        " global batch size:     4 | lm loss: 7.500000E+00 | loss scale: 1.0 | grad norm: 2.500 |"
    )
    log.write_text(f"{line}\n{line.replace('       1/', '       2/')[:80]}")
    training = Training([tmp_path])
    training.poll()
    (series,) = training.series
    assert (series.total, series.last()) == (100, 1)
    assert series.values["lm loss"] == {1: 7.5}
    assert series.values["iteration-time"] == {1: 0.25}
    log.write_text(f"{line}\n{line.replace('       1/', '       2/').replace('7.5', 'nan')}\n")
    training.poll()
    assert series.last() == 2
    value = Summary.Value(tag="lm loss", simple_value=3.5)
    record = Event(step=7, summary=Summary(value=[value])).SerializeToString()
    framed = len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4)
    own = Series("x")
    assert _read_events(framed + framed[:9], own) == framed[:9]
    assert own.values == {"lm loss": {7: 3.5}}


def test_the_legend_tells_the_files_of_a_run_apart(tmp_path):
    (tmp_path / "mxfp8").mkdir()
    for folder in (tmp_path, tmp_path / "mxfp8"):
        (folder / "run.log").touch()
        (folder / "events.out.tfevents.1").touch()
    (tmp_path / "mxfp8" / "events.out.tfevents.2").touch()
    training = Training([tmp_path])
    training.poll()
    labels = {tail.series.label for tail in training._tails.values()}
    events = {"event file", "mxfp8: event file", "mxfp8: event file 2"}
    assert labels == {"run.log", "mxfp8/run.log", *events}


def test_training_is_read_from_events_of_the_indexes(tmp_path):
    training = Training([tmp_path])
    event = {"event": "trained", "run_id": "r", "iterations": [1, 2], "loss": [7.5, "nan"]}
    event["grad_norm"] = [2.5, None]
    training.poll([{"event": "kept"}, event])
    (series,) = training.series
    assert series.values["lm loss"][1] == 7.5
    assert np.isnan(series.values["lm loss"][2])
    assert (series.values["grad-norm"][1], training.version) == (2.5, 1)
    training.poll([{"event": "kept"}, event])
    assert training.version == 1


@pytest.mark.slow
def test_a_hundred_thousand_records_stay_quick(tmp_path):
    run = RUNS["mxfp8"]
    with (tmp_path / index_name(run, 0)).open("w") as index:
        for record, _, _ in records(run_id=run, quant_type="mxfp8", layers=32, iterations=223):
            index.write(json.dumps(record.to_metadata() | {"file": record.filename}) + "\n")
    explorer = opened_explorer(tmp_path)
    assert len(explorer.catalog) == 99_904
    views = _Views(explorer)
    address = explorer.resolved("").search()
    opened = f"?v=tensor&t={explorer.catalog.id_of(50_000)}"
    started = time.process_time()
    views.show("", None, None, [], [])
    for name in ("controls", "verdict", "map", "worst"):
        views.panel({"search": address}, {"name": name})
    views.show(opened, None, None, [], [])
    views.panel({"search": opened}, {"name": "heading"})
    views.follow(1, None, "", [], [])
    assert time.process_time() - started < 1.0
    explorer.close()


def test_a_card_names_the_end_of_a_run(explorer, dump):
    card = json.loads(next(dump.glob("bf16/run_*.json")).read_text())
    assert [run["type"] for run in explorer.catalog.runs] == ["bf16", "mxfp8"]
    assert explorer.catalog.cards[card["run_id"]] == card
