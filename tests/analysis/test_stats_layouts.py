"""Statistics of real dumps of two ranks are those of the logical tensors."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.analysis import stats
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
    # and in the order of the whole tensor's tokens and channels
    for place in (0, len(found.tensors) - 1):
        row = found.tensors.iloc[place]
        record = store.records[store.records["path"] == row["path"]].iloc[0]
        parts = store.load_global_all(record)
        x = parts[row["data_rank"] if len(parts) > 1 else 0].double().abs()
        arrays = found.arrays(place)
        matrix = x.reshape(len(arrays.token_amax), -1)
        np.testing.assert_array_equal(arrays.token_amax, matrix.amax(1))
        np.testing.assert_array_equal(arrays.channel_amax, matrix.amax(0))
