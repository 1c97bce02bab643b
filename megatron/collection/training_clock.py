"""Track where training is: the iteration, the micro-batch, and whether a pass is a recomputation.

`megatron.core.pipeline_parallel.schedules` updates the clock, because only the schedule knows these
values. The layers read it in their forward pass.
"""

from dataclasses import dataclass


@dataclass
class MicroBatch:
    """The forward pass of one micro-batch, and its backward pass."""

    iteration: int
    index: int
    sample_idx: int | None = None


class Clock:
    """The position of the schedule, with one instance per process."""

    def __init__(self) -> None:
        self.iteration = 0  #: current iteration as in the log; 0 before the first
        self.completed = 0  #: training iterations finished since the collection was configured
        self.micro_batch: MicroBatch | None = None  #: None outside a training step
        self.recomputing = False  #: whether a forward pass is a recomputation
        self.seed: int | None = None  #: the run's seed, the same on all ranks; None before training

    def reset(self, iteration: int) -> None:
        """Start counting after `iteration` iterations of an earlier run."""
        self.iteration, self.completed, self.micro_batch = iteration, 0, None


clock = Clock()
