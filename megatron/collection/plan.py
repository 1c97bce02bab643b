"""Measure what a selection would write, before anything is written.

The shapes that a matmul sees depend on the model, on every kind of parallelism, on recomputation
and, with experts, on the data. The plan therefore uses no formulas: one iteration runs forward and
backward with a writer that only counts, and the result applies to the other iterations. In these,
only numbers in the metadata differ, which can change the size of a file. The plan accounts for
that, so it equals what a run writes, to the byte. Experts get different tokens in every iteration:
only the sizes of the iteration that ran are exact.
"""

import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import torch

from megatron.collection.background_writer import Writer
from megatron.collection.collectives import from_all_ranks
from megatron.collection.collector import Collector
from megatron.collection.host_buffers import taken_by
from megatron.collection.record_writer import serialize
from megatron.collection.settings import Settings
from megatron.tensor_record import TensorRecord


@dataclass(frozen=True)
class _Uncopied:
    """Stand-in for a `HostCopy` that holds shapes and types only."""

    tensor: torch.Tensor
    scales: dict[str, torch.Tensor]
    pinned: bool

    @property
    def held(self) -> int:
        """Return the bytes of host memory that a copy would take."""
        parts = (self.tensor, *self.scales.values())
        return sum(taken_by(part.nbytes, self.pinned) for part in parts)

    def release(self) -> None:
        """Do nothing: no memory is held."""


#: A record, its tensors without values, and the size of its file in bytes.
Counted = tuple[TensorRecord, _Uncopied, int]


class CountingWriter(Writer):
    """A writer that writes nothing, but records what would be written."""

    def __init__(self) -> None:
        self.counted: list[Counted] = []

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> _Uncopied:
        """Return tensors of the same shapes and types, without values."""
        like = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in scales.items()}
        return _Uncopied(torch.empty(tensor.shape, dtype=tensor.dtype), like, tensor.is_cuda)

    def submit(self, copy: _Uncopied, record: TensorRecord) -> None:
        """Add the record, the tensor's shape and type, and the size of its file to the list."""
        size = serialize(copy.tensor, record, copy.scales)
        scales = {name: x.to("meta") for name, x in copy.scales.items()}
        on_meta = replace(copy, tensor=copy.tensor.to("meta"), scales=scales)
        self.counted.append((record, on_meta, size))


class Planner(Collector):
    """A collector that writes nothing, without limits, ring or flag file."""

    def __init__(
        self, settings: Settings, run_id: str, *, coordinates: Mapping[str, int] | None = None
    ):
        writer = CountingWriter()
        self.counted = writer.counted  #: the tensors that would have been written
        super().__init__(settings, run_id, writer=writer, coordinates=coordinates, limited=False)


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations of the plan in which one rank writes the same number of bytes."""

    start: int  #: position of the first iteration in the plan
    stop: int  #: position after the last one
    tensors: Counter[tuple[int, str, str]]  #: per iteration, by layer, layer type and name
    bytes: Counter[tuple[int, str, str]]
    held: int  #: bytes of host memory of a whole iteration
    largest: int  #: bytes of host memory of the largest tensor


@dataclass(frozen=True)
class Share:
    """The part of a plan that one rank writes, and its disk."""

    rank: int
    segments: list[Segment]
    host: str
    free: int  #: free bytes of the disk
    kept: int  #: bytes of the disk that stay free


@dataclass(frozen=True)
class CollectionPlan:
    """The plan of all ranks."""

    iterations: Sequence[int]
    shares: list[Share]
    settings: Settings


def planned_iterations(settings: Settings, done: int, train_iters: int) -> list[int]:
    """Return the iterations that a run collects after `done` iterations, up to its end."""
    left = settings.selection.iterations.after(done)
    most = settings.control_iter or train_iters
    if settings.ring is not None:  # the iterations of one event
        most = settings.ring.iterations
    return list(islice(takewhile(lambda iteration: iteration <= train_iters, left), most))


def make_plan(
    planner: Planner, iterations: Sequence[int], samples: int, done: int
) -> CollectionPlan:
    """Return the plan of all ranks, on every rank; collective, after one iteration has run.

    Args:
        planner: the collector of this rank.
        iterations: the iterations to collect.
        samples: sequences per iteration.
        done: iterations done before the run; the data that ran is that of the next one.
    """
    folder = planner.settings.directory.absolute()
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    own = Share(
        planner.coordinates["world"],
        list(_segments(planner.counted, iterations, samples, done)),
        socket.gethostname(),
        shutil.disk_usage(folder).free,
        planner.settings.limits.kept_free(folder),
    )
    return CollectionPlan(iterations, from_all_ranks(own), planner.settings)


def _segments(
    counted: list[Counted],
    iterations: Sequence[int],
    samples: int,
    done: int,
) -> Iterator[Segment]:
    """Yield runs of iterations whose numbers take the same space in all metadata."""
    sizes = _Sizes(counted)
    first = [record.sample_idx for record, _, _ in counted if record.sample_idx is not None] or [0]
    begun, last = 0, None
    for position in range(len(iterations) + 1):
        signature = None
        if position < len(iterations):
            passed = (iterations[position] - done - 1) * samples
            counters = (position * len(counted) + 1, (position + 1) * len(counted))
            ends = (*counters, passed + min(first), passed + max(first))
            signature = tuple(map(_width, (*ends, iterations[position])))
            alike = signature[0] == signature[1] and signature[2] == signature[3]
            if alike and signature == last:
                continue
        if position > begun:
            passed = (iterations[begun] - done - 1) * samples
            yield sizes.segment(begun, position, iterations[begun], passed)
        begun, last = position, signature


class _Sizes:
    """Sizes of files whose records differ from the counted records only in numbers."""

    def __init__(self, counted: list[Counted]):
        self._counted = counted
        self._known: dict[tuple[int, ...], int] = {}
        for place, (record, _, size) in enumerate(counted):
            self._known[self._key(place, record)] = size

    @staticmethod
    def _key(place: int, record: TensorRecord) -> tuple[int, ...]:
        numbers = (record.iteration, record.counter, record.sample_idx)
        return (place, *(-1 if number is None else _width(number) for number in numbers))

    def segment(self, start: int, stop: int, iteration: int, passed: int) -> Segment:
        """Return the segment whose first iteration is at `start`.

        Its samples come `passed` samples after those of the counted iteration.
        """
        tensors: Counter[tuple[int, str, str]] = Counter()
        size: Counter[tuple[int, str, str]] = Counter()
        for place, (counted, uncopied, _) in enumerate(self._counted):
            sample = counted.sample_idx
            record = replace(
                counted,
                iteration=iteration,
                counter=start * len(self._counted) + place + 1,
                sample_idx=None if sample is None else sample + passed,
            )
            key = self._key(place, record)
            if key not in self._known:
                scales = {
                    name: torch.empty_like(x, device="cpu") for name, x in uncopied.scales.items()
                }
                tensor = torch.empty_like(uncopied.tensor, device="cpu")
                self._known[key] = serialize(tensor, record, scales)
            group = (record.layer_idx, record.layer_type, record.tensor_name)
            tensors[group] += 1
            size[group] += self._known[key]
        held = [uncopied.held for _, uncopied, _ in self._counted]
        return Segment(start, stop, tensors, size, sum(held), max(held, default=0))


def _width(number: int) -> int:
    """Return the bytes that pickle takes for a whole number."""
    if number < 1 << 8:
        return 1
    return 2 if number < 1 << 16 else 4 if number < 1 << 31 else 8
