"""Tests of `--log-max-attention-logit`, the maximum logit over all layers, heads and ranks."""

from pathlib import Path

import pytest
import torch

from tests.training.runs import DEEPSEEK, MODEL, MXFP8, NO_DROPOUT, succeeded, train, without_split

FLAG = "--log-max-attention-logit"
SHORT = (*NO_DROPOUT, "--mock-data", "--train-iters", "2")
SHORT_MODEL = without_split(MODEL)
TENSOR = ("--tensor-model-parallel-size", "2")
INTERLEAVED = (
    *("--pipeline-model-parallel-size", "2"),
    *("--num-layers-per-virtual-pipeline-stage", "1"),
)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")


def logged(*options, ranks: int = 1, model=SHORT_MODEL) -> dict[int, str]:
    """Return the maximum that the log line shows, by iteration."""
    done = succeeded(train(*SHORT, FLAG, *options, ranks=ranks, model=model))
    return {iteration: line["logit"] for iteration, line in done.lines.items()}


def visible_maximum(folder: Path, iteration: int) -> float:
    """Return the largest collected score on or below the diagonal."""
    largest, count = -torch.inf, 0
    for path in folder.rglob("*_attention_scores.pt"):
        file = torch.load(path, weights_only=True)
        if file["metadata"]["iteration"] == iteration:
            scores = file["tensor"]
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            largest, count = max(largest, scores[..., seen].max().item()), count + 1
    assert count == 16, "four layers and four micro-batches"
    return largest


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> dict[int, str]:
    return logged("--tensorboard-dir", tmp_path_factory.getbasetemp() / "logits")


@pytest.mark.parametrize(
    ("model", "options", "ranks"),
    [(SHORT_MODEL, (), 1), (SHORT_MODEL, INTERLEAVED, 2), (DEEPSEEK, MXFP8, 1)],
    ids=["llama", "pipeline", "mla-mxfp8"],
)
def test_it_is_the_maximum_of_the_collected_scores(tmp_path, model, options, ranks):
    model = without_split(model)
    collection = (
        *("--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", "1"),
        *("--collect-tensors", "attention_scores", "--collect-micro-batches", "4"),
    )
    logits = logged(*collection, *options, model=model, ranks=ranks)
    assert logits[1] == f"{visible_maximum(tmp_path, 1):.3f}"


def test_tensorboard_has_it_under_the_same_name(single, tmp_path_factory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path_factory.getbasetemp() / "logits"))
    events.Reload()
    points = events.Scalars("max_attention_logit")
    assert {point.step: f"{point.value:.3f}" for point in points} == single
    assert len(set(single.values())) == 2, "each iteration has its own"


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ((*FULL, "--recompute-num-layers", "1"), 1),
        (("--apply-query-key-layer-scaling",), 1),
        ((*TENSOR, "--sequence-parallel"), 2),
        (("--context-parallel-size", "2"), 2),
        ((), 2),
    ],
    ids=["recompute", "layer-scaling", "tensor", "context", "data"],
)
def test_it_is_the_same_in_every_layout(options, ranks, single):
    logits = logged(*options, ranks=ranks)
    assert float(logits[1]) == pytest.approx(float(single[1]), abs=2e-3)


def test_training_is_bit_for_bit_the_same(tmp_path):
    with_flag, without = (
        succeeded(train(*SHORT, *flag, model=SHORT_MODEL, steps=tmp_path / f"{len(flag)}.json"))
        for flag in ((FLAG,), ())
    )
    assert with_flag.steps == without.steps
    assert all(line["logit"] is None for line in without.lines.values())
