"""Tests of parts of training that run within the process of the tests."""

import argparse
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.training import model
from megatron.training.arguments.schedule import Schedule, last_iteration, schedule_of
from megatron.training.checkpointing import files, optimizer_state
from megatron.training.data import paths
from megatron.training.data.datasets import split_sizes
from megatron.training.data.samplers import SequentialSampler
from megatron.training.errors import UserError
from megatron.training.evaluate import perplexity
from megatron.training.logging import LogInterval, TimeLeft, TrainingProgress
from megatron.training.train_step import StepResult


def sampler(**changes) -> SequentialSampler:
    values = {
        "total_samples": 20,
        "consumed_samples": 0,
        "micro_batch_size": 2,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
    }
    return SequentialSampler(**values | changes)


def test_samples_come_in_order():
    assert list(sampler(total_samples=7)) == [[0, 1], [2, 3], [4, 5]]


def test_a_resumed_run_goes_on_where_it_stopped():
    whole = list(sampler())
    assert list(sampler(consumed_samples=8)) == whole[4:]
    assert len(sampler(consumed_samples=8)) == 6
    assert list(sampler(consumed_samples=20)) == []


def test_data_parallel_ranks_share_the_samples_of_one():
    """The i-th micro-batches of all ranks, joined in order, are the samples that one rank reads."""
    ranks = [list(sampler(data_parallel_rank=r, data_parallel_size=2)) for r in range(2)]
    together = [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert together == list(sampler())


@pytest.mark.parametrize(
    ("flags", "progress", "sizes"),
    [
        ({}, (0, 0, 0), (20, 12)),
        ({}, (6, 12, 6), (20, 12)),  # resumed: as if it was never interrupted
        ({}, (6, 12, 8), (20, 14)),  # the checkpoint counts an evaluation at the end
        ({"train_iters": 6}, (6, 12, 6), (12, 8)),
        ({"train_iters": 6}, (6, 12, 8), (12, 10)),
        ({"eval_interval": 5}, (6, 12, 6), (20, 10)),
        ({"global_batch_size": 1}, (6, 12, 6), (16, 9)),
        ({"global_batch_size": 4}, (6, 12, 6), (40, 24)),
        ({"eval_iters": 0}, (6, 12, 6), (20, 0)),
        ({"train_iters": 4, "global_batch_size": 1}, (6, 12, 6), (4, 7)),
    ],
)
def test_a_resumed_run_has_samples_to_its_end(flags, progress, sizes):
    values = {
        **{"train_iters": 10, "train_samples": None, "global_batch_size": 2},
        **{"eval_iters": 1, "eval_interval": 2},
    }
    args = arguments(**values | flags)
    found = split_sizes(args, TrainingProgress(*progress))
    assert (found["train"], found["valid"]) == sizes


def test_the_shards_of_grouped_experts_are_marked():
    """megatron-core does not mark them if the weights are not initialized."""

    class GroupedMLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight1, self.weight2 = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))

    experts = GroupedMLP()
    tensor_parallel.set_tensor_model_parallel_attributes(experts.weight2, True, 1, 2)
    model._mark_shards(torch.nn.Sequential(experts))
    assert experts.weight1.tensor_model_parallel
    assert experts.weight1.partition_dim == 1
    assert experts.weight2.partition_dim == 1, "a mark stays as it is"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train_iters": 10}, Schedule(80, 0, 80, None)),
        ({"train_iters": 10, "lr_warmup_iters": 2}, Schedule(80, 16, 80, None)),
        ({"train_iters": 10, "lr_warmup_samples": 3}, Schedule(80, 3, 80, None)),
        ({"train_iters": 10, "lr_decay_iters": 5}, Schedule(80, 0, 40, None)),
        ({"train_iters": 10, "lr_warmup_fraction": 0.26}, Schedule(80, 20, 80, None)),
        ({"train_iters": 10, "lr_wsd_decay_iters": 3}, Schedule(80, 0, 80, 24)),
        # The decay ends at the last sample, even if it fills no iteration, as in Megatron-LM.
        ({"train_iters": 6, "train_samples": 50}, Schedule(50, 0, 50, None)),
        # three batches of 2, two of 4, one of 6 and four of 8
        (
            {"train_iters": 10, "rampup_batch_size": [2, 2, 18], "lr_warmup_iters": 5},
            Schedule(52, 14, 52, None),
        ),
    ],
)
def test_the_schedule_counts_samples(flags, expected):
    names = ("train_samples", "lr_decay_samples", "lr_decay_iters", "lr_wsd_decay_samples")
    values = dict.fromkeys((*names, "lr_wsd_decay_iters", "lr_warmup_fraction"))
    values |= {"rampup_batch_size": None, "lr_warmup_iters": 0, "lr_warmup_samples": 0}
    assert schedule_of(arguments(**values | {"global_batch_size": 8} | flags)) == expected


