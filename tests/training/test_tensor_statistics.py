"""Test `--tensor-statistics` in training runs, beside the tensors that the same run saves."""

import pytest
import torch

from megatron.analysis.statistics_history import read_iterations, read_statistics
from megatron.analysis.store import TensorStore
from tests.training.runs import MOCK_DATA, NO_DROPOUT, scalars, succeeded, train

SIZE = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2")


def test_the_statistics_are_those_of_the_saved_tensors_and_change_no_bit(run_quickly, tmp_path):
    quantized = ("--custom-quant-type", "mxfp4", "--train-iters", "4")
    plain = succeeded(run_quickly(*quantized))
    flags = ("--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", "0")
    board = ("--tensorboard-dir", tmp_path / "board")
    run = succeeded(run_quickly(*quantized, *flags, *board, "--tensor-statistics", "2"))
    assert run.losses == plain.losses
    assert f"> measuring all matmul operands, every 2 iterations, to {tmp_path}" in run.output
    table = read_statistics(tmp_path / "statistics")
    assert sorted(set(table.iteration)) == [2, 4]
    assert set(table.format) == {"mxfp4", "none"}, "the LM head is not quantized"
    assert len(table) == 2 * (4 * 6 + 2 * 6 + 3), "six operands per matmul, three of the LM head"
    assert read_iterations(tmp_path / "statistics").iteration.tolist() == [1, 2, 3, 4]
    store, tags = TensorStore(tmp_path), scalars(tmp_path / "board")
    chosen = table[(table.operation == "linear") & (table.layer_idx == 0)]
    for row in chosen.itertuples():
        record = store.select(
            iteration=row.iteration, module=row.module, tensor_name=row.tensor
        ).iloc[0]
        tensor = store.load(record)
        assert row.values == tensor.numel()
        assert row.amax == float(tensor.abs().max())
        assert row.rms == pytest.approx(float(tensor.double().square().mean().sqrt()), rel=1e-5)
        tag = f"amax/{row.module}/{row.operation}_{row.gemm}_{row.tensor}"
        assert tags[tag][row.iteration] == row.amax
        ratios = tags.get(tag.replace("amax", "gradient_to_noise", 1))
        assert (ratios is not None) == (row.tensor == "grad_output")
        if ratios is not None:
            expected = 10 ** (row.sqnr_db / 20)
            assert ratios[row.iteration] == pytest.approx(expected, rel=1e-4)


def test_an_unquantized_run_is_measured_without_saving_tensors(run_quickly, tmp_path):
    flags = ("--tensor-save-dir", tmp_path, "--tensor-statistics", "1", "--train-iters", "2")
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    layers = ("--recompute-num-layers", "1")
    succeeded(run_quickly(*flags, *recompute, *layers))
    table = read_statistics(tmp_path / "statistics")
    assert table.sqnr_db.isna().all()
    places = table[table.iteration == 1].groupby("module").tensor.agg(list).to_dict()
    assert sorted(places["decoder.layers.0.mlp.linear_fc1"]) == ["grad_output", "input", "weight"]
    attention = ["grad_output", "key", "query", "value"]
    assert sorted(places["decoder.layers.0.self_attention.core_attention"]) == attention
    assert sorted(tmp_path.iterdir()) == [tmp_path / "statistics"]


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_all_ranks_are_measured_and_joined_in_tensorboard(tmp_path, size):
    flags = ("--tensor-save-dir", tmp_path, "--tensor-statistics", "1", "--train-iters", "1")
    board = ("--tensorboard-dir", tmp_path / "board", "--custom-quant-type", "mxfp8")
    layout = (f"--{size}-model-parallel-size", "2", "--log-throughput")
    succeeded(train(*NO_DROPOUT, *SIZE, *flags, *board, *layout, ranks=2, model=MOCK_DATA))
    table = read_statistics(tmp_path / "statistics")
    assert set(table["rank"]) == {0, 1}
    fc2 = table[(table.layer_idx == 1) & table.module.str.endswith("linear_fc2")]
    rows = fc2[(fc2.gemm == "fprop") & (fc2.tensor == "input")]
    assert len(rows) == (2 if size == "tensor" else 1)
    tag = "amax/decoder.layers.1.mlp.linear_fc2/linear_fprop_input"
    tags = scalars(tmp_path / "board")
    assert tags[tag] == {1: rows.amax.max()}
    assert tags["throughput"][1] > 0
    assert torch.isfinite(torch.tensor(table.rms.to_numpy())).all()
