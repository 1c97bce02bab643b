"""The amax histories of delayed scaling are part of a checkpoint, in every parallel layout."""

from pathlib import Path

import pytest
import torch

from megatron.core.low_precision.delayed_scaling import Operation
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.training.checkpointing import amax_histories
from megatron.training.checkpointing.index import read_index
from tests.training.runs import NO_DROPOUT, succeeded, train

SMALL = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2")
#: a history that four iterations of four micro-batches fill
FORMAT = ("--custom-quant-type", "linear_fp8_e4m3:delayed16")
TENSOR = ("--tensor-model-parallel-size", "2")
NO_HISTORIES = "> the checkpoint has no amax histories of delayed scaling"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Return a function that trains on one or two ranks to iteration 4, with exact steps."""
    steps = tmp_path_factory.mktemp("steps") / "steps.json"

    def start(*options, ranks=1):
        small = ("--data-path", corpus, *SMALL, *NO_DROPOUT, "--train-iters", "4")
        return succeeded(train(*small, *options, ranks=ranks, steps=steps))

    return start


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """Return an uninterrupted run on two ranks, and its checkpoints after two and four steps."""
    folder = tmp_path_factory.mktemp("delayed") / "ck"
    return run(*FORMAT, *TENSOR, "--save", folder, "--save-interval", "2", ranks=2), folder


def test_a_resumed_run_repeats_every_digit(run, whole):
    training, folder = whole
    resumed = run(*FORMAT, *TENSOR, "--load", folder, "--ckpt-step", "2", ranks=2)
    assert resumed.steps == training.steps[2:]
    assert NO_HISTORIES not in resumed.output


def test_histories_move_to_another_layout_and_are_left_out_without_delayed_scaling(run, whole):
    training, folder = whole
    moved = run(*FORMAT, "--load", folder, "--ckpt-step", "2")
    assert NO_HISTORIES not in moved.output
    for step, expected in zip(moved.steps, training.steps[2:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    changed = ("--load", folder, "--ckpt-step", "2", "--allow-changed-run")
    assert list(run("--custom-quant-type", "bf16", *changed).losses) == [3, 4]


def test_a_checkpoint_without_histories_starts_with_empty_ones(run_quickly, checkpoints):
    load = ("--load", checkpoints, "--ckpt-step", "2", "--allow-changed-run")
    started = succeeded(run_quickly(*FORMAT, *load))
    assert NO_HISTORIES in started.output
    assert list(started.losses) == [3, 4]
    assert NO_HISTORIES not in succeeded(run_quickly(*load)).output


def test_the_checkpoint_names_the_modules_of_the_whole_model(whole):
    stored = read_index(Path(whole[1], "iter_0000002")).state_dict_metadata
    names = {name for name in stored if name.startswith(amax_histories.PREFIX)}
    layer = f"{amax_histories.PREFIX}decoder.layers.0."
    assert names == {
        f"{layer}{part}.linear"
        for part in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    }
    assert {tuple(stored[name].size) for name in names} == {(6, 17)}


class Chunk:
    """A model chunk with the histories of one slot."""

    def __init__(self, length):
        from megatron.core.low_precision.delayed_scaling import DelayedScaling
        from megatron.fake_quant.matmul.delayed_scaling import AmaxHistories

        self.operation = Operation("m", "linear", False, {"wgrad_a": 0}, length)
        scaling = self.delayed_scaling = DelayedScaling.__new__(DelayedScaling)
        scaling.operations = [self.operation]
        scaling.forward, scaling.backward = AmaxHistories([]), AmaxHistories([length])


def test_a_history_may_become_longer_or_shorter():
    old = Chunk(4)
    for amax in (1.0, 9.0, 2.0, 3.0, 4.0):
        old.delayed_scaling.backward.record(0, torch.tensor([amax]), 4)
        old.delayed_scaling.backward.update()
    state = {"delayed_scaling.m.linear": old.delayed_scaling.state_of(old.operation)}
    for length, expected in ((4, [4, 3, 2, 9]), (2, [4, 3]), (6, [4, 3, 2, 9, 0, 0])):
        new = Chunk(length)
        amax_histories.restore([new], state)
        assert new.delayed_scaling.backward.history[0].tolist() == expected
        assert new.delayed_scaling.backward.amax.tolist() == [9]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_is_no_amax_is_refused(wrong):
    chunk, state = Chunk(4), torch.zeros(len(SLOTS), 5)
    state[5, 0] = wrong
    with pytest.raises(ValueError, match="holds a number that is not the largest magnitude"):
        amax_histories.restore([chunk], {"delayed_scaling.m.linear": state})