@pytest.mark.parametrize(
    ("samples", "batch", "progress", "last"),
    [
        (None, 8, (2, 16), 6),
        (48, 8, (0, 0), 6),
        (48, 8, (2, 16), 6),
        (48, 16, (2, 16), 4),  # not the iteration 48 / 16 = 3
        (48, 8, (1, 16), 5),
        (50, 8, (2, 16), 6),
        (48, 8, (9, 72), 9),
    ],
)
def test_training_ends_with_its_samples_also_with_another_batch_size(
    samples, batch, progress, last
):
    args = arguments(train_samples=samples, train_iters=6, global_batch_size=batch)
    assert last_iteration(args, *progress) == last


@pytest.mark.parametrize(
    ("values", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["0.3", "a", "7", "b"], ["a", "b"], [0.3, 7.0]),
        (["0.3 a 0.7 b"], ["a", "b"], [0.3, 0.7]),
        ([" 0.3\na\n0.7 b "], ["a", "b"], [0.3, 0.7]),
        (["my folder/a"], ["my folder/a"], None),
        (["0.3", "my folder/a", "7", "b"], ["my folder/a", "b"], [0.3, 7.0]),
        (["2024 data/a"], ["2024 data/a"], None),
        (["2024"], ["2024"], None),
    ],
)
def test_blends(tmp_path, monkeypatch, values, prefixes, weights):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024 data").mkdir()
    for name in ("2024 data/a.idx", "2024.idx"):
        (tmp_path / name).touch()
    assert paths.parse_blend(values) == (prefixes, weights)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["0.3", "a", "b"], "does not alternate"),
        (["-1", "a", "2", "b"], "make them positive"),
        (["0", "a", "2", "b"], "make them positive"),
        (["nan", "a", "2", "b"], "make them positive"),
        (["1", "a", "2", "a"], "names a twice; name it once, with the sum of the weights"),
        (["a", "b", "a"], "names a twice"),
    ],
)
def test_bad_blends_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        paths.parse_blend(values)


@pytest.mark.parametrize("text", ["969,30,1", "100", "99,1", "1/0.5/.5", "90, 5, 5"])
def test_a_split_is_of_one_to_three_shares(text):
    paths.check_split(text)


@pytest.mark.parametrize(
    "text", ["", "90,-5,5", "1,2,3,4", "0,0,0", "nan,1,1", "1e-1,1,1", "a,b,c", "90,5,", "90 5 5"]
)
def test_any_other_split_is_refused(text):
    with pytest.raises(UserError, match=r"does not state the shares .*; write it as in 969,30,1"):
        paths.check_split(text)


def test_perplexity_shows_a_loss_that_is_not_a_number():
    assert perplexity(2.0) == pytest.approx(math.e**2)
    assert perplexity(1e3) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


def test_a_loss_that_is_not_finite_shows_in_the_interval():
    interval = LogInterval()
    for loss in (1.0, math.nan, 3.0):
        interval.add(StepResult({"lm loss": loss}, skipped=False, grad_norm=1.0, num_zeros=None))
    assert (interval.iterations, interval.nan, interval.skipped) == (3, 1, 0)
    assert math.isnan(interval.mean_losses()["lm loss"])


