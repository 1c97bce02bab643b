"""Read a tensor in chunks, so that memory use does not grow with the size of the tensor."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

PIECE = 1 << 22  #: maximum number of values per chunk, unless one row of blocks has more
LARGE = 1 << 26  #: minimum size, in bytes, of memory-mapped tensors whose pages are released
_MADV_DONTNEED = 4


def pieces(values: NDArray[Any], multiple: int) -> Iterator[NDArray[Any]]:
    """Yield chunks of an array, each with shape `[outer, rows, columns]`.

    Args:
        multiple: number of rows per block. Each chunk starts at a multiple of this number, so that
            no block lies in two chunks.
    """
    outer, rows, columns = values.shape
    in_one = rows * columns
    if in_one <= PIECE:
        step = max(PIECE // max(in_one, 1), 1)
        yield from (values[first : first + step] for first in range(0, outer, step))
        return
    step = max(PIECE // columns // multiple, 1) * multiple
    for index in range(outer):
        for first in range(0, rows, step):
            yield values[index : index + 1, first : first + step]


def give_back(values: NDArray[Any], *, mapped: bool) -> None:
    """Release the memory of a contiguous chunk; a later access reads the mapped file again."""
    if not mapped or not values.size:
        return
    start = values.ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + values.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED
        )


def is_mapped(address: int) -> bool:
    """Return whether a memory address belongs to a mapped `.pt` file; always False outside Linux.

    Memory that is not mapped from a file must not be released, because its content would be lost.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(maxsplit=5)
        low, _, high = fields[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            # do not check whether the mapping is read-only: torch maps files as private and
            # writable, but does not write
            return len(fields) == 6 and fields[4] != "0" and fields[5].endswith(".pt")
    return False
