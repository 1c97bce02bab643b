"""Make writes of small tensors, as in the tests, bypass the page cache like those of large ones."""

import mmap

from megatron.collection import direct_io


def use_small_pieces(pages: int = 1) -> None:
    """Make this process write files in pieces of `pages` pages."""
    direct_io.PIECE = pages * mmap.PAGESIZE
    direct_io._buffers = direct_io._Buffers()
