"""Tests that hostile files and requests do not harm the explorer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis.serve import explorer as explorer_module
from megatron.analysis.serve import maps, training
from megatron.analysis.serve.address import Address
from megatron.analysis.serve.application import _csv, _Views, create
from megatron.analysis.serve.contents import NotShownError, _check_scores, _Kept, _profiles
from megatron.analysis.serve.follower import Follower
from megatron.analysis.serve.measuring import MOST_OTHERS
from megatron.analysis.serve.pages import map_page, parts, runs_page, tensor_page
from megatron.analysis.serve.pixels import Region, reduce
from megatron.analysis.serve.statistics import Numbers
from megatron.analysis.serve.training import Series, Training
from megatron.tensor_record import index_name
from tests.analysis.fake_dump import RUNS, records, write_dump, write_tensor
from tests.analysis.serve.conftest import opened_explorer, wait_for
from tests.analysis.serve.panels import shown_text

RUN = RUNS["mxfp8"]
LINE = (
    " [2026-11-23 06:00:00] iteration        1/     100 | consumed samples:            4 |"
    " elapsed time per iteration (ms): 250.0 | lm loss: 7.500000E+00 |"
)


def lines(number, **fields):
    """Yield index lines whose files do not exist; a callable field gets the number of the line."""
    record = next(records(run_id=RUN, quant_type="mxfp8"))[0].to_metadata()
    for at in range(number):
        own = {name: f(at) if callable(f) else f for name, f in fields.items()}
        yield json.dumps(record | {"file": f"{at}.pt", "bytes": 1} | own) + "\n"


def write_index(folder, number, **fields):
    (folder / index_name(RUN, 0)).write_text("".join(lines(number, **fields)))
    return opened_explorer(folder)


@pytest.mark.parametrize("value", [{"x": {1: 2, "a": 3}}, {"x": torch.zeros(2)}])
def test_metadata_that_json_cannot_hold_leaves_out_its_file_alone(tmp_path, value):
    paths = write_dump(tmp_path, layers=1, index=False)
    saved = torch.load(paths[3], weights_only=True)
    saved["metadata"]["accumulate"] = None
    part = {"of": [64], "start": [0], "step": [1]}
    saved["metadata"]["slice"] = part | value
    torch.save(saved, paths[3])
    follower = Follower(tmp_path)
    follower.poll_all()
    catalog = follower.catalog
    assert len(catalog) == 13
    assert [str(problem.path) for problem in follower.problems] == [str(paths[3])]
    for tensor in range(len(catalog)):
        name = catalog.field(tensor, "tensor_name")
        assert f"_{name}" in catalog.records.path(int(catalog.rows[tensor]))


def test_an_error_of_any_kind_does_not_stop_the_following(tmp_path, monkeypatch):
    write_dump(tmp_path, layers=1)
    follower, calls = Follower(tmp_path), []

    def poll():
        calls.append(1)
        follower._stop.wait(0) if len(calls) < 3 else follower._stop.set()
        raise LookupError("odd")

    monkeypatch.setattr(follower, "poll", poll)
    monkeypatch.setattr("megatron.analysis.serve.follower.PERIOD", 0)
    follower._follow()
    assert len(calls) == 3
    assert "LookupError: odd" in str(follower.problems[0])


def test_numbers_of_a_damaged_index_take_no_memory(tmp_path):
    many = 3000
    explorer = write_index(
        tmp_path, many, layer_idx=lambda i: i, module=lambda i: f"m{i}", bytes=(1 << 63) - 1
    )
    address = explorer.resolved("?show=all")
    with pytest.raises(NotShownError, match="3,000 x 3,000 cells"):
        map_page.shown_map(explorer, address)
    for name in ("map", "worst"):
        assert "cells" in shown_text(
            _Views(explorer).panel({"search": address.search()}, {"name": name})
        )
    assert not isinstance(_Views(explorer).open_cell({"row": 0, "column": 0}, "?show=all"), str)
    assert explorer.written > 1e20
    assert maps.MOST_CELLS < 1 << 24


def test_a_record_may_claim_any_number_of_heads(tmp_path):
    fields = {"shape": [8, 10**15, 10**12, 4], "layer_type": "attention", "tensor_name": "query"}
    explorer = write_index(tmp_path, 1, global_shape=None, **fields)
    address = Address(view="tensor", tensor=explorer.catalog.id_of(0))
    (form,) = tensor_page._head_controls(explorer.subject(address))
    assert shown_text(form).count("Option") == 2 * parts.MOST_OPTIONS


def test_many_runs_and_iterations_are_shown_in_part(tmp_path):
    explorer = write_index(tmp_path, 5000, run_id=lambda i: f"run {i:04}", iteration=lambda i: i)
    started = time.process_time()
    assert [run["id"] for run in explorer.catalog.runs] == [f"run {i:04}" for i in range(5000)]
    page = shown_text(runs_page.page(explorer))
    assert "The newest 200 of 5,000 runs." in page
    assert "run 4999" in page
    chosen = explorer.resolved("?run=run+0007")
    text = shown_text(map_page.controls(explorer, chosen))
    assert '"value": "run 0007"' in text
    assert text.count("Option") < 2 * parts.MOST_OPTIONS + 100
    assert time.process_time() - started < 3


def test_formats_that_visitors_name_do_not_accumulate(tmp_path):
    explorer = write_index(tmp_path, 1)
    always = list(explorer.formats)
    names = [f"mxfp4:top4.{digit}" for digit in range(1, 30)]
    for name in names:
        explorer.look_at(np.array([0]), name)
    assert explorer.formats == [*always, *names[-MOST_OTHERS:]]
    explorer.look_at(np.array([0]), "no format")
    assert len(explorer.formats) == len(always) + MOST_OTHERS


def test_an_address_names_a_format_in_one_way_and_no_negative_head():
    address = Address.parse("?format=MXFP4&head=-3&seq=-1")
    assert (address.format, address.head, address.sequence) == ("mxfp4", 0, 0)


def test_a_link_that_replaces_a_folder_is_not_followed(tmp_path):
    write_dump(tmp_path / "dump" / "part", layers=1)
    explorer = opened_explorer(tmp_path / "dump")
    (tmp_path / "dump" / "part").rename(tmp_path / "outside")
    (tmp_path / "dump" / "part").symlink_to(tmp_path / "outside")
    for read in (explorer.contents.tensor, explorer.contents.answer):
        more = (["mxfp8"],) if read == explorer.contents.answer else ()
        with pytest.raises(NotShownError, match="leads out of the folder"):
            read(explorer.catalog, 0, *more)
    explorer.close()


def test_a_deleted_dump_does_not_come_back_as_a_cache(tmp_path):
    folder = tmp_path / "dump"
    write_dump(folder, layers=1)
    explorer = opened_explorer(folder, cache=folder / ".statistics")
    shutil.rmtree(folder)
    with pytest.raises(NotShownError):
        explorer.contents.answer(explorer.catalog, 0, ["mxfp8"])
    explorer.close()
    assert not folder.exists()


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        npy(b"("),
        npy(b"-" * 9000 + b"1"),
        npy(b"(" * 9000),
        npy(b"{'descr': [('id', '<u8')], 'fortran_order': False, 'shape': (1 << 62,)}"),
        npy(b"{'descr': [('id', '<u8')], 'fortran_order': False, 'shape': (999999999999999,)}"),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + b"\x80\x04N.",
        npy(b"{'descr': 5, 'fortran_order': False, 'shape': (-1,)}"),
    ],
)
def test_a_forged_file_of_numbers_is_ignored(tmp_path, content):
    numbers = Numbers()
    numbers._path(tmp_path).write_bytes(content)
    numbers.load(tmp_path)
    assert len(numbers) == 0


def test_a_record_of_an_event_file_may_be_long_or_damaged(tmp_path, monkeypatch):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    def framed(content):
        return len(content).to_bytes(8, "little") + bytes(4) + content + bytes(4)

    def loss(step):
        value = Summary.Value(tag="lm loss", simple_value=step / 2)
        return framed(Event(step=step, summary=Summary(value=[value])).SerializeToString())

    monkeypatch.setattr(training, "STEP", 100)
    for long in (90, 150, 1000):
        path = tmp_path / f"{long}.tfevents"
        path.write_bytes(loss(1) + framed(bytes(long)) + loss(2))
        tail = training._Tail(str(path), Series("x"))
        for _ in range(12):
            Training([tmp_path])._read(tail)
            assert len(tail.rest) <= 116
        assert tail.series.values == {"lm loss": {1: 0.5, 2: 1.0}}
        assert (tail.rest, tail.skip) == (b"", 0)
    path.write_bytes(loss(1) + b"\xff" * 2000)
    tail = training._Tail(str(path), Series("x"))
    for _ in range(30):
        Training([tmp_path])._read(tail)
        assert len(tail.rest) <= 100
    assert (tail.damaged, tail.offset) == (True, 100)


def test_files_with_statistics_may_hold_anything(tmp_path):
    folder = tmp_path / "statistics"
    folder.mkdir()
    pd.DataFrame({"a": [1]}).to_parquet(folder / "operands_1.parquet")
    (tmp_path / "run.log").write_text(LINE + "\n")
    followed = Training([tmp_path])
    followed.poll()
    assert [*followed.problems] == [str(folder)]
    os.mkfifo(folder / "operands_2.parquet")
    followed.poll()
    (folder / "operands_2.parquet").unlink()
    (folder / "operands_1.parquet").write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    followed.poll()
    assert followed.series[0].values["lm loss"] == {1: 7.5}


def test_a_log_may_hold_any_number(explorer, tmp_path, monkeypatch):
    huge = LINE.replace(" 100 ", f" {10**15 - 1} ").replace("250.0", "9" * 400)
    (tmp_path / "run.log").write_text(f"{huge}\n{LINE.replace(' 1/', ' ' + '9' * 3000 + '/')}\n")
    followed = Training([tmp_path])
    followed.poll()
    assert followed.series[0].last() == 1
    monkeypatch.setattr(explorer, "training", followed)
    for name in ("numbers", "curves", "events"):
        text = shown_text(_Views(explorer).panel({"search": "?v=training"}, {"name": name}))
        assert "cannot be shown" not in text


@pytest.mark.parametrize("content", [b"PAR1 and more", pd.DataFrame({"a": [1]}), None])
def test_a_study_of_any_content_leaves_the_map_alone(
    explorer, tmp_path, monkeypatch, capsys, content
):
    path = tmp_path / "study.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        names = [*explorer_module._STUDY_NUMBERS, *explorer_module._STUDY_TEXTS]
        table = content if content is not None else pd.DataFrame([["x"] * 11], columns=names)
        table.to_parquet(path)
    monkeypatch.setattr(explorer, "_study_path", path)
    for _ in range(2):
        assert explorer.study() is None
    assert capsys.readouterr().err.count("is not a table of a study") == 1


def test_the_map_says_which_tensors_have_no_number_and_does_not_wait_for_them(tmp_path):
    wanted = {"query": math.nan, "key": 0.0, "value": 1.0, "input": math.inf}
    for record, shape, _ in records(run_id=RUN, quant_type="mxfp8", layers=1):
        if record.tensor_name in wanted:
            values = torch.full(shape, wanted[record.tensor_name], dtype=torch.bfloat16)
            write_tensor(tmp_path, record, values)
    explorer = opened_explorer(tmp_path)

    def note(statistic: str) -> str:
        search = explorer.resolved(f"?format=mxfp8&stat={statistic}").search()
        return shown_text(_Views(explorer).panel({"search": search}, {"name": "map"}))

    assert "0 of 4 tensors have been measured so far" in note("amax")
    explorer.measurer.start()
    wait_for(lambda: explorer.measurer.total and explorer.measurer.done == 4)
    for statistic, without in (("sqnr_db", 3), ("zero_share", 0)):
        text = note(statistic)
        assert "so far" not in text
        assert (f"{without} of 4 tensors have no such number." in text) == bool(without)
        assert "2 of 4 tensors hold NaN or Inf." in text
    explorer.close()


def test_no_text_of_a_download_is_a_formula():
    names = ["=cmd|' /C calc'!A1", "same", "same"]
    table = pd.DataFrame([["@x", 1, "-2+3"], ["a", 2, "b"]], columns=names, index=[0, 0])
    head, first, _ = _csv(table).splitlines()
    assert (head, first) == ("'=cmd|' /C calc'!A1,same,same", "'@x,1,'-2+3")
    assert _csv(pd.DataFrame()).strip() in ("", '""')


def test_a_failed_download_and_a_forged_line_of_the_log_are_one_line(explorer, capsys, monkeypatch):
    monkeypatch.setattr(map_page, "numbers_of", lambda *_: 1 / 0)
    answer = create(explorer).server.test_client().get("/csv?panel=map&x=%0a[ERROR]%20forged")
    assert (answer.status_code, answer.text) == (500, "This cannot be shown (ZeroDivisionError).\n")
    client = create(explorer).server.test_client()
    path = "/_dash-component-suites/dash/../../../../etc/passwd"
    assert client.get(path).status_code == 500
    for body in ([], {"output": "status.children", "outputs": {}, "inputs": []}):
        assert client.post("/_dash-update-component", json=body).status_code == 500
    assert client.put("/").status_code == 405
    _Views(explorer).panel({"search": "?v=tensor\n[ERROR] forged"}, {"name": "\x1b[2J"})
    assert all(line.startswith("[WARNING]") for line in capsys.readouterr().err.splitlines())


def test_large_matrices_are_refused_or_reduced_in_parts():
    with pytest.raises(NotShownError, match="scores are too many"):
        _check_scores(10, 1 << 26)
    with pytest.raises(NotShownError, match="are too many"):
        _profiles(torch.zeros(1).expand(1, 1 << 24))
    for shape in ((1, 5_000_011), (5_000_011, 1), (2100, 2500)):
        x = torch.zeros(shape)
        y = x.clone()
        x[-1, -1], y[0, 0] = 3.0, -7.0
        picture = reduce(y, Region.within(*shape), minus=x)
        assert (picture.values[0, 0], picture.values[-1, -1]) == (-7, -3)
        assert picture.values.shape == tuple(
            -(-n // s) for n, s in zip(shape, picture.step, strict=True)
        )
        assert np.count_nonzero(picture.values) == 2


def test_a_value_that_several_visitors_want_is_computed_once():
    kept, calls, together = _Kept(10), [], threading.Barrier(4)

    def make():
        calls.append(1)
        time.sleep(0.05)
        return "value"

    def visit():
        together.wait()
        assert kept.get("key", make, lambda _: 1) == "value"

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        kept.get("other", lambda: 1 / 0, lambda _: 1)
    assert kept.get("other", lambda: 5, lambda _: 1) == 5
    assert not kept._making


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5), torch.zeros(0, 4), torch.zeros(2, 64), torch.ones([1] * 16),
        torch.full((4, 32), torch.nan), torch.full((4, 32), torch.inf),
        torch.ones(3, dtype=torch.bool), torch.arange(64).reshape(2, 32),
        torch.ones(5, 7, dtype=torch.float64), torch.ones(2, 32).to(torch.float8_e5m2),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)  # fmt: skip
def test_a_tensor_of_any_kind_is_shown_or_refused_with_a_reason(tmp_path, capsys, tensor):
    record = next(records(run_id=RUN, quant_type="mxfp8"))[0]
    changes = {"shape": list(tensor.shape), "global_shape": list(tensor.shape), "dims": None}
    changes["dtype"] = str(tensor.dtype).removeprefix("torch.")
    changed = dataclasses.replace(record, **changes)
    torch.save({"tensor": tensor, "metadata": changed.to_metadata()}, tmp_path / changed.filename)
    explorer = opened_explorer(tmp_path)
    address = f"?v=tensor&t={explorer.catalog.id_of(0)}&format=mxfp4"
    for name in ("heading", "facts", *tensor_page.TITLES):
        for more in ("", "&img=errors", "&img=magnitudes") if name == "image" else ("",):
            text = shown_text(_Views(explorer).panel({"search": address + more}, {"name": name}))
            assert "cannot be shown" not in text, (name, more)
    explorer.close()
    assert capsys.readouterr().err == ""
