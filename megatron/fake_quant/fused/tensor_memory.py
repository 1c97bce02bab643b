"""Give CPU kernels access to the memory of tensors, and let them write to new memory quickly.

A large tensor often gets new memory from the operating system. Most of the time of a copy to it
then goes to the system, which maps and clears pages of 4 KiB one by one. With huge pages, usually
of 2 MiB, the whole copy takes a quarter of the time. By default, many Linux systems use huge pages
only for programs that ask for them ("madvise" in `/sys/kernel/mm/transparent_hugepage/enabled`).
"""

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
#: Size of huge pages, in bytes, on systems where a program cannot ask for them.
_NONE = 1 << 62

Advise = Callable[[int, int], Any]


class _Memory:
    """Wrapper through which numpy reads the memory of a tensor without `Tensor.numpy`.

    `Tensor.numpy` would forbid to resize the tensor's storage from then on. Selective recomputation
    frees the memory of an activation by resizing its storage to zero.
    """

    def __init__(self, flat: Tensor) -> None:
        self.tensor = flat  # keeps the tensor's memory alive as long as the array exists
        self.__array_interface__ = {
            "data": (flat.data_ptr(), False),
            "shape": (flat.numel(),),
            "typestr": f"<i{flat.element_size()}",
            "version": 3,
        }


def bits_in_memory(flat: Tensor) -> NDArray[np.integer[Any]]:
    """Return the bits of the values of a contiguous vector, as integers that share its memory."""
    array: NDArray[np.integer[Any]] = np.asarray(_Memory(flat))
    return array


def empty_like(x: Tensor) -> Tensor:
    """Return `torch.empty_like(x)`, and ask the operating system to use huge pages for it.

    Only huge pages that lie completely inside the tensor are asked for, so it takes as much memory
    as with small pages once all its values are written.
    """
    result = torch.empty_like(x)
    size, advise = _huge_pages()
    first = -(-result.data_ptr() // size) * size
    length = (result.data_ptr() + result.nbytes) // size * size - first
    if length > 0:
        # On an error, the tensor has small pages.
        advise(first, length)
    return result


@functools.cache
def _huge_pages() -> tuple[int, Advise]:
    """Return the size of huge pages, and a function that asks for them in a range of memory."""
    try:
        if "[madvise]" in (_HUGE_PAGES / "enabled").read_text():
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            size = int((_HUGE_PAGES / "hpage_pmd_size").read_text())
            return size, lambda first, length: madvise(first, length, mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, AttributeError):  # not Linux, or a kernel without huge pages
        pass
    return _NONE, lambda first, length: None
