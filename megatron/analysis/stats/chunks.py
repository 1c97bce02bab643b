"""A tensor piece by piece, so that memory does not grow with it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

PIECE = 1 << 22  #: values at a time, or the fewest rows that hold whole blocks
LARGE = 1 << 26  #: bytes from which on a mapped tensor's pages are given back piece by piece
_MADV_DONTNEED = 4


def pieces(values: NDArray[Any], multiple: int) -> Iterator[NDArray[Any]]:
    """Parts of `[outer, rows, columns]` that begin with blocks of `multiple` rows."""
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
    """Let go of the memory of a contiguous piece of a mapped file: a later look reads it again."""
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
    """Whether memory at `address` belongs to a file (Linux: elsewhere the answer is no).

    Giving back memory that belongs to no file would lose what is in it.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(maxsplit=5)
        low, _, high = fields[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            # private and never written: w would not tell, torch maps for writing
            return len(fields) == 6 and fields[4] != "0" and fields[5].endswith(".pt")
    return False
