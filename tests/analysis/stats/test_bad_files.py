"""What is damaged, foreign or strange is said file by file, and never a traceback."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.measure import measure_dump
from megatron.analysis.store import TensorStore
from megatron.analysis.tensor_files import UnreadableTensorError
from tests.analysis.fake_dump import values
from tests.analysis.stats.test_logical import record_of, write_shards


def write_index(folder, **changes):
    """An index of all files: what is known of them without opening them. `changes` by file."""
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
    """A tensor of which each of two ranks has a copy, a sum of two parts, and one shard a rank;
    and an index.
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
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # results that are kept hide none
        store = TensorStore(tmp_path)
        found = stats.compute(store, ["mxfp8"], cache=cache)
        assert [problem.path for problem in found.problems] == [bad]
        assert "no archive of torch.save" in found.problems[0].why
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
