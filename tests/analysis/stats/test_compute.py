"""Test all steps from a dump to tables, files and exit statuses."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import sqlite3

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.cli.stats_command import parse_size
from megatron.analysis.stats import chunks, executors, jobs
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize
from tests.analysis.fake_dump import LAYER, records, write_dump, write_tensor

FORMATS = ["mxfp8", "mxfp4", "nvfp4", "hifp8"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    write_dump(folder, layers=2)
    return folder


@pytest.fixture(scope="module")
def found(dump):
    return stats.compute(TensorStore(dump), FORMATS)


def same(one: stats.Statistics, other: stats.Statistics) -> None:
    pd.testing.assert_frame_equal(one.tensors, other.tensors)
    pd.testing.assert_frame_equal(one.formats, other.formats)


def test_the_tables_have_the_columns_that_are_documented(dump, found):
    assert tuple(found.tensors.columns) == stats.IDENTITY_COLUMNS + stats.VALUE_COLUMNS
    assert tuple(found.formats.columns) == stats.FORMAT_COLUMNS
    assert len(found.tensors) == 2 * len(LAYER)
    assert len(found.formats) == 2 * len(LAYER) * 7
    assert found.problems == []
    joined = found.joined()
    assert len(joined) == len(found.formats)
    for row in joined[joined["quantized_format"] == "hifp8"].to_dict("records"):
        x = torch.load(row["path"], weights_only=True)["tensor"]
        error = (fake_quantize(x, "hifp8").double() - x.double()).square().mean().item()
        assert row["mse"] == pytest.approx(error, rel=1e-11)
        assert row["rms"] == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-11)
    uses = joined[joined["quantized_format"] == "mxfp8"].set_index(["tensor_name", "axis"])
    assert set(uses.loc[("weight", "column"), "used_by"]) == {"dgrad"}
    assert set(uses.loc[("value", "column"), "used_by"]) == {"fprop"}
    assert set(uses.loc[("grad_input", "row"), "used_by"]) == {""}


def test_quantiles_of_bfloat16_are_order_statistics(found):
    row = found.tensors.iloc[0]
    x = torch.load(row["path"], weights_only=True)["tensor"].double().flatten().sort().values
    for share in stats.QUANTILES:
        rank = max(math.ceil(share * len(x)), 1) - 1
        assert row[f"q{share}"] == x[rank].item()
        assert row[f"m{share}"] == x.abs().sort().values[rank].item()


def test_workers_and_batches_change_nothing(dump, found, monkeypatch):
    monkeypatch.setattr(executors, "BATCH_JOBS", 1)
    for workers in (1, 5):
        same(stats.compute(TensorStore(dump), FORMATS, workers=workers), found)


def test_no_formats_and_a_format_that_is_named_twice(dump):
    values = stats.compute(TensorStore(dump))
    assert len(values.formats) == 0
    assert tuple(values.formats.columns) == stats.FORMAT_COLUMNS
    twice = stats.compute(TensorStore(dump), ["hif8", "hifp8", "HiFloat8"])
    assert len(twice.formats) == len(twice.tensors)
    with pytest.raises(ValueError, match="unknown format 'mxfp9'"):
        stats.compute(TensorStore(dump), ["mxfp9"])


def test_a_second_call_computes_nothing_and_a_new_format_only_itself(
    dump, found, tmp_path, monkeypatch
):
    computed = []
    original = jobs.measure_jobs

    def spy(jobs):
        computed.extend(job.formats for job in jobs)
        return original(jobs)

    monkeypatch.setattr(executors, "measure_jobs", spy)
    store = TensorStore(dump)
    same(stats.compute(store, FORMATS[:3], cache=tmp_path), stats.compute(store, FORMATS[:3]))
    del computed[:]
    first = stats.compute(store, FORMATS, cache=tmp_path)
    assert set(computed) == {("hifp8",)}
    del computed[:]
    second = stats.compute(store, FORMATS, cache=tmp_path)
    assert computed == []
    same(first, second)
    same(first, found)
    for name in ("patterns", "token_amax", "channel_amax"):
        np.testing.assert_array_equal(
            getattr(second.arrays(3), name), getattr(found.arrays(3), name)
        )
    row, other = (each.arrays(3).formats["nvfp4", "row"] for each in (second, found))
    np.testing.assert_array_equal(row.codes, other.codes)
    np.testing.assert_array_equal(row.squared_error, other.squared_error)


def test_a_file_that_changed_is_measured_again(tmp_path):
    paths = write_dump(tmp_path / "dump", layers=1)
    store, cache = TensorStore(tmp_path / "dump"), tmp_path / "cache"
    before = stats.compute(store, ["hifp8"], cache=cache)
    payload = torch.load(paths[0], weights_only=True)
    payload["tensor"] *= 2
    torch.save(payload, paths[0])
    after = stats.compute(store, ["hifp8"], cache=cache)
    assert after.tensors["amax"][0] == 2 * before.tensors["amax"][0]
    assert after.tensors["amax"][1] == before.tensors["amax"][1]


def test_what_was_interrupted_goes_on(dump, tmp_path, monkeypatch):
    original, done = jobs.measure_job, []

    def interrupted(job):
        if len(done) == 10:
            raise KeyboardInterrupt
        done.append(job.part.paths)
        return original(job)

    monkeypatch.setattr(executors, "BATCH_JOBS", 1)
    monkeypatch.setattr(jobs, "measure_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stats.compute(TensorStore(dump), ["mxfp8"], cache=tmp_path, workers=1)
    kept = sqlite3.connect(tmp_path / "statistics.sqlite").execute(
        "SELECT count(*) FROM results WHERE name = 'mxfp8'"
    )
    (before,) = kept.fetchone()
    assert 0 < before <= 10
    again = []
    monkeypatch.setattr(jobs, "measure_job", lambda job: again.append(job) or original(job))
    stats.compute(TensorStore(dump), ["mxfp8"], cache=tmp_path, workers=1)
    assert len(again) == 2 * len(LAYER) - before


def spoil(folder):
    """Write a dump with a truncated, an empty and a foreign file, and one with a wrong shape."""
    paths = write_dump(folder, layers=1)
    paths[0].write_bytes(paths[0].read_bytes()[:1000])
    paths[1].write_bytes(b"")
    (folder / "foreign.pt").write_bytes(b"not a tensor")
    torch.save({"tensor": torch.zeros(3)}, paths[2])
    (folder / f"{paths[3].name}.partial").write_bytes(b"half")
    return [paths[0], paths[1], paths[2], folder / "foreign.pt"]


def test_files_that_cannot_be_read_are_named_counted_and_left_out(tmp_path, capsys):
    bad = spoil(tmp_path)
    found = stats.compute(TensorStore(tmp_path), ["mxfp8"], cache=tmp_path / "c")
    assert sorted(problem.path for problem in found.problems) == sorted(bad)
    assert len(found.tensors) == len(LAYER) - 3
    assert main(["stats", str(tmp_path), "--formats", "mxfp8"]) == 3
    printed = capsys.readouterr()
    for path in bad:
        assert printed.err.count(str(path)) == 1
        assert f"[ERROR] {path}: " in printed.err
    assert "4 file(s) were left out" in printed.err
    assert f"{len(LAYER) - 3} tensors, " in printed.out
    assert main(["stats", str(tmp_path), "--formats", "mxfp8", "--strict"]) == 3
    printed = capsys.readouterr()
    assert printed.err.count("[ERROR]") == 1
    assert printed.out == ""


def test_complex_tensors_are_left_out_and_others_have_a_note(tmp_path):
    every = list(records(run_id="r", quant_type="mxfp8", layers=1))
    for (record, shape, _), dtype in zip(every, (torch.complex64, torch.float64), strict=False):
        record = dataclasses.replace(record, dtype=str(dtype).removeprefix("torch."))
        write_tensor(tmp_path, record, torch.zeros(shape, dtype=dtype))
    found = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    assert ["complex64" in problem.why for problem in found.problems] == [True]
    assert "no format is computed for float64" in found.tensors["note"][0].replace(
        "bfloat16", "float64"
    )


@pytest.mark.parametrize("ending", [".csv", ".json", ".txt"])
def test_the_command_writes_everything_and_keeps_an_earlier_file(dump, tmp_path, capsys, ending):
    output = tmp_path / f"stats{ending}"
    options = ["stats", str(dump), "--cache", str(tmp_path / "c"), "--output", str(output)]
    assert main([*options, "--formats", "mxfp8", "hifp8"]) == 0
    text = output.read_text()
    found = stats.compute(TensorStore(dump), ["mxfp8", "hifp8"])
    first = found.joined().iloc[0]
    if ending == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert len(rows) == len(found.formats)
        assert float(rows[0]["mse"]) == first["mse"]
        assert rows[0]["shape"] == "64x2x64"
    elif ending == ".json":
        content = json.loads(text)
        assert content["formats"][0]["mse"] == first["mse"]
        assert content["tensors"][0]["shape"] == [64, 2, 64]
        assert len(content["tensors"]) == 2 * len(LAYER)
    else:
        assert f"{first['mse']:.9g}" in text
    assert main([*options, "--formats", "mxfp4"]) == 0
    assert "Kept the earlier file as" in capsys.readouterr().out
    assert len(list(tmp_path.glob(f"stats*{ending}"))) == 2


def test_a_part_of_a_dump(dump, tmp_path):
    output = tmp_path / "part.csv"
    chosen = ["--select", "layer=1", "tensor_name=input,weight", "iteration=1-3"]
    options = ["stats", str(dump), "--formats", "none", "--output", str(output), "--cache", "none"]
    assert main([*options, *chosen]) == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [(row["layer_idx"], row["tensor_name"]) for row in rows] == [
        ("1", "input"),
        ("1", "weight"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "mxfp9"], "unknown format 'mxfp9'"),
        (["--select", "layer"], "is not a condition; give column=value"),
        (["--select", "layer=99"], "no tensor in .* meets layer=99"),
        (["--select", "layer=5-2"], "--select 'layer=5-2': 5-2 is empty; give 2-5"),
        (["--select", "color=1"], "no condition 'color'"),
        (["--output", "stats.xml"], r"must end in .csv, .json, .txt"),
        (["--output", "missing/stats.csv"], "there is no folder missing"),
        (["--max-memory", "lots"], "is not a size; give a number"),
        (["--max-memory", "10M"], "10 MiB of memory are too few; one worker takes up to"),
        (["--workers", "0"], "--workers is 0; give 1 or more"),
        (["--run", "x"], "no run 'x'"),
        (
            ["--scheduler", "tcp://x:1", "--workers", "2"],
            "--workers sets the threads",
        ),
        (["--scheduler", "tcp://x:1", "--max-memory", "2G"], "--max-memory .* leave it out"),
    ],
)
def test_wrong_options_are_errors_that_say_what_to_do(dump, capsys, options, message):
    assert main(["stats", str(dump), "--cache", "none", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)


def test_a_folder_without_tensors_is_an_error(tmp_path, capsys):
    assert main(["stats", str(tmp_path)]) == 2
    assert "no .pt file in" in capsys.readouterr().err


def test_sizes():
    assert parse_size("800M") == 800 << 20
    assert parse_size("1.5 GiB") == 3 << 29
    assert parse_size("123") == 123


def test_memory_decides_on_the_number_of_workers():
    one = executors.BASE + executors.PER_WORKER
    assert executors.affordable(4, one) == 1
    assert executors.affordable(4, one + 2 * executors.PER_WORKER) == 3
    assert executors.affordable(2, None) == 2
    with pytest.raises(ValueError, match="too few"):
        executors.affordable(1, one - 1)


def test_pages_of_a_mapped_file_are_given_back_and_others_never(tmp_path, monkeypatch):
    record, _, _ = next(records(run_id="r", quant_type="mxfp8", layers=1))
    x = torch.randn(512, 1024).bfloat16()
    path = write_tensor(tmp_path, record, x)
    mapped = torch.load(path, weights_only=True, mmap=True)["tensor"]
    assert chunks.is_mapped(mapped.data_ptr())
    assert not chunks.is_mapped(x.data_ptr())
    chunks.give_back(mapped.view(torch.int16).numpy(), mapped=True)
    assert torch.equal(mapped, x)
    kept = x.clone()
    chunks.give_back(x.view(torch.int16).numpy(), mapped=chunks.is_mapped(x.data_ptr()))
    assert torch.equal(kept, x)
