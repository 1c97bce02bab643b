"""Log the formats of a model's matmuls, and modules that are neither quantized nor collected."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron.collection import session
from megatron.collection.training_clock import clock
from megatron.core import parallel_state
from megatron.core.low_precision import matmul_audit, run_request
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)


def sizes_of_parts() -> int:
    """Return the number of parts into which pipeline and expert parallelism divide a model."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    return pipeline * parallel_state.get_expert_model_parallel_world_size()


def announce(
    chunks: Sequence[torch.nn.Module],
    missed: Sequence[str],
    seq_length: int | None,
    *,
    evaluation: bool = False,
) -> None:
    """Log the formats of every matmul, the `missed` modules, and the collection's folder.

    Under the pipeline schedules, the run card gets the audit of all stages.

    Args:
        chunks: models or pipeline stages of this rank.
        missed: modules that are neither quantized nor collected.
        seq_length: number of tokens in a sequence; None in a loop without schedules.
        evaluation: whether the model runs in an evaluation and has not been trained.
    """
    audit = audit_of(chunks, seq_length or 1, alone=seq_length is None, evaluation=evaluation)
    if seq_length is not None:
        session.set_audit(audit)
    lines = []
    for part in audit:
        if len(audit) > 1:
            lines.append(f"from iteration {part['iteration']} on:")
        lines += [f"  {line}" for line in part["matmuls"]]
    if missed:
        lines.append(f"not quantized and not collected: {', '.join(missed)}")
    collector = session.current()
    if collector is not None and not evaluation:
        lines.append(f"tensors are saved to {collector.settings.directory}")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        models = " and ".join(type(chunk).__name__ for chunk in chunks)
        requested = run_request.description()
        # use the level WARNING, because Python shows it even if logging is not set up
        where = "the evaluation of" if evaluation else "the model"
        logger.warning("%s", "\n".join([f"{requested} in {where} {models}:", *lines]))


def audit_of(
    models: Sequence[torch.nn.Module], seq_length: int, *, alone: bool, evaluation: bool = False
) -> list[dict[str, Any]]:
    """Return the format audit for the run card, with one entry per period of the recipe.

    Args:
        models: models or pipeline stages of this rank.
        seq_length: number of tokens in a sequence.
        alone: whether to audit the modules of this rank only, without waiting for other ranks.
        evaluation: whether to return the formats of the current iteration only.
    """
    recipe = policy.current().recipe
    # Before an iteration begins, the clock still has the number of the previous iteration.
    first = clock.iteration + (clock.micro_batch is None)
    changes = [] if recipe is None else recipe.changes()
    audit = matmul_audit.matmuls if alone else matmul_audit.of_whole_model
    periods = [first, *(change for change in changes if change > first)]
    if evaluation:
        periods = [max(clock.iteration, 1)]
    return [
        matmul_audit.period_for_card(audit(models, seq_length, start), start) for start in periods
    ]
