"""A training iteration: the forward and backward passes and the optimizer step.

The learning rate scheduler advances after the optimizer step.
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
from megatron.training.arguments.validation import RunConfig
from megatron.training.data.batch import average_losses
from megatron.training.data.datasets import MicroBatches
from megatron.training.expert_losses import expert_losses


@dataclass
class TrainingState:
    """The pipeline stages of this rank, their optimizer, and the learning rate scheduler."""

    model: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration, which is the same on every rank."""

    losses: dict[str, float]  #: mean of each loss over the iteration
    skipped: bool  #: True if fp16 gradients overflowed, in which case the weights are not updated
    grad_norm: float | None
    num_zeros: int | None
    #: largest attention logit of the iteration; None without `--log-max-attention-logit`
    max_attention_logit: float | None = None


@contextlib.contextmanager
def whole_weights(model: list[torch.nn.Module], run: RunConfig) -> Iterator[None]:
    """Gather the updated weights of all data-parallel ranks before the `with` block runs.

    With `--overlap-param-gather`, the ranks of the distributed optimizer exchange their updated
    shards only in the next forward pass. A checkpoint written before that would contain outdated
    weights.
    """
    gathered_late = run.ddp.use_distributed_optimizer and run.ddp.overlap_param_gather
    for chunk in model if gathered_late else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in model if gathered_late else ():
        chunk.enable_forward_pre_hook()


def run_schedule(
    forward_step: Callable,
    batches: list[MicroBatches],
    model,
    run: RunConfig,
    *,
    forward_only: bool,
    micro_batches: int | None = None,
) -> dict[str, float]:
    """Run micro-batches of an iteration through the pipeline, and return the mean losses.

    micro_batches: number of micro-batches; by default all of the iteration.
    """
    args = run.args
    per_micro_batch = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(model) > 1 else batches[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=micro_batches or get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )
    return average_losses(per_micro_batch)


def train_step(
    forward_step: Callable, batches: list[MicroBatches], state: TrainingState, run: RunConfig
) -> StepResult:
    """Run one training iteration. If the gradients overflow, the weights are not updated."""
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    losses = run_schedule(forward_step, batches, state.model, run, forward_only=False)
    losses |= expert_losses(run.transformer)
    log_max_logit = run.transformer.log_max_attention_logit
    max_logit = take_max_attention_logit(state.model) if log_max_logit else None
    updated, grad_norm, num_zeros = state.optimizer.step()
    if updated:
        state.scheduler.step(
            increment=get_num_microbatches()
            * run.args.micro_batch_size
            * run.args.data_parallel_size
        )
    norm = None if grad_norm is None else float(grad_norm)
    return StepResult(losses, not updated, norm, num_zeros, max_attention_logit=max_logit)
