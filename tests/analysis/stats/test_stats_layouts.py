"""Test that statistics of real dumps of two ranks are those of the logical tensors."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.dump.reassembly import Cut, parse_dims
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize


@pytest.mark.parametrize("layout", ["tp2sp-mxfp4", "cp2-mxfp8", "tp2", "dp2"])
def test_every_logical_tensor_has_the_statistics_of_its_values(dumps, layout):
    store = TensorStore(dumps / layout)
    found = stats.compute(store, ["hifp8"])
    assert found.problems == []
    assert set(found.tensors["note"]) == {""}
    assert len(found.tensors) < len(store) or layout == "dp2"
    errors = found.formats.set_index("tensor")["mse"]
    for place, row in found.tensors.iterrows():
        record = store.records[store.records["path"] == row["path"]].iloc[0]
        parts = store.load_global_all(record)
        x = parts[row["data_rank"] if len(parts) > 1 else 0]
        assert row["shape"] == tuple(x.shape)
        assert row["count"] == x.numel()
        assert row["amax"] == x.abs().max().item()
        assert row["rms"] == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-9)
        error = fake_quantize(x, "hifp8").double() - x.double()
        assert errors[place] == pytest.approx(error.square().mean().item(), rel=1e-9)
    # The arrays are in the order of the whole tensor's tokens and channels.
    for place in (0, len(found.tensors) - 1):
        row = found.tensors.iloc[place]
        record = store.records[store.records["path"] == row["path"]].iloc[0]
        parts = store.load_global_all(record)
        x = parts[row["data_rank"] if len(parts) > 1 else 0].double().abs()
        arrays = found.arrays(place)
        matrix = x.reshape(len(arrays.token_amax), -1)
        np.testing.assert_array_equal(arrays.token_amax, matrix.amax(1))
        np.testing.assert_array_equal(arrays.channel_amax, matrix.amax(0))


@pytest.mark.parametrize("layout", ["tp2sp-mxfp4", "cp2-mxfp8"])
def test_blocks_along_both_axes_are_those_of_each_ranks_own_operand(dumps, layout):
    """The reference quantizes the shards of the whole tensors one by one along both axes."""
    store = TensorStore(dumps / layout)
    found = stats.compute(store, ["mxfp4"])
    assert found.problems == []
    numbers = found.formats.set_index(["tensor", "axis"])
    joined = set()
    for place, row in found.tensors.iterrows():
        record = store.records[store.records["path"] == row["path"]].iloc[0]
        if row["layer_type"] != "linear" or "partial" in record["dims"]:
            continue  # test_logical covers heads and sums
        cuts = parse_dims(record["dims"])
        parts = store.load_global_all(record)
        whole = parts[row["data_rank"] if len(parts) > 1 else 0]
        shards = shards_of(whole, cuts, record)
        joined.add((row["tensor_name"], len(shards)))
        for axis, dim in (("row", -1), ("column", 0)):
            matrices = [shard.reshape(-1, shard.shape[-1]) for shard in shards]
            results = [fake_quantize(matrix, "mxfp4", dim) for matrix in matrices]
            pairs = list(zip(matrices, results, strict=True))
            noise = sum((y.double() - x.double()).square().sum().item() for x, y in pairs)
            lost = sum(int(((x != 0) & (y == 0)).sum()) for x, y in pairs)
            nonzero = sum(int((x != 0).sum()) for x in matrices)
            blocks = sum(-(-x.shape[dim] // 32) * x.shape[1 + dim] for x in matrices)
            of_axis = numbers.loc[place, axis]
            assert of_axis["mse"] == pytest.approx(noise / whole.numel(), rel=1e-9)
            assert of_axis["underflow"] == pytest.approx(lost / nonzero, rel=1e-12)
            assert of_axis["blocks"] == blocks
    assert {("input", 2), ("grad_output", 2)} <= joined
    assert {number for _, number in joined} == {1, 2}


def shards_of(whole: torch.Tensor, cuts: list[Cut], record: pd.Series) -> list[torch.Tensor]:
    """Return the parts of the two ranks, cut out of the whole tensor according to `dims`."""
    cuts = [cut for cut in cuts if record[f"{cut.group}_size"] > 1]
    if not cuts:
        return [whole]
    [cut] = cuts
    if not cut.zigzag:
        return [part.contiguous() for part in whole.chunk(2, cut.axis)]
    quarters = whole.chunk(4, cut.axis)
    return [torch.cat([quarters[r], quarters[3 - r]], cut.axis) for r in range(2)]