def arguments(**values) -> argparse.Namespace:
    return argparse.Namespace(
        **{"load": None, "save": None, "ckpt_step": None, "finetune": False, "load_hf": None}
        | values
    )


def test_an_empty_folder_to_save_to_may_be_loaded(tmp_path, capsys):
    own = str(tmp_path / "new")
    assert files.folder_to_load(arguments(load=own, save=own)) is None
    assert "starting from scratch" in capsys.readouterr().out


def test_any_other_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint; name the folder"):
        files.folder_to_load(arguments(load=str(tmp_path)))
    (tmp_path / "iter_0000010").mkdir()
    with pytest.raises(UserError, match=r"name one of its checkpoints with --ckpt-step \(10\)"):
        files.folder_to_load(arguments(load=str(tmp_path), save=str(tmp_path)))
    (tmp_path / files.TRACKER).write_text("10")
    with pytest.raises(UserError, match="is not a complete torch_dist checkpoint"):
        files.folder_to_load(arguments(load=str(tmp_path)))
    (tmp_path / files.TRACKER).write_text("release")
    with pytest.raises(UserError, match="holds 'release', not an iteration"):
        files.folder_to_load(arguments(load=str(tmp_path)))


def test_a_checkpoint_is_replaced_only_by_a_complete_one(tmp_path):
    final, partial = tmp_path / "iter_0000010", tmp_path / "iter_0000010.partial"
    for folder in (final, partial):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    files.put_in_place(partial, final)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000010"]
    assert (final / "name").read_text() == "iter_0000010.partial"


def test_the_time_left_is_estimated_once_per_minute(monkeypatch):
    now = 100.0
    monkeypatch.setattr("megatron.training.logging.time.monotonic", lambda: now)
    estimate = TimeLeft()
    assert estimate.line(1, 10_000, 2.5) is None
    now = 160.0
    words = "> about 6:55:00 (hours:minutes:seconds) left for 9960 iterations"
    assert estimate.line(40, 10_000, 2.5) == words
    assert estimate.line(41, 10_000, 2.5) is None
    now = 300.0
    assert estimate.line(10_000, 10_000, 2.5) is None


def test_a_parameter_group_takes_the_schedule_of_its_group_in_a_checkpoint():
    """megatron-core 0.19 and later find the group of a checkpoint only with the same schedule."""

    def group(wd_mult: float, lr: float, **more):
        return {"wd_mult": wd_mult, "lr_mult": 1.0, "max_lr": lr, "min_lr": 0.0} | more

    saved = [group(1.0, 3e-3, start_wd=0.1), group(0.0, 3e-4)]
    for state in ({"param_groups": saved}, {"optimizer": {"param_groups": saved}}):
        ours = SimpleNamespace(param_groups=[group(0.0, 1.0), group(1.0, 1.0, eps=1e-8)])
        optimizer_state.match_groups(ours, state)
        assert ours.param_groups == [saved[1], saved[0] | {"eps": 1e-8}]
        optimizer_state.match_groups(SimpleNamespace(chained_optimizers=[ours]), state)

    parts = [SimpleNamespace(param_groups=[group(1.0, 1.0)]) for _ in range(2)]
    states = {n: {"param_groups": [group(1.0, float(n + 2))]} for n in range(2)}
    optimizer_state.match_groups(SimpleNamespace(chained_optimizers=parts), states)
    assert [part.param_groups[0]["max_lr"] for part in parts] == [2.0, 3.0]

    twice = SimpleNamespace(param_groups=[group(1.0, 1.0)])
    optimizer_state.match_groups(twice, {"param_groups": [group(1.0, 2.0), group(1.0, 3.0)]})
    assert twice.param_groups == [group(1.0, 1.0)], "megatron-core reports what does not fit"
