"""Test that tensors left out on purpose are not missed, and that slices are not recomputed."""

import pytest

from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from tests.training.runs import train


@pytest.fixture
def dump(tmp_path):
    def collect(*options):
        done = train(
            *("--mock-data", "--custom-quant-type", "mxfp8", "--train-iters", "4"),
            *("--save-tensors", "--tensor-save-dir", tmp_path / "dump", *options),
        )
        assert done.status == 0, done.errors[-2000:]
        return tmp_path / "dump"

    return collect


def test_iterations_modules_and_tensors_that_were_not_chosen_are_not_missed(dump, capsys):
    folder = dump(
        *("--collect-start", "2", "--collect-every", "2", "--control-iter", "2"),
        *("--collect-modules", "linear_fc*", "--collect-tensors", "input", "weight", "output"),
    )
    store = TensorStore(folder)
    assert set(store.records["iteration"]) == {2, 4}
    [part] = store.run_card(store.records["run_id"].iloc[0])["quantization"]
    told = {entry["modules"].rpartition(".")[2]: entry for entry in part["operands"]}
    assert told["linear_fc1"]["slots"] == dict.fromkeys(SLOTS, "mxfp8")
    assert told["core_attention"]["operation"] == "pv", "the second of two"
    assert told["output_layer"]["slots"] == dict.fromkeys(SLOTS, "none")
    assert main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "--collect-start 2" in said
    assert "--collect-modules" in said
    assert "16 results of linear layers" in said, said  # 2 iterations, 4 layers, fc1 and fc2
    assert "ERROR" not in said

    lost = store.select(iteration=4, layer=1, tensor_name="output").iloc[0]
    (folder / lost["path"].rpartition("/")[2]).unlink()
    assert main(["verify", str(folder)]) == 1


def test_slices_are_read_and_counted_as_not_checked(dump, capsys):
    folder = dump("--collect-slice", "s=0:16")
    store = TensorStore(folder)
    part = store.select(layer=0, module="linear_fc1", tensor_name="input").iloc[0]
    assert store.load(part).shape[0] == 16
    assert part["slice"]["of"][0] == 64
    with pytest.raises(ValueError, match="only a part of it was collected"):
        store.load_global(part)
    assert main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "an operand or result of which only a slice was collected" in said
    assert "ERROR" not in said
