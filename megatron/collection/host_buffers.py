"""Host memory for tensors that wait to be written: bounded, and used again.

A tensor is copied before training changes it, and the copy lives until a writer thread has put it
on disk. All copies together stay below a limit. Memory that has become free is kept for the next
tensor of its size, and a training run has few sizes: new memory costs a CPU more in page faults
than the copy itself, and pinned memory costs milliseconds a buffer.

A buffer has exactly the bytes of its tensor, because `torch.save` writes the whole of a storage.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class HostCopy:
    """A tensor's own copy on the host, in memory of `HostBuffers`."""

    tensor: torch.Tensor
    _memory: "HostBuffers"
    _buffer: torch.Tensor
    _kind: tuple[int, bool]  #: its bytes, and whether it is pinned
    _copied: torch.cuda.Event | None  #: None: the copy is there already
    scales: dict[str, "HostCopy"] = field(default_factory=dict)  #: of codes, by name

    @property
    def nbytes(self) -> int:
        """Of the tensor and the scales."""
        return self._kind[0] + sum(part.nbytes for part in self.scales.values())

    def wait(self) -> None:
        """Until the device has delivered; the tensor must not be read before."""
        for part in self.scales.values():
            part.wait()
        if self._copied is not None:
            # A new thread stands on the first device, and would make itself a context there.
            with torch.cuda.device(self._copied.device):
                self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back; the tensor must not be read any more."""
        for part in self.scales.values():
            part.release()
        self._memory._take_back(self._buffer, self._kind)


class HostBuffers:
    """See the module's docstring."""

    def __init__(self, limit: int):
        self.limit = limit  #: bytes
        self.used = 0  #: by copies, now
        self.peak = 0  #: the most that copies and spare memory ever took
        self.changed = threading.Condition()  #: told whenever a copy is released
        #: By size and whether pinned; the sizes that were used longest ago first.
        self._spare: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._spare_bytes = 0

    def copy(self, tensor: torch.Tensor, make_room: Callable[[], bool]) -> HostCopy | None:
        """A copy of `tensor`, contiguous; of one on a CUDA device it arrives later.

        That copy is made in the stream of the caller, so that whatever overwrites the tensor next
        comes after it.

        Args:
            tensor: on any device, with any strides.
            make_room: called while memory is short; waits for a release or forces one. False ends
                the attempt.

        Returns:
            None where there is no room.
        """
        pinned = tensor.is_cuda
        kind = (tensor.numel() * tensor.element_size(), pinned)
        buffer = self._take(kind, make_room)
        if buffer is None:
            return None
        copy = buffer.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor.detach(), non_blocking=pinned)
        copied = None
        if pinned:
            stream = torch.cuda.current_stream(tensor.device)
            tensor.record_stream(stream)  # it may come from another, which would use it again
            copied = torch.cuda.Event(blocking=True)  # else who waits keeps a core busy
            copied.record(stream)
        return HostCopy(copy, self, buffer, kind, copied)

    def _take(self, kind: tuple[int, bool], make_room: Callable[[], bool]) -> torch.Tensor | None:
        taken = taken_by(*kind)
        if taken > self.limit:
            return None
        while True:
            with self.changed:
                buffer = self._reuse(kind)
                if buffer is None and self.used + taken <= self.limit:
                    self._shrink(self.limit - self.used - taken)
                    buffer = torch.empty(kind[0], dtype=torch.uint8, pin_memory=kind[1])
                if buffer is not None:
                    self.used += taken
                    self.peak = max(self.peak, self.used + self._spare_bytes)
                    return buffer
            if not make_room():
                return None

    def _reuse(self, kind: tuple[int, bool]) -> torch.Tensor | None:
        of_kind = self._spare.get(kind)
        if not of_kind:
            return None
        self._spare_bytes -= taken_by(*kind)
        return of_kind.pop()

    def _shrink(self, most: int) -> None:
        """Let go of spare memory down to `most` bytes."""
        pinned = False
        while self._spare_bytes > most:
            kind = next(iter(self._spare))
            if self._spare[kind]:
                self._spare[kind].pop()
                self._spare_bytes -= taken_by(*kind)
                pinned |= kind[1]
            else:
                del self._spare[kind]
        if pinned:  # torch keeps it, for tensors of that size alone
            torch.accelerator.empty_host_cache()

    def _take_back(self, buffer: torch.Tensor, kind: tuple[int, bool]) -> None:
        with self.changed:
            self.used -= taken_by(*kind)
            self._spare[kind] = [*self._spare.pop(kind, ()), buffer]
            self._spare_bytes += taken_by(*kind)
            self.changed.notify_all()


def taken_by(size: int, pinned: bool) -> int:
    """Bytes that a buffer takes: torch's allocator of pinned memory gives powers of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size
