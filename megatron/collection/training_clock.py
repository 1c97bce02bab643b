"""Where training is: iteration, micro-batch, recomputation.

Moved by `megatron.core.pipeline_parallel.schedules`, the only place that knows; read when a layer
asks what it is part of.
"""

from dataclasses import dataclass


@dataclass
class MicroBatch:
    """One forward pass of one micro-batch, and the backward pass that belongs to it."""

    iteration: int
    index: int
    sample_idx: int | None = None


class Clock:
    """The schedule's place. One a process."""

    def __init__(self) -> None:
        self.iteration = 0  #: of the step under way, as the log prints it; 0 before the first
        self.completed = 0  #: training iterations finished since the collection was configured
        self.micro_batch: MicroBatch | None = None  #: None outside of a training step
        self.recomputing = False  #: inside a backward step a forward pass is a recomputation
        self.seed: int | None = None  #: of the run, the same on all ranks; None before training

    def reset(self, iteration: int) -> None:
        """Start to count after `iteration` iterations of an earlier run."""
        self.iteration, self.completed, self.micro_batch = iteration, 0, None


clock = Clock()
