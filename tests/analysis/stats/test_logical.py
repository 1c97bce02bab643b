"""Test that the shards of several ranks give the statistics of one tensor."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize
from tests.analysis.fake_dump import records, values, write_tensor
from tests.analysis.stats.inputs import record_of, write_shards

FORMATS = ["mxfp8", "nvfp4", "hifp8", "fp8_e4m3"]
GENERATOR = torch.Generator().manual_seed(5)


def whole_and_parts(tmp_path, record, x, shards, **options):
    """Return the statistics of a tensor in one file, and of the same tensor in several."""
    one, several = tmp_path / "one", tmp_path / "several"
    for folder in (one, several):
        folder.mkdir()
    rank = {"world": 0, "world_size": 1}
    write_tensor(one, dataclasses.replace(record, shape=list(x.shape), rank=rank), x)
    write_shards(several, record, shards, **options)
    found = [stats.compute(TensorStore(folder), FORMATS) for folder in (one, several)]
    for each in found:
        assert each.problems == []
        assert len(each.tensors) == 1
    return found


def same_values(one, several):
    a, b = one.tensors.iloc[0], several.tensors.iloc[0]
    assert a["shape"] == b["shape"]
    for name in stats.VALUE_COLUMNS:
        # the rounding error of a sum that cancels depends on its order
        loose = {"mean": 1e-12 * a["rms"], "skewness": 1e-9}.get(name, 0)
        assert b[name] == pytest.approx(a[name], rel=1e-9, abs=loose, nan_ok=True), name
    for name in ("channel_amax", "token_amax", "patterns", "positive"):
        np.testing.assert_array_equal(
            getattr(several.arrays(0), name), getattr(one.arrays(0), name), name
        )


def test_shards_along_channels_are_joined_and_each_is_quantized_by_itself(tmp_path):
    record = record_of("query", dims="s b n[tp] d")
    x = values((64, 2, 4, 32), 0.3, GENERATOR)
    shards = [part.contiguous() for part in x.chunk(2, 2)]
    one, several = whole_and_parts(tmp_path, record, x, shards)
    same_values(one, several)
    assert several.tensors.iloc[0]["shards"] == 2
    # Blocks lie within heads, so they do not change. Each rank's tensor has its own tensor scale.
    formats = [found.formats.set_index(["quantized_format", "axis"]) for found in (one, several)]
    for key in (("mxfp8", "row"), ("mxfp8", "column"), ("hifp8", "all")):
        for column in (
            *("mse", "sqnr_db", "gain", "underflow", "saturated", "relative_error"),
            *("clipping_error", "underflow_error", "grid_error"),
        ):
            assert formats[1].loc[key, column] == pytest.approx(formats[0].loc[key, column])
    errors = [fake_quantize(part, "fp8_e4m3").double() - part.double() for part in shards]
    expected = torch.cat([error.flatten() for error in errors]).square().mean().item()
    assert formats[1].loc[("fp8_e4m3", "all"), "mse"] == pytest.approx(expected, rel=1e-11)


def test_shards_along_tokens_and_zigzag_are_put_in_order(tmp_path):
    x = values((64, 2, 48), 1.0, GENERATOR)
    record = record_of("input", dims="s[cp] b h")
    same_values(*whole_and_parts(tmp_path / "plain", record, x, list(x.chunk(2)), group="cp"))
    quarters = list(x.chunk(4))
    shards = [torch.cat([quarters[0], quarters[3]]), torch.cat([quarters[1], quarters[2]])]
    record = record_of("input", dims="s[cp:zigzag] b h")
    same_values(*whole_and_parts(tmp_path / "zigzag", record, x, shards, group="cp"))


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in ("plain", "zigzag"):
        (tmp_path / name).mkdir()


def test_replicas_count_once_and_partial_sums_are_added(tmp_path):
    x = values((64, 2, 48), 1.0, GENERATOR)
    one, several = whole_and_parts(tmp_path / "plain", record_of("input"), x, [x, x])
    same_values(one, several)
    assert several.tensors.iloc[0]["shards"] == 2
    record = record_of("output", dims="s b o | partial[tp]")
    addends = [values((64, 2, 48), 1.0, GENERATOR) for _ in range(2)]
    total = (addends[0].double() + addends[1].double()).to(torch.bfloat16)
    one, several = whole_and_parts(tmp_path / "zigzag", record, total, addends)
    same_values(one, several)
    assert several.formats["mse"].tolist() == one.formats["mse"].tolist()


def test_data_parallel_ranks_are_tensors_of_their_own(tmp_path):
    parts = [values((64, 2, 48), 1.0, GENERATOR) for _ in range(2)]
    write_shards(tmp_path, record_of("input"), parts, group="dp")
    write_shards(tmp_path, record_of("weight"), [parts[0][0], parts[0][0]], group="dp")
    found = stats.compute(TensorStore(tmp_path))
    inputs = found.tensors[found.tensors["tensor_name"] == "input"]
    assert inputs["data_rank"].tolist() == [0, 1]
    assert [round(rms, 6) for rms in inputs["rms"]] == [
        round(part.double().square().mean().sqrt().item(), 6) for part in parts
    ]
    assert found.tensors["tensor_name"].tolist().count("weight") == 1


@pytest.mark.parametrize("dims", ["s b h[tp]", "s b h | partial[tp]"])
def test_one_rank_of_several_is_measured_and_what_is_missing_said(tmp_path, dims):
    x = values((64, 2, 48), 1.0, GENERATOR)
    write_shards(tmp_path, record_of("input", dims=dims), [x, x, x, x])
    for path in sorted(tmp_path.glob("*rank0[123]*")):
        path.unlink()
    found = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    row = found.tensors.iloc[0]
    assert "of tp 1, 2, 3 are missing" in row["note"]
    assert row["count"] == x.numel()
    assert not math.isnan(found.formats["sqnr_db"].iloc[0])


def test_a_slice_has_no_blocks_and_a_recomputed_tensor_is_left_aside(tmp_path):
    x = values((64, 2, 48), 1.0, GENERATOR)
    part = {"of": [64, 2, 480], "start": [0, 0, 0], "step": [1, 1, 10]}
    write_tensor(tmp_path, record_of("input", shape=list(x.shape), slice=part, counter=1), x)
    again = record_of("weight", shape=list(x.shape), recomputed=True, counter=3)
    write_tensor(tmp_path, record_of("weight", shape=list(x.shape), counter=2), x)
    write_tensor(tmp_path, again, x)
    found = stats.compute(TensorStore(tmp_path), FORMATS)
    assert found.tensors["recomputed"].tolist() == [False, False]
    assert found.repeats == 1
    sliced = found.formats[found.formats["tensor"] == 0]
    assert sliced["quantized_format"].tolist() == ["hifp8", "fp8_e4m3"]
    assert "slice" in found.tensors["note"][0]


def test_files_known_by_their_name_only_are_tensors_each(tmp_path):
    for counter in (1, 2):
        name = f"20250908_095220_000{counter}_linear_L0_forward_pre_linear_mxfp8_input.pt"
        torch.save({"tensor": torch.randn(8, 4)}, tmp_path / name)
    found = stats.compute(TensorStore(tmp_path), ["mxfp8"])
    assert len(found.tensors) == 2
    assert found.problems == []


def test_ranks_that_have_copies_of_a_part_or_parts_of_its_sum(tmp_path):
    x = values((64, 2, 4, 32), 0.3, GENERATOR)
    halves = [part.contiguous() for part in x.chunk(2, 2)]
    record = record_of("key", dims="s b g[tp:2] d")
    same_values(*whole_and_parts(tmp_path / "plain", record, x, [h for h in halves for _ in "ab"]))
    rest = [values(half.shape, 0.1, GENERATOR) for half in halves]
    record = record_of("grad_key", dims="s b g[tp:2] d | partial[tp:2]")
    sums = [(a.double() + b.double()).bfloat16() for a, b in zip(halves, rest, strict=True)]
    addends = [halves[0], rest[0], halves[1], rest[1]]
    one, several = whole_and_parts(tmp_path / "zigzag", record, torch.cat(sums, 2), addends)
    same_values(one, several)


def test_shards_that_do_not_fit_and_strange_dims_are_said(tmp_path):
    parts = [values((64, 2, 48), 1.0, GENERATOR), values((32, 2, 48), 1.0, GENERATOR)]
    write_shards(tmp_path / "plain", record_of("input", dims="s b h[tp]"), parts)
    found = stats.compute(TensorStore(tmp_path / "plain"), ["mxfp8"])
    assert len(found.tensors) == 0
    assert "do not fit together" in found.problems[0].why
    write_shards(tmp_path / "zigzag", record_of("input", dims="s b <h>"), parts)
    found = stats.compute(TensorStore(tmp_path / "zigzag"), ["mxfp8"])
    assert found.tensors["note"].str.contains("cannot be parsed").tolist() == [True, True]


def test_a_part_of_a_dump_has_the_numbers_that_it_has_among_the_whole(tmp_path):
    # Blocks of the output gradient end with each head, whose width is that of the value records.
    spread = torch.randn(64, 2, 48, generator=GENERATOR).mul(2).exp()
    grad = (values((64, 2, 48), 1.0, GENERATOR) * spread).bfloat16()
    head = values((64, 2, 1, 24), 1.0, GENERATOR)
    names = {"value": head, "grad_output": grad}
    for record, _, _ in records(run_id="r", quant_type="mxfp8", layers=1):
        if record.layer_type == "attention" and (x := names.get(record.tensor_name)) is not None:
            shape = list(x.shape)
            write_tensor(tmp_path, dataclasses.replace(record, shape=shape, global_shape=shape), x)
    store = TensorStore(tmp_path)
    whole = stats.compute(store, ["mxfp4"]).joined()
    chosen = store.select(tensor_name="grad_output")
    part = stats.compute(store, ["mxfp4"], select=chosen).joined()
    whole = whole[whole["tensor_name"] == "grad_output"]
    assert part["blocks"].tolist() == [64 * 2 * 2, 2 * 2 * 48]
    assert part["sqnr_db"].tolist() == whole["sqnr_db"].tolist()
