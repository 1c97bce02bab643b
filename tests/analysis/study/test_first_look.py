"""Test that the comparison of formats in quick_analysis.png has the numbers of the study."""

from __future__ import annotations

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.study import first_look as module
from megatron.analysis.study.candidates import candidates_of
from megatron.analysis.study.engine import study
from megatron.analysis.study.first_look import default_formats, first_look, part_of
from tests.analysis.fake_dump import RUNS, write_dump, write_two_types


def test_its_numbers_are_those_of_the_study(tmp_path):
    write_dump(tmp_path, layers=2)
    store = TensorStore(tmp_path)
    look = first_look(store, ["mxfp8", "mxfp4"])
    whole = study(store, candidates_of(["mxfp8", "mxfp4"], []), budget=False)
    columns = ["layer_idx", "module", "operation", "gemm", "format", "sqnr_db", "relative_error"]
    assert look.result.rows[columns].equals(whole.rows[columns])
    assert len(whole.rows) == 2 * 2 * 9
    assert look.own == "mxfp8"
    assert look.sample == "mxfp8 run 20250908_095200_abc123, iteration 1, micro-batch 0"
    ranking, own, weakest = look.sentences()
    look.result.left_out["passes with attention with dropout 0.1 (first: layer 0)"] = 4
    assert look.sentences()[-1] == "Left out: passes with attention with dropout 0.1: 4."
    assert ranking.startswith("The median SQNR of 18 GEMM results in 2 layers is ")
    assert own.startswith("In mxfp8, ")
    assert weakest.startswith("In mxfp4, ")


def test_it_takes_the_first_iteration_of_a_run_without_quantization(tmp_path):
    write_two_types(tmp_path)
    store = TensorStore(tmp_path)
    records, sample = part_of(store, 2)
    assert set(records["run_id"]) == {RUNS["bf16"]}
    assert set(records["iteration"]) == {min(store.records["iteration"])}
    assert sample.startswith(f"bf16 run {RUNS['bf16']}, iteration 1")
    assert first_look(store, ["mxfp8"]).own == ""


def test_a_large_model_is_sampled_by_layers_at_equal_distances(tmp_path, monkeypatch):
    write_dump(tmp_path, layers=5)
    store = TensorStore(tmp_path)
    everything, _ = part_of(store, 2)
    assert set(everything["layer_idx"]) == {0, 1, 2, 3, 4}
    linear, attention = 128 * 64 * 96, 2 * 2 * 2 * 64 * 64 * 32
    of_layer = 3 * (linear + attention)
    for most, layers in ((3 * of_layer, {0, 2, 4}), (1, {0})):
        monkeypatch.setattr(module, "MOST_PRODUCTS", 2 * most)
        part, sample = part_of(store, 2)
        assert set(part["layer_idx"]) == layers
        assert sample.endswith(f"{sorted(layers)[0] if len(layers) == 1 else '0, 2, 4'} of 5")


def test_a_dump_without_operands_says_so(tmp_path):
    for path in write_dump(tmp_path, layers=1, index=False):
        if "_weight" in path.name or "_query" in path.name:
            path.unlink()
    with pytest.raises(ValueError, match="no operands of a matmul were collected"):
        first_look(TensorStore(tmp_path), ["mxfp8"])


def test_operands_that_no_format_takes_are_a_reason(tmp_path):
    for path in write_dump(tmp_path, layers=1, index=False):
        payload = torch.load(path, weights_only=True)
        payload["tensor"] = payload["tensor"].double()
        payload["metadata"]["dtype"] = "float64"
        torch.save(payload, path)
    with pytest.raises(ValueError, match=r"no matmul can be studied: .*operands of float64"):
        first_look(TensorStore(tmp_path), ["mxfp8"])


def test_the_formats_of_the_dump_are_compared_too(tmp_path):
    write_dump(tmp_path, layers=1, quant_type="FA_linear_mxfp8:rceil")
    formats = default_formats(TensorStore(tmp_path))
    assert formats == ["mxfp8", "mxfp4", "nvfp4", "hifp8", "mxfp8:rceil"]
