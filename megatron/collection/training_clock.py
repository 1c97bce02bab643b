"""Track the current iteration and micro-batch, and whether activations are being recomputed.

Only the training loop has these values, so the pipeline schedules of megatron-core update the
clock. In a loop without these schedules, `megatron.core.tensor_saver.training_iteration` updates
it. The layers read the clock in their forward pass.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class MicroBatch:
    """Micro-batch that the model is processing, in the forward or backward pass."""

    iteration: int  #: number of the iteration, as in the log
    index: int  #: index of the micro-batch in the iteration, from 0
    sample_idx: int | None = None  #: index of the micro-batch's first sample; None if unknown
    #: Layers that have been collected in this micro-batch, apart from recomputations.
    collected: set[Any] = field(default_factory=set, compare=False, repr=False)


class Clock:
    """Current position in the training schedule; each process has one instance."""

    def __init__(self) -> None:
        self.iteration = 0  #: number of the current iteration, as in the log; 0 before the first
        self.completed = 0  #: number of iterations completed since the collection was configured
        self.micro_batches = 0  #: number of micro-batches that the current iteration has begun
        self._micro_batch: MicroBatch | None = None
        #: True in a `training_iteration` while no forward pass of a whole model runs.
        self.between_passes = False
        self.recomputing = False  #: True if the current forward pass is a recomputation
        self.seed: int | None = None  #: seed of the run, equal on all ranks; None before training
        self.scheduled = False  #: True if a pipeline schedule runs, in training or evaluation

    @property
    def micro_batch(self) -> MicroBatch | None:
        """Current micro-batch; None outside a training step and in an evaluation.

        In `training_iteration`, a forward pass without gradients is an evaluation, unless it is a
        part of a pass that trains, as with activation checkpointing.
        """
        if self.between_passes and not torch.is_grad_enabled() and not _in_backward():
            return None
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, value: MicroBatch | None) -> None:
        self._micro_batch = value
        if value is not None:
            self.micro_batches = max(self.micro_batches, value.index + 1)

    @property
    def evaluating(self) -> bool:
        """True if a pipeline schedule runs forward passes only."""
        return self.scheduled and self.micro_batch is None

    def reset(self, iteration: int) -> None:
        """Reset the clock for a run that continues after iteration `iteration`."""
        self.iteration, self.completed, self.micro_batch = iteration, 0, None


def _in_backward() -> bool:
    """Return whether a backward pass runs in this thread; False in code that torch compiles."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


clock = Clock()


def need_clock(request: str, *, training: bool) -> None:
    """Refuse a training step in which nothing updates the clock. Evaluation needs no clock.

    Call this function only if `clock.micro_batch` is None.

    Args:
        request: setting that needs the clock, for the message.
        training: whether the module that runs is in training mode.

    Raises:
        ValueError: if the module trains.
    """
    if training and not clock.evaluating and torch.is_grad_enabled():
        raise ValueError(
            f"{request} needs the number of the iteration, and this training step runs outside of "
            "megatron-core's pipeline schedules; write `with "
            "megatron.core.tensor_saver.training_iteration(n):` around the forward and backward "
            "passes of iteration n, which counts from 1, or evaluate under torch.no_grad()"
        )
