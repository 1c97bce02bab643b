"""Makes tensors as small as those of tests go past the page cache, as large ones do."""

import mmap

from megatron.collection import direct_io


def small(pages: int = 1) -> None:
    """From now on, in this process, a file is written in pieces of some pages."""
    direct_io.PIECE = pages * mmap.PAGESIZE
    direct_io._buffers = direct_io._Buffers()
