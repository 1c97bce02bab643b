"""Determine how many tensors and bytes a run would collect, without writing anything.

The shapes of a matmul's tensors depend on the model, on every kind of parallelism, on recomputation
and, with experts, on the data. The plan therefore uses no formulas: one iteration runs forward and
backward with a writer that only counts, and its result is applied to the other iterations. The
files of two iterations differ only in the numbers in the metadata, which can change the size of a
file. The plan accounts for that, so its sizes match those of a run to the byte. There is one
exception: experts get different tokens in every iteration, so their sizes are exact only for the
iteration that ran.
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
    """Stand-in for a `HostCopy` that has the shapes and dtypes of the tensors, but no values."""

    tensor: torch.Tensor
    scales: dict[str, torch.Tensor]
    pinned: bool

    @property
    def held(self) -> int:
        """Host memory that a real copy of the tensors would take, in bytes."""
        parts = (self.tensor, *self.scales.values())
        return sum(taken_by(part.nbytes, self.pinned) for part in parts)

    def release(self) -> None:
        """Do nothing, because no memory is held."""


#: A tensor's record, the tensor and its scales as meta tensors, and the file size in bytes.
Counted = tuple[TensorRecord, _Uncopied, int]


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


class CountingWriter(Writer):
    """Writer that only records which files would be written."""

    def __init__(self) -> None:
        self.counted: list[Counted] = []

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> _Uncopied:
        """Return an uninitialized stand-in for a host copy, with the same shapes and dtypes."""
        like = {name: _on_host(x) for name, x in scales.items()}
        return _Uncopied(_on_host(tensor), like, tensor.is_cuda)

    def submit(self, copy: _Uncopied, record: TensorRecord) -> None:
        """Append the tuple (record, tensors on the meta device, file size) to `counted`."""
        size = serialize(copy.tensor, record, copy.scales)
        scales = {name: x.to("meta") for name, x in copy.scales.items()}
        on_meta = replace(copy, tensor=copy.tensor.to("meta"), scales=scales)
        self.counted.append((record, on_meta, size))


class Planner(Collector):
    """Collector that counts tensors instead of writing them.

    The limits, the ring buffer and the flag file do not apply.
    """

    def __init__(
        self, settings: Settings, run_id: str, *, coordinates: Mapping[str, int] | None = None
    ):
        writer = CountingWriter()
        self.counted = writer.counted  #: tensors that would be written
        super().__init__(settings, run_id, writer=writer, coordinates=coordinates, limited=False)


@dataclass(frozen=True)
class Segment:
    """Consecutive planned iterations, in each of which one rank writes the same number of bytes."""

    start: int  #: position of the segment's first iteration in the list of planned iterations
    stop: int  #: position after that of the segment's last iteration
    #: Number of tensors in each iteration, by layer number, layer type and tensor name.
    tensors: Counter[tuple[int, str, str]]
    bytes: Counter[tuple[int, str, str]]  #: total size of these tensors' files, in bytes
    held: int  #: host memory for all tensors of an iteration, in bytes
    largest: int  #: host memory for the largest tensor, in bytes


@dataclass(frozen=True)
class Share:
    """Tensors and bytes that one rank would write, and the free space on that rank's disk."""

    rank: int
    segments: list[Segment]
    host: str
    free: int  #: free disk space, in bytes
    kept: int  #: disk space that must stay free, in bytes


@dataclass(frozen=True)
class CollectionPlan:
    """Iterations that would be collected, and what each rank would write in them."""

    iterations: Sequence[int]
    shares: list[Share]
    settings: Settings


def planned_iterations(settings: Settings, done: int, train_iters: int) -> list[int]:
    """Return the iterations that a run collects from iteration `done` + 1 to its end.

    With a ring buffer, these are the iterations of one event.
    """
    left = settings.selection.iterations.after(done)
    most = settings.control_iter or train_iters
    if settings.ring is not None:  # plan for one event, such as a loss spike
        most = settings.ring.iterations
    return list(islice(takewhile(lambda iteration: iteration <= train_iters, left), most))


def make_plan(
    planner: Planner, iterations: Sequence[int], samples: int, done: int
) -> CollectionPlan:
    """Extrapolate the tensor sizes of one iteration to all planned ones; gather all ranks' plans.

    Must be called on all ranks, after `planner` has counted one iteration.

    Args:
        planner: collector of this rank.
        iterations: iterations to collect.
        samples: number of sequences per iteration.
        done: number of iterations completed before this run; the counted iteration is the one after
            them.
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
    """Yield segments: groups of consecutive iterations whose files have the same sizes."""
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
    """Cache of file sizes; they depend on how many bytes pickle uses for a record's integers."""

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
        """Return the segment with the planned iterations at positions `start` to `stop` - 1.

        Args:
            start: position of the first iteration.
            stop: position after the last iteration.
            iteration: number of the first iteration.
            passed: number of samples between the first iteration and the counted one.
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
    """Return the number of bytes in which pickle stores a nonnegative integer.

    8 stands for all integers from 2**31 on.
    """
    if number < 1 << 8:
        return 1
    return 2 if number < 1 << 16 else 4 if number < 1 << 31 else 8
