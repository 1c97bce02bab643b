"""Test that damaged, foreign and strange files are reported one by one, without a traceback."""

from __future__ import annotations

import json
import math
import os
import re

import pandas as pd
import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.outputs.statistics_text import format_statistics
from megatron.analysis.stats.measure import measure_dump
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import values, write_tensor
from tests.analysis.stats.inputs import record_of, write_shards


def write_index(folder, **changes):
    """Write an index of all files with fields that are known without opening them.

    changes: fields to be changed, by file
    """
    with (folder / "index_r_rank00.jsonl").open("w") as lines:
        for path in sorted(folder.glob("*.pt")):
            metadata = torch.load(path, weights_only=True)["metadata"]
            line = metadata | {"file": path.name, "bytes": path.stat().st_size}
            lines.write(json.dumps(line | changes.get(metadata["tensor_name"], {})) + "\n")


@pytest.mark.parametrize("ending", [".csv", ".json", ".txt"])
def test_a_folder_with_nothing_that_can_be_read_is_said_file_by_file(tmp_path, capsys, ending):
    (tmp_path / "a.pt").write_bytes(b"")
    options = ["stats", str(tmp_path), "--output", str(tmp_path / f"found{ending}")]
    assert main([*options, "--formats", "mxfp8"]) == 3
    printed = capsys.readouterr()
    assert "a.pt: the file is empty" in printed.err
    assert "0 tensors, 0 values" in printed.out


def replicated(folder):
    """Write three tensors of two ranks, and an index.

    One has two replicas, one is a sum of two addends, and one is sharded over both ranks.
    """
    generator = torch.Generator().manual_seed(1)
    x, y = (values((64, 2, 48), 1.0, generator) for _ in range(2))
    write_shards(folder, record_of("input", counter=1), [x, x])
    write_shards(folder, record_of("output", counter=2, dims="s b o | partial[tp]"), [x, y])
    write_shards(folder, record_of("grad_output", counter=3, dims="s b h[tp]"), [x, y])
    write_index(folder)
    return {name: sorted(folder.glob(f"*_{name}.pt")) for name in ("input", "output")}


@pytest.mark.parametrize("rank", [0, 1])
def test_of_replicas_a_bad_one_is_named_and_a_good_one_used(tmp_path, capsys, rank):
    files = replicated(tmp_path)
    expected = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    bad = next(path for path in files["input"] if f"rank0{rank}" in path.name)
    bad.write_bytes(b"garbage")
    # cached results do not hide a problem
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        store = TensorStore(tmp_path)
        found = stats.compute(store, ["mxfp8"], cache=cache)
        assert [problem.path for problem in found.problems] == [bad]
        assert "not an archive of torch.save" in found.problems[0].why
        numbers = expected.tensors.drop(columns="path")
        pd.testing.assert_frame_equal(found.tensors.drop(columns="path"), numbers)
        pd.testing.assert_frame_equal(found.formats, expected.formats)
        assert found.arrays(0).patterns.sum() == 64 * 2 * 48
    assert main(["stats", str(tmp_path), "--formats", "mxfp8"]) == 3
    assert capsys.readouterr().err.count(str(bad)) == 1
    with pytest.raises(UnreadableTensorError, match=re.escape(bad.name)):
        stats.compute(store, ["mxfp8"], strict=True)


def test_every_bad_file_of_a_tensor_is_named_and_a_part_of_a_sum_cannot_be_left_out(tmp_path):
    files = replicated(tmp_path)
    bad = [*files["input"], files["output"][1]]
    for path in bad:
        path.write_bytes(b"garbage")
    found = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    assert [problem.path for problem in found.problems] == bad
    assert found.tensors["tensor_name"].tolist() == ["grad_output"]
    measured = measure_dump(TensorStore(tmp_path))
    assert [problem.path for problem in measured.problems] == bad
    assert measured.table["tensor_name"].tolist() == ["grad_output"]


def test_a_shape_that_no_record_tells_is_the_files(tmp_path):
    replicated(tmp_path)
    expected = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    write_index(tmp_path, input={"shape": None}, output={"shape": None})
    pd.testing.assert_frame_equal(
        stats.compute(TensorStore(tmp_path), ["mxfp8"]).formats, expected.formats
    )
    for path in sorted(tmp_path.glob("*_input.pt")):
        path.write_bytes(b"garbage")
    found = stats.compute(TensorStore(tmp_path))
    assert [problem.why for problem in found.problems] == [
        "not an archive of torch.save: corrupt, truncated, or written by another program"
    ] * 2
    assert found.tensors["tensor_name"].tolist() == ["output", "grad_output"]


def test_a_size_of_a_group_that_cannot_be_is_a_note_and_takes_no_time(tmp_path):
    x = torch.ones(4, 2, 8).bfloat16()
    sizes = {"tp_size": 2**62, "world_size": 2**62}
    record = record_of(
        "input", dims="s b h[tp]", shape=[4, 2, 8], rank={"tp": 1, "world": 1, **sizes}
    )
    write_tensor(tmp_path, record, x)
    [note] = stats.compute(TensorStore(tmp_path)).tensors["note"]
    assert re.fullmatch(r"shards of tp 0, 2, 3, .*, 16 and more are missing", note)


def test_a_rank_that_does_not_say_its_place_is_no_error(tmp_path):
    x = torch.ones(4, 2, 8).bfloat16()
    for counter, tp in enumerate((0, None)):
        rank = {"world": counter, "world_size": 2, "tp": tp, "tp_size": 2}
        record = record_of("input", dims="s b h[tp]", shape=[4, 2, 8], rank=rank)
        write_tensor(tmp_path, record, x)
    found = stats.compute(TensorStore(tmp_path))
    assert found.problems == []
    assert found.tensors["count"].tolist() == [x.numel()]


@pytest.mark.parametrize("large", [1e100, 1e160, 1e300])
def test_powers_beyond_float64_are_no_error(tmp_path, large):
    rows = torch.tensor([[large, -large, 3.0], [large, 0.0, 0.0]], dtype=torch.float64)
    parts = [part.contiguous() for part in rows.chunk(2)]
    write_shards(tmp_path, record_of("input", dims="t[tp] h", dtype="float64"), parts)
    row = stats.compute(TensorStore(tmp_path)).tensors.iloc[0]
    assert row["amax"] == large
    assert row["l1"] == 3 * large
    expected = math.sqrt(0.5) * large if large < 1e150 else math.inf  # its square overflows
    assert row["rms"] == pytest.approx(expected)
    assert math.isnan(row["kurtosis"])


def test_a_file_whose_name_is_no_text_is_written_of(tmp_path, capsys):
    x = torch.ones(4, 2, 8).bfloat16()
    write_tensor(tmp_path, record_of("input", shape=[4, 2, 8]), x)
    try:
        (tmp_path / os.fsdecode(b"bad\xff.pt")).write_bytes(b"garbage")
    except OSError:
        pytest.skip("this file system does not accept such a name")
    for ending in (".txt", ".csv", ".json"):
        output = tmp_path / f"found{ending}"
        assert main(["stats", str(tmp_path), "--formats", "mxfp8", "--output", str(output)]) == 3
        text = output.read_text()
        assert "bad\\udcff.pt" in text or ending == ".csv"
    assert capsys.readouterr().err.count("bad\\udcff.pt") == 3
    store = TensorStore(tmp_path)
    measured = measure_dump(store)
    text = format_statistics(store, measured, [*store.problems, *measured.problems])
    assert text.encode().count(b"bad\\udcff.pt") == 1
