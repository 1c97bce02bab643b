"""One training iteration: forward and backward over the micro-batches, gradient reduction,
optimizer, schedule.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.attention_logits import take_max_attention_logit
from megatron.training.arguments.validation import Run
from megatron.training.data.batch import average_losses
from megatron.training.data.datasets import MicroBatches
from megatron.training.expert_losses import expert_losses


@dataclass
class Trained:
    """What this rank trains: its pipeline stages, their optimizer and its schedule."""

    model: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


@dataclass(frozen=True)
class Step:
    """What one iteration came to; the same on every rank."""

    losses: dict[str, float]
    skipped: bool  #: the gradients overflowed (fp16): the weights were left as they were
    grad_norm: float | None
    num_zeros: int | None
    max_attention_logit: float | None = None  #: with --log-max-attention-logit


@contextlib.contextmanager
def whole_weights(model: list[torch.nn.Module], run: Run) -> Iterator[None]:
    """Every rank has all of its stages' new weights within the block.

    With --overlap-param-gather the distributed optimizer's ranks exchange them as late as the next
    forward pass; a checkpoint written before that would hold old parts.
    """
    late = run.ddp.use_distributed_optimizer and run.ddp.overlap_param_gather
    for chunk in model if late else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in model if late else ():
        chunk.enable_forward_pre_hook()


def run_schedule(
    forward_step: Callable, batches: list[MicroBatches], model, run: Run, *, forward_only: bool
) -> dict[str, float]:
    """Run every micro-batch of an iteration through the pipeline; returns the mean losses."""
    args = run.args
    per_micro_batch = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(model) > 1 else batches[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )
    return average_losses(per_micro_batch)


def train_step(
    forward_step: Callable, batches: list[MicroBatches], trained: Trained, run: Run
) -> Step:
    """One iteration. The weights stay as they were if the gradients overflowed."""
    for chunk in trained.model:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    losses = run_schedule(forward_step, batches, trained.model, run, forward_only=False)
    losses |= expert_losses(run.transformer)
    logged = run.transformer.log_max_attention_logit
    largest = take_max_attention_logit(trained.model) if logged else None
    updated, grad_norm, num_zeros = trained.optimizer.step()
    if updated:
        trained.scheduler.step(
            increment=get_num_microbatches()
            * run.args.micro_batch_size
            * run.args.data_parallel_size
        )
    norm = None if grad_norm is None else float(grad_norm)
    return Step(losses, not updated, norm, num_zeros, max_attention_logit=largest)
