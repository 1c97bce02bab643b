"""Divide the samples of a data set among the data-parallel ranks, in order.

The data set shuffles its own index, so reading it in order yields a random order. The position of a
run is therefore a single number: the count of samples consumed so far. A run can resume from this
count with any data-parallel size that divides the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SequentialSampler:
    """Sampler that yields the sample indices of one data-parallel rank, one micro-batch at a time.

    Samples at the end that do not fill one micro-batch per rank are dropped.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __len__(self) -> int:
        """Return the number of micro-batches that remain for each rank."""
        step = self.micro_batch_size * self.data_parallel_size
        return max(self.total_samples - self.consumed_samples, 0) // step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.data_parallel_size
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for batch in range(len(self)):
            start = first + batch * step
            yield list(range(start, start + self.micro_batch_size))
