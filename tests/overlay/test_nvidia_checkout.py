"""Test that NVIDIA's own pretrain_gpt.py, unmodified, trains under the launcher.

    MEGATRON_LM_CHECKOUT=/path/to/Megatron-LM bash tests/run_tests.sh --slow tests/overlay

The checkout must be at tag core_v0.16.1, and the packages that it needs, such as `six`, must be
installed.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron.analysis.store import TensorStore
from tests.overlay.nvidia_checkout import CHECKOUT, CPU, losses, pretrain, trained
from tests.subprocesses import run

LAYOUTS = {
    "one rank": (1, []),
    "TP=2": (2, ["--tensor-model-parallel-size", "2"]),
    "PP=2": (2, ["--pipeline-model-parallel-size", "2"]),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_CHECKOUT is not set"),
]


def files() -> set[Path]:
    return {path for path in Path(CHECKOUT).rglob("*") if "__pycache__" not in path.parts}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint in `folder`, by file and path in the file."""
    found: dict[str, torch.Tensor] = {}

    def visit(value, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in items:
                visit(part, f"{name}/{key}")

    for path in sorted(folder.glob("iter_*/*/*.pt")):
        visit(torch.load(path, weights_only=False), path.relative_to(folder).as_posix())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_flags_the_bits_are_those_of_the_plain_wheel(tmp_path, layout, monkeypatch):
    ranks, parallel = LAYOUTS[layout]
    monkeypatch.syspath_prepend(CHECKOUT)  # a checkpoint holds the arguments as pickled objects
    before, results = files(), {}
    for name, plain in (("plain", True), ("overlay", False)):
        save = ["--ckpt-format", "torch", "--save", tmp_path / name, "--save-interval", "3"]
        words = [*parallel, "--train-iters", "3", *save]
        results[name] = trained(*words, ranks=ranks, plain=plain)
    assert len(losses(results["plain"])) == 3
    assert losses(results["overlay"]) == losses(results["plain"])
    expected, present = tensors(tmp_path / "plain"), tensors(tmp_path / "overlay")
    assert len(expected) > 50
    assert expected.keys() == present.keys()
    different = [name for name in expected if not torch.equal(expected[name], present[name])]
    assert not different
    assert files() == before, "the launcher writes nothing into the checkout"
    assert "nothing is quantized or collected" in results["overlay"].stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_quantized_and_collected(tmp_path, layout):
    ranks, parallel = LAYOUTS[layout]
    if layout == "TP=2":  # only the norms of the overlay support it without Apex
        parallel = [*parallel, "--sequence-parallel"]
    checkpoint, dump = tmp_path / "checkpoint", tmp_path / "dump"
    flags = ["--quant", "mxfp8", "--save-tensors", dump, "--control-iter", "0"]
    flags += ["--collect-micro-batches", "0"]
    saving = ["--save", checkpoint, "--save-interval", "2", "--load", checkpoint]
    saving += ["--override-opt_param-scheduler"]  # the number of iterations changes
    first = trained(*parallel, "--train-iters", "2", *saving, flags=flags, ranks=ranks)
    second = trained(*parallel, "--train-iters", "4", *saving, flags=flags, ranks=ranks)
    assert len(losses(first) + losses(second)) == 4
    table = TensorStore(dump).select()
    assert sorted(table["iteration"].unique()) == [1, 2, 3, 4]
    assert set(table["quant_type"]) == {"mxfp8"}
    verified = run([sys.executable, "-m", "megatron.analysis", "verify", dump])
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "0 error(s)" in verified.stdout
    cards = [json.loads(path.read_text()) for path in dump.glob("run*.json")]
    assert sorted(card["arguments"]["train_iters"] for card in cards) == [2, 4]
    assert {card["status"] for card in cards} == {"finished"}


def test_a_pipeline_stage_may_have_no_selected_layer(tmp_path):
    flags = ["--quant", "mxfp8", "--save-tensors", tmp_path, "--collect-layers", "0"]
    parallel = ["--pipeline-model-parallel-size", "2", "--train-iters", "1"]
    trained(*parallel, flags=flags, ranks=2)
    assert set(TensorStore(tmp_path).select()["layer_idx"]) == {0}


def test_a_spawned_checkpoint_writer_has_the_same_set_up(tmp_path):
    words = ["--train-iters", "2", "--save", tmp_path, "--save-interval", "1", "--async-save"]
    result = trained(*words, "--use-persistent-ckpt-worker")
    assert "EOFError" not in result.stderr
    assert (tmp_path / "iter_0000002" / "metadata.json").is_file()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_all_flags_that_a_cpu_needs_are_named_at_once():
    result = pretrain("--train-iters", "1", cpu=())
    assert result.returncode == 1
    assert " ".join(CPU) in result.stderr
