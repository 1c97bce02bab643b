"""Evaluation on held-out data, and the log lines that report the losses."""

import math
from collections.abc import Callable

import torch

from megatron.training.arguments.validation import RunConfig
from megatron.training.data.datasets import MicroBatches
from megatron.training.printing import print_rank_last
from megatron.training.train_step import run_schedule, whole_weights


def evaluate(
    forward_step: Callable,
    batches: list[MicroBatches],
    model: list[torch.nn.Module],
    run: RunConfig,
) -> dict[str, float]:
    """Return the losses averaged over `--eval-iters` iterations.

    The model runs in evaluation mode, without dropout, and no gradients are computed.
    """
    for chunk in model:
        chunk.eval()
    totals: dict[str, float] = {}
    with torch.no_grad(), whole_weights(model, run):
        for _ in range(run.args.eval_iters):
            for name, loss in run_schedule(
                forward_step, batches, model, run, forward_only=True
            ).items():
                totals[name] = totals.get(name, 0.0) + loss
    for chunk in model:
        chunk.train()
    return {name: total / run.args.eval_iters for name, total in totals.items()}


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, limited to `exp(20)` as in Megatron-LM, or NaN if the loss is NaN."""
    return math.exp(min(20.0, loss)) if not math.isnan(loss) else loss


def print_evaluation(losses: dict[str, float], where: str) -> None:
    """Print the losses as Megatron-LM does: one line between two rows of dashes."""
    line = f" validation loss at {where} | " + "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
        for name, loss in losses.items()
    )
    rule = "-" * (len(line) + 1)
    print_rank_last(f"{rule}\n{line}\n{rule}")
