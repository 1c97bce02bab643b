"""Makes tensors as small as those of tests go past the page cache, as large ones do."""

import mmap

from megatron.core import direct_file


def small(pages: int = 1) -> None:
    """From now on, in this process, a file is written in pieces of some pages."""
    direct_file.PIECE = pages * mmap.PAGESIZE
    direct_file._buffers = direct_file._Buffers()
