"""Hold copies of tensors in host memory until they are written; the memory is bounded and reused.

A tensor is copied before training changes it, and the copy exists until a writer thread has written
it to disk. The total size of the copies is limited. Released buffers are kept for later tensors of
the same size, because a training run has only a few different sizes. Using new memory causes page
faults, which take longer than the copy itself. Pinning new memory takes milliseconds per buffer.

A buffer is exactly as large as its tensor, because `torch.save` writes the whole storage.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class HostCopy:
    """Copy of a tensor in a host-memory buffer that belongs to a `HostBuffers` pool."""

    tensor: torch.Tensor
    _memory: "HostBuffers"
    _buffer: torch.Tensor
    _kind: tuple[int, bool]  #: size of the buffer in bytes, and whether it is pinned
    _copied: torch.cuda.Event | None  #: event that marks the end of the copy; None for CPU tensors
    scales: dict[str, "HostCopy"] = field(default_factory=dict)  #: copies of the scales, by name

    @property
    def nbytes(self) -> int:
        """Size of the tensor and its scales, in bytes."""
        return self._kind[0] + sum(part.nbytes for part in self.scales.values())

    def wait(self) -> None:
        """Wait until the copy from the device is complete; do not read the tensor before that."""
        for part in self.scales.values():
            part.wait()
        if self._copied is not None:
            # The current device of a new thread is device 0; synchronizing there would create
            # another CUDA context.
            with torch.cuda.device(self._copied.device):
                self._copied.synchronize()

    def release(self) -> None:
        """Return the memory to the pool; do not read the tensor afterward."""
        for part in self.scales.values():
            part.release()
        self._memory._take_back(self._buffer, self._kind)


class HostBuffers:
    """Bounded pool of host memory for copies of tensors."""

    def __init__(self, limit: int):
        self.limit = limit  #: maximum size of the pool, in bytes
        self.used = 0  #: size of the copies not yet released, in bytes
        self.peak = 0  #: maximum size so far of the copies and the spare buffers, in bytes
        self.changed = threading.Condition()  #: notified whenever a copy is released
        #: Spare buffers by (size, pinned), least recently used first.
        self._spare: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._spare_bytes = 0

    def copy(self, tensor: torch.Tensor, make_room: Callable[[], bool]) -> HostCopy | None:
        """Return a contiguous copy of `tensor`; a copy from a CUDA device is asynchronous.

        An asynchronous copy is queued on the current stream, so that later writes to the tensor
        happen after it. Call `HostCopy.wait` before reading it.

        Args:
            tensor: a tensor on any device, with any strides.
            make_room: called while memory is short; waits until memory is released, or releases
                some, and returns False to give up.

        Returns:
            The copy; None if there is no room for it.
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
            # Without this call, torch could reuse the memory of `tensor` during the copy.
            tensor.record_stream(stream)
            copied = torch.cuda.Event(blocking=True)  # waiting threads sleep instead of spinning
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
                    buffer = torch.empty(
                        kind[0], dtype=torch.uint8, device="cpu", pin_memory=kind[1]
                    )
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
        """Free spare buffers until the remaining ones take at most `most` bytes."""
        pinned = False
        while self._spare_bytes > most:
            kind = next(iter(self._spare))
            if self._spare[kind]:
                self._spare[kind].pop()
                self._spare_bytes -= taken_by(*kind)
                pinned |= kind[1]
            else:
                del self._spare[kind]
        if pinned:  # torch would otherwise keep freed pinned memory in its cache
            _empty_host_cache()

    def _take_back(self, buffer: torch.Tensor, kind: tuple[int, bool]) -> None:
        with self.changed:
            self.used -= taken_by(*kind)
            self._spare[kind] = [*self._spare.pop(kind, ()), buffer]
            self._spare_bytes += taken_by(*kind)
            self.changed.notify_all()


def _empty_host_cache() -> None:
    """Free the pinned memory in torch's cache."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # up to torch 2.11
        torch._C._host_emptyCache()


def taken_by(size: int, pinned: bool) -> int:
    """Return the number of bytes that the allocator takes for a buffer of `size` bytes.

    torch rounds the size of pinned memory up to a power of two.
    """
    return 1 << (size - 1).bit_length() if pinned and size else size
