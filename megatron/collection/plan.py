"""What a selection comes to, before it is written.

The shapes that a matmul sees depend on the model, on every kind of parallelism, on recomputation
and, with experts, on the data. Nothing is therefore computed from formulas: one iteration runs
forward and backward with everything in place but a writer that counts, and what it would have
written is carried over to the other iterations. Only numbers in the metadata differ there, and with
them at times the size of a file: that is reckoned with, so that the plan is what a run writes, to
the byte. Experts get other tokens in every iteration: their sizes are those of the one that ran.
"""

import math
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import torch

from megatron.collection.collectives import from_all_ranks
from megatron.collection.collector import Collector
from megatron.collection.host_buffers import taken_by
from megatron.collection.record_writer import serialize
from megatron.collection.settings import Settings
from megatron.tensor_record import TensorRecord


@dataclass(frozen=True)
class _Uncopied:
    """Takes the place of a `HostCopy`."""

    tensor: torch.Tensor
    scales: dict[str, torch.Tensor]
    pinned: bool

    @property
    def held(self) -> int:
        """Bytes of host memory that a copy takes."""
        parts = (self.tensor, *self.scales.values())
        return sum(taken_by(part.nbytes, self.pinned) for part in parts)

    def release(self) -> None:
        """There is nothing to give back."""


#: A record, its tensors without values, and its file's size.
Counted = tuple[TensorRecord, _Uncopied, int]


class CountingWriter:
    """Takes the place of a `BackgroundWriter` and writes nothing: remembers what would be
    written.
    """

    error: str | None = None
    pending = 0
    pending_bytes = 0
    disk = None
    slow = None

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.counted: list[Counted] = []

    @property
    def written(self) -> tuple[int, int]:
        """Nothing."""
        return 0, 0

    def hold(
        self, tensor: torch.Tensor, scales: dict[str, torch.Tensor], evict: Callable[[], bool]
    ) -> _Uncopied:
        """Tensors of these shapes and types."""
        like = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in scales.items()}
        return _Uncopied(torch.empty(tensor.shape, dtype=tensor.dtype), like, tensor.is_cuda)

    def submit(self, copy: _Uncopied, record: TensorRecord) -> None:
        """Remember the record, the tensor's shape and type, and the size of its file."""
        size = serialize(copy.tensor, record, copy.scales)
        self.records += 1
        self.bytes += size
        scales = {name: x.to("meta") for name, x in copy.scales.items()}
        on_meta = replace(copy, tensor=copy.tensor.to("meta"), scales=scales)
        self.counted.append((record, on_meta, size))

    def fail(self, why: str) -> None:
        """There is nothing to fail."""

    def append(self, line: dict[str, Any]) -> None:
        """There is no index."""

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """There is no run card."""

    def begin_iteration(self) -> None:
        """Training waits for nothing."""

    def wait(self) -> None:
        """Nothing waits."""

    def drain(self, seconds: float = math.inf) -> bool:
        """Nothing waits."""
        return True

    def close(self) -> None:
        """There is nothing open."""


class Planner(Collector):
    """A saver that writes nothing, and that no limit, ring or file stops."""

    _writer: CountingWriter

    def __init__(
        self, settings: Settings, run_id: str, *, coordinates: Mapping[str, int] | None = None
    ):
        super().__init__(settings, run_id, writer=CountingWriter(), coordinates=coordinates)
        self._ring = self._flag = None
        self._budget.take = lambda size, fields: True

    @property
    def counted(self) -> list[Counted]:
        """What would have been written."""
        return self._writer.counted


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations of the plan, by position, in which this rank writes the same."""

    start: int
    stop: int
    tensors: Counter[tuple[int, str, str]]  #: of one iteration, by layer, layer type and name
    bytes: Counter[tuple[int, str, str]]
    held: int  #: bytes of host memory that one iteration takes, if nothing of it is written yet
    largest: int  #: bytes of host memory that one tensor takes at most


@dataclass(frozen=True)
class Share:
    """What one rank writes, and where."""

    rank: int
    segments: list[Segment]
    host: str
    free: int  #: bytes of the disk
    kept: int  #: of these, bytes that stay free


@dataclass(frozen=True)
class CollectionPlan:
    """What all ranks write."""

    iterations: Sequence[int]
    shares: list[Share]
    settings: Settings


def planned_iterations(settings: Settings, done: int, train_iters: int) -> list[int]:
    """Those that a run collects after `done`, up to its end."""
    left = settings.selection.iterations.after(done)
    most = settings.control_iter or train_iters
    if settings.ring is not None:  # the ones of one event
        most = settings.ring.iterations
    return list(islice(takewhile(lambda each: each <= train_iters, left), most))


def make_plan(
    planner: Planner, iterations: Sequence[int], samples: int, done: int
) -> CollectionPlan:
    """The plan of all ranks, on all of them; collective, after one iteration ran.

    Args:
        planner: of this rank.
        iterations: those to collect.
        samples: sequences an iteration.
        done: iterations done before, the data of whose next one ran.
    """
    folder = planner.settings.directory.absolute()
    folder = next(each for each in (folder, *folder.parents) if each.exists())
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
    """Runs of iterations whose numbers take the same space in the metadata of every tensor."""
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
    """Sizes of files whose records differ from counted ones in their numbers only."""

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
        """What the iteration at `start` writes, `passed` samples after the counted one."""
        tensors: Counter[tuple[int, str, str]] = Counter()
        size: Counter[tuple[int, str, str]] = Counter()
        for place, (counted, tensors_of, _) in enumerate(self._counted):
            sample = counted.sample_idx
            record = replace(
                counted,
                iteration=iteration,
                counter=start * len(self._counted) + place + 1,
                sample_idx=None if sample is None else sample + passed,
            )
            key = self._key(place, record)
            if key not in self._known:
                again = {
                    name: torch.empty_like(x, device="cpu") for name, x in tensors_of.scales.items()
                }
                tensor = torch.empty_like(tensors_of.tensor, device="cpu")
                self._known[key] = serialize(tensor, record, again)
            of = (record.layer_idx, record.layer_type, record.tensor_name)
            tensors[of] += 1
            size[of] += self._known[key]
        held = [uncopied.held for _, uncopied, _ in self._counted]
        return Segment(start, stop, tensors, size, sum(held), max(held, default=0))


def _width(number: int) -> int:
    """Bytes that pickle takes for a whole number."""
    if number < 1 << 8:
        return 1
    return 2 if number < 1 << 16 else 4 if number < 1 << 31 else 8
