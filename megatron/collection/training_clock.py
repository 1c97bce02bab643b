"""Track the current iteration and micro-batch, and whether activations are being recomputed.

Only the pipeline schedule knows these values, so `megatron.core.pipeline_parallel.schedules`
updates the clock. The layers read it in their forward pass.
"""

from dataclasses import dataclass


@dataclass
class MicroBatch:
    """Micro-batch that the model is processing, in the forward or backward pass."""

    iteration: int  #: number of the iteration, as in the log
    index: int  #: index of the micro-batch in the iteration, from 0
    sample_idx: int | None = None  #: index of the micro-batch's first sample; None if unknown


class Clock:
    """Current position in the training schedule; each process has one instance."""

    def __init__(self) -> None:
        self.iteration = 0  #: number of the current iteration, as in the log; 0 before the first
        self.completed = 0  #: number of iterations completed since the collection was configured
        #: Current micro-batch; None outside a training step.
        self.micro_batch: MicroBatch | None = None
        self.recomputing = False  #: whether the current forward pass is a recomputation
        self.seed: int | None = None  #: seed of the run, equal on all ranks; None before training

    def reset(self, iteration: int) -> None:
        """Reset the clock for a run that continues after iteration `iteration`."""
        self.iteration, self.completed, self.micro_batch = iteration, 0, None


clock = Clock()
