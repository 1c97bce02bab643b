"""Give CPU kernels access to the memory of tensors, and let them write to new memory quickly.

A large tensor often gets new memory from the operating system. A copy to this memory then spends
most of its time in the system, which maps and clears pages of 4 KiB one by one. With huge pages,
usually of 2 MiB, the whole copy takes a quarter of the time. By default, many Linux systems use
huge pages only for programs that request them ("madvise" in
`/sys/kernel/mm/transparent_hugepage/enabled`).

Huge pages have to be cleared, too, which takes half the time of such a copy. A process therefore
keeps the memory of some large tensors that were freed, and uses it for new ones, as torch's
allocator for CUDA does.
"""

import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
#: Stand-in for the size of huge pages where they cannot be requested; no tensor is that large.
_NONE = 1 << 62
#: Least size in bytes of a tensor whose memory is kept; the C library reuses smaller memory itself.
LEAST_KEPT = 1 << 24
MOST_KEPT = 1 << 27  #: largest number of bytes that a process keeps

Advise = Callable[[int, int], Any]


class _Memory:
    """Wrapper through which numpy reads the memory of a tensor without `Tensor.numpy`.

    After a call of `Tensor.numpy`, the tensor's storage can no longer be resized. Selective
    recomputation frees the memory of an activation by resizing its storage to zero.
    """

    def __init__(self, dense: Tensor) -> None:
        self.tensor = dense  # keeps the tensor's memory alive as long as the array exists
        self.__array_interface__ = {
            "data": (dense.data_ptr(), False),
            "shape": (dense.numel(),),
            "typestr": f"<i{dense.element_size()}",
            "version": 3,
        }


def bits_in_memory(dense: Tensor) -> NDArray[np.integer[Any]]:
    """Return the bits of a tensor's values in memory order, as integers that share its memory.

    The dimensions may be in any order in memory. There must be no gaps between the values, because
    the array would then leave out values. This is not checked.
    """
    array: NDArray[np.integer[Any]] = np.asarray(_Memory(dense))
    return array


class _Kept(NamedTuple):
    """Storage that keeps the memory of a tensor allocated, and the size of this memory."""

    storage: torch.UntypedStorage
    nbytes: int

    def is_free(self) -> bool:
        """Return whether nothing but this entry refers to the storage.

        Tensors, their views, numpy arrays and the autograd graph refer to the C++ object of a
        storage, and Python code may refer to the Python object, which counts once in C++.
        """
        from_python = sys.getrefcount(self.storage)  # one of them is the function's argument
        return from_python <= 2 and torch._C._storage_Use_Count(self.storage._cdata) == 1

    def is_usable(self) -> bool:
        """Return whether the memory was neither freed nor moved to memory shared by processes."""
        return self.storage.nbytes() == self.nbytes and not self.storage.is_shared()


class _KeptMemory:
    """Memory of large tensors, which new tensors reuse once nothing else refers to it."""

    def __init__(self) -> None:
        self._all: list[_Kept] = []
        #: Lock that is never waited for, because a fork could inherit it in the locked state.
        self._lock = threading.Lock()

    def tensor_like(self, x: Tensor) -> Tensor | None:
        """Return `torch.empty_like(x)` in free kept memory, or None if none is available."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._all = [kept for kept in self._all if kept.is_usable()]
            for kept in self._all:
                if kept.nbytes == x.nbytes and kept.is_free():
                    strides = torch.empty_like(x, device="meta").stride()
                    empty = torch.empty(0, dtype=x.dtype, device="cpu")
                    return empty.set_(kept.storage, 0, x.shape, strides)
        finally:
            self._lock.release()
        return None

    def add(self, tensor: Tensor) -> None:
        """Keep the memory of a new tensor.

        If more than `MOST_KEPT` bytes would be kept, forget free memory first, and then the oldest.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            # Remove entries from the front until the others and the new one fit into MOST_KEPT.
            order = sorted(self._all, key=_Kept.is_free, reverse=True)
            while order and sum(kept.nbytes for kept in order) + tensor.nbytes > MOST_KEPT:
                del order[0]
            order.append(_Kept(tensor.untyped_storage(), tensor.nbytes))
            self._all = order
        finally:
            self._lock.release()


_kept = _KeptMemory()


def empty_like(x: Tensor) -> Tensor:
    """Return a tensor like `torch.empty_like(x)`, in kept memory or else in new memory."""
    if not LEAST_KEPT <= x.nbytes <= MOST_KEPT:
        return in_new_memory(x)
    result = _kept.tensor_like(x)
    if result is None:
        result = in_new_memory(x)
        _kept.add(result)
    return result


def in_new_memory(x: Tensor) -> Tensor:
    """Return `torch.empty_like(x)`, and ask the operating system to use huge pages for it.

    Only huge pages that lie completely inside the tensor are requested, so the tensor takes as much
    memory as with small pages once all its values are written.
    """
    result = torch.empty_like(x)
    size, advise = _huge_pages()
    first = -(-result.data_ptr() // size) * size
    length = (result.data_ptr() + result.nbytes) // size * size - first
    if length > 0:
        # If the call fails, the tensor has small pages.
        advise(first, length)
    return result


@functools.cache
def _huge_pages() -> tuple[int, Advise]:
    """Return the size of huge pages, and a function that requests them for a range of memory."""
    try:
        if "[madvise]" in (_HUGE_PAGES / "enabled").read_text():
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            size = int((_HUGE_PAGES / "hpage_pmd_size").read_text())
            return size, lambda first, length: madvise(first, length, mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, AttributeError):  # not Linux, or a kernel without huge pages
        pass
    return _NONE, lambda first, length: None
