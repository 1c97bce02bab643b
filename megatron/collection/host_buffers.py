"""Hold tensors that wait to be written in host memory that is bounded and reused.

A tensor is copied before training changes it, and the copy lives until a writer thread has written
it to disk. All copies together stay below a limit. Freed memory is kept for the next tensor of the
same size, because a training run has few sizes. New memory costs a CPU more in page faults than the
copy itself, and new pinned memory costs milliseconds per buffer.

A buffer has exactly the bytes of its tensor, because `torch.save` writes a whole storage.
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
    _kind: tuple[int, bool]  #: bytes of the buffer, and whether it is pinned
    _copied: torch.cuda.Event | None  #: None if the copy is complete already
    scales: dict[str, "HostCopy"] = field(default_factory=dict)  #: scales of codes, by name

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor and its scales."""
        return self._kind[0] + sum(part.nbytes for part in self.scales.values())

    def wait(self) -> None:
        """Wait for the copy from the device; the tensor must not be read before."""
        for part in self.scales.values():
            part.wait()
        if self._copied is not None:
            # A new thread is on the first device, and would create a context there.
            with torch.cuda.device(self._copied.device):
                self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back; the tensor must not be read afterwards."""
        for part in self.scales.values():
            part.release()
        self._memory._take_back(self._buffer, self._kind)


class HostBuffers:
    """A bounded pool of host memory; see the module's docstring."""

    def __init__(self, limit: int):
        self.limit = limit  #: bytes
        self.used = 0  #: bytes of the copies that exist
        self.peak = 0  #: maximum of the bytes of copies and spare memory together
        self.changed = threading.Condition()  #: notified whenever a copy is released
        #: Spare buffers by size and whether pinned, least recently used first.
        self._spare: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._spare_bytes = 0

    def copy(self, tensor: torch.Tensor, make_room: Callable[[], bool]) -> HostCopy | None:
        """Return a contiguous copy of `tensor`; from a CUDA device it arrives later.

        The copy is queued in the caller's stream, so that later writes to the tensor come after it.

        Args:
            tensor: a tensor on any device, with any strides.
            make_room: called while memory is short; it waits for a release or forces one, and
                returns False to give up.

        Returns:
            The copy; None if there is no room.
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
            tensor.record_stream(stream)  # another stream may own its memory and reuse it
            copied = torch.cuda.Event(blocking=True)  # so that waiting does not keep a core busy
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
        """Free spare memory until at most `most` bytes are left."""
        pinned = False
        while self._spare_bytes > most:
            kind = next(iter(self._spare))
            if self._spare[kind]:
                self._spare[kind].pop()
                self._spare_bytes -= taken_by(*kind)
                pinned |= kind[1]
            else:
                del self._spare[kind]
        if pinned:  # torch caches pinned memory per size
            torch.accelerator.empty_host_cache()

    def _take_back(self, buffer: torch.Tensor, kind: tuple[int, bool]) -> None:
        with self.changed:
            self.used -= taken_by(*kind)
            self._spare[kind] = [*self._spare.pop(kind, ()), buffer]
            self._spare_bytes += taken_by(*kind)
            self.changed.notify_all()


def taken_by(size: int, pinned: bool) -> int:
    """Return the bytes that a buffer takes: torch allocates pinned memory in powers of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size
