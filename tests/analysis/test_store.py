"""Tests of TensorStore: find, select and read the tensors of a dump with good and bad files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import LAYER, write_dump


def sources(store):
    return set(store.records["source"])


def test_a_dump_is_read_the_same_with_and_without_its_index(tmp_path):
    write_dump(tmp_path, layers=2)
    indexed = TensorStore(tmp_path)
    assert sources(indexed) == {"index"}
    for index in tmp_path.glob("*.jsonl"):
        index.unlink()
    opened = TensorStore(tmp_path)
    assert sources(opened) == {"file"}
    without = [store.records.drop(columns="source") for store in (indexed, opened)]
    pd.testing.assert_frame_equal(*without)
    assert len(opened) == 2 * len(LAYER)
    assert opened.records["counter"].tolist() == list(range(1, len(opened) + 1))


def test_with_an_index_no_file_is_opened(tmp_path):
    for path in write_dump(tmp_path, layers=1):
        path.write_bytes(b"")
    store = TensorStore(tmp_path)
    assert len(store) == len(LAYER)
    assert store.problems == []


def test_the_table_has_the_records_fields_and_the_ranks_place(tmp_path):
    write_dump(tmp_path, layers=1, world_size=2)
    records = TensorStore(tmp_path).records
    assert sorted(records["rank"]) == sorted(records["tp"]) == [0] * 14 + [1] * 14
    assert records["world_size"].unique().tolist() == [2]
    assert records["iteration"].dtype == np.int64
    assert records["pp"].isna().all(), "this dump does not record it"
    first = records.iloc[0]
    assert first["shape"] == first["global_shape"] == [64, 2, 64]
    assert records["format"][records["tensor_name"] == "weight"].tolist() == ["mxfp8"] * 2
    assert set(records["format"][records["phase"] == "post"]) == {None}
    assert records["bytes"].tolist() == [Path(path).stat().st_size for path in records["path"]]


def test_a_file_without_metadata_is_described_by_its_name(tmp_path):
    name = "20250908_095220_0007_linear_L1_backward_pre_linear_mxfp8_rank03_grad_output.pt"
    torch.save({"tensor": torch.ones(2, 3)}, tmp_path / name)
    torch.save(torch.ones(4), tmp_path / name.replace("rank03_", ""))
    store = TensorStore(tmp_path)
    assert sources(store) == {"name"}
    [third] = store.select(rank=3).itertuples()
    assert third.tensor_name == "grad_output"
    assert (third.shape, third.dtype, third.layer_idx) == ([2, 3], "float32", 1)
    assert store.select(iteration=None).equals(store.records)
    [bare] = store.select(rank=0).itertuples()
    assert bare.quant_type == "mxfp8"
    assert torch.equal(store.load(bare), torch.ones(4))
    assert torch.equal(store.load_global(rank=0), torch.ones(4))
    with pytest.raises(ValueError, match=r"dims of its 2 records are None.*with load\(record\)"):
        store.load_global(bare)
    assert store.problems == []


def test_subfolders_are_searched_and_unfinished_files_skipped(tmp_path):
    write_dump(tmp_path / "mxfp8", layers=1)
    write_dump(tmp_path / "deep" / "er" / "bf16", quant_type="bf16", layers=1)
    (tmp_path / "mxfp8" / "half.pt.20250908.partial").write_bytes(b"PK")
    store = TensorStore(tmp_path)
    assert len(store) == 2 * len(LAYER)
    assert store.problems == []


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, 56),
        ({"layer": 1}, 28),
        ({"layer_idx": [0, 1], "iteration": 2}, 28),
        ({"iteration": range(2, 9)}, 28),
        ({"iteration": range(2, 10**15)}, 28),
        ({"iteration": range(2, 0, -1)}, 56),
        ({"iteration": range(2, 2)}, 0),
        ({"counter": range(1, 57, 8)}, 7),
        ({"counter": range(56, 0, -8)}, 7),
        ({"pp": range(9)}, 0),
        ({"tensor_name": ["input", "weight"]}, 8),
        ({"operation": "backward", "layer_type": "attention"}, 16),
        ({"phase": "post", "quant_type": "mxfp8"}, 28),
        ({"module": "linear_qkv"}, 24),
        ({"module": "layers.1.*"}, 28),
        ({"module": ["decoder.layers.0.*_attention.core*", "nothing"]}, 16),
        ({"module": "qkv"}, 0),
        ({"format": None, "tensor_name": "weight"}, 0),
        ({"format": None}, 28),
        ({"rank": 0, "tp": [0], "run_id": "20250908_095200_abc123"}, 56),
        ({"world": 1}, 0),
        ({"pp": None}, 56),
        ({"shape": [96, 64]}, 8),
        ({"shape": [[96, 64], (64, 2, 96)]}, 16),
        ({"micro_batch": set()}, 0),
    ],
)
def test_select(tmp_path, conditions, expected):
    write_dump(tmp_path, layers=2, iterations=2)
    store = TensorStore(tmp_path)
    selected = store.select(**conditions)
    assert len(selected) == expected
    assert list(selected.columns) == list(store.records.columns)
    assert selected.index.isin(store.records.index).all(), "labels stay those of `records`"


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ({"laier": 1}, "no condition 'laier'; choose from layer, world, run_id, iteration"),
        ({"tensor_name": "weights"}, "no tensor_name 'weights'; choose from query, key, value"),
        ({"operation": ["forward", "back"]}, "no operation 'back'; choose from forward, backward"),
        ({"layer": "0"}, "layer_idx must be an integer, not '0'; give a number, a list or a range"),
    ],
)
def test_a_condition_that_could_never_hold_is_refused(tmp_path, conditions, said):
    write_dump(tmp_path, layers=1)
    with pytest.raises(ValueError, match=said):
        TensorStore(tmp_path).select(**conditions)


def test_the_tensor_is_memory_mapped_and_correct(tmp_path):
    path = write_dump(tmp_path, layers=1)[0]
    store = TensorStore(tmp_path)
    [record] = [each for each in store.records.itertuples() if each.path == str(path)]
    loaded = store.load(record)
    expected = torch.load(path, weights_only=True)["tensor"]
    assert loaded.dtype == torch.bfloat16
    for found in (
        loaded,
        store.load(store.records.iloc[0]),
        store.load(0),
        store.load(np.int64(0)),
    ):
        assert torch.equal(found, expected)
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert path.name in mapped.read_text()


def test_runs_are_told_apart_and_the_latest_can_be_chosen(tmp_path):
    write_dump(tmp_path, layers=1, run_id="20250908_095200_bbb")
    write_dump(tmp_path / "again", layers=2, run_id="20250908_095201_aaa")
    store = TensorStore(tmp_path)
    assert store.runs() == {
        "20250908_095200_bbb": len(LAYER),
        "20250908_095201_aaa": 2 * len(LAYER),
    }
    assert len(store.only("latest")) == 2 * len(LAYER)
    assert len(store.only("20250908_095200_bbb")) == len(LAYER)
    with pytest.raises(ValueError, match=r"no run 'x'.*20250908_095200_bbb"):
        store.only("x")
    assert store.run_card("20250908_095201_aaa")["seed"] == 1234
    assert store.run_card("nothing") == {}


def test_missing_and_empty_folders_are_explained(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        TensorStore(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.pt file in"):
        TensorStore(tmp_path)
    (tmp_path / "run_a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no \.pt file in .* \(run_a.json belongs to a run that"):
        TensorStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        TensorStore(tmp_path / "file")


def test_a_table_is_taken_where_it_is_one_tensor(tmp_path):
    write_dump(tmp_path, layers=1, world_size=2)
    store = TensorStore(tmp_path)
    shards = store.select(module="linear_qkv", tensor_name="input")
    assert len(shards) == 2
    assert torch.equal(store.load(shards[:1]), store.load(shards.iloc[0]))
    with pytest.raises(ValueError, match="a table of 2 tensors was given; give one of its rows"):
        store.load(shards)
    with pytest.raises(ValueError, match="a table of 0 tensors"):
        store.load_global(shards[:0])
    one = store.select(module="linear_qkv", tensor_name="input", rank=0)
    assert torch.equal(store.load_global(one, rank=0), store.load(one))
    with pytest.raises(
        ValueError, match=r"of more than one tensor match; give .*module=.* or .*, or one of"
    ):
        store.load_global(store.records)
    assert repr(store) == f"TensorStore({str(tmp_path)!r}): 28 tensors of 1 run(s)"
