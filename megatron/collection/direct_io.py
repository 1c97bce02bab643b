"""Write a file past the system's page cache if the file system allows it (O_DIRECT, open(2)).

A dump is read later, if at all. Writing through the page cache would take three times the processor
time and push the training data out of memory. Gigabytes would also wait there for the disk, and no
limit of the collection bounds that memory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

PIECE = 4 << 20  #: bytes per write; a smaller file is written through the cache
_UNIT = mmap.PAGESIZE  #: bytes; O_DIRECT needs addresses, offsets and lengths in multiples of it
_REFUSALS = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)  #: errors of a refused O_DIRECT


class _Buffers(threading.local):
    """One buffer per thread, used for all of its files."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned
        self.piece = np.frombuffer(memory, np.uint8)


_buffers = _Buffers()


class DirectFile:
    """A new file that one thread writes from beginning to end, in a `with` statement.

    Bytes are gathered in pieces of `PIECE` bytes. The end of the last piece that fills no whole
    page is written through the cache. So is the whole file if the file system refuses O_DIRECT.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None):
        """Create or truncate the file.

        Args:
            path: path of the file.
            progress: called whenever the file system has accepted bytes.

        Raises:
            OSError: if the file system refuses.
        """
        self._progress = progress
        self._piece = _buffers.piece
        self._filled = 0
        self._file = path.open("wb", buffering=0)
        self._direct = False
        self._may_be_direct = hasattr(os, "O_DIRECT")  # not on macOS

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write what is left, unless there was an error, and close the file.

        Raises:
            OSError: if the file system refuses.
        """
        with self._file:
            if kind is None:
                self._finish()

    def write(self, data: bytes) -> int:
        """Take all of `data`.

        Raises:
            OSError: if the file system refuses.
        """
        new = np.frombuffer(data, np.uint8)
        while new.size:
            part = new[: PIECE - self._filled]
            # numpy, unlike a memoryview, lets other threads run while it copies.
            np.copyto(self._piece[self._filled : self._filled + part.size], part)
            self._filled += part.size
            new = new[part.size :]
            if self._filled == PIECE:
                self._use_cache(not self._may_be_direct)
                self._put(self._piece)
                self._filled = 0
        return len(data)

    def _finish(self) -> None:
        pages = self._filled - self._filled % _UNIT if self._direct else 0
        self._put(self._piece[:pages])
        self._use_cache(True)
        self._put(self._piece[pages : self._filled])
        # Write the cached part to disk now, while the next file is filled: on its own, Linux waits
        # for many seconds, and then everything waits for the disk.
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with contextlib.suppress(OSError):  # a file system without this call loses nothing
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _put(self, data: np.ndarray) -> None:
        """Write all of `data`, past the cache as long as that is possible."""
        while data.size:
            try:
                taken = self._file.write(data.data)
            except OSError as error:
                if not self._direct or error.errno not in _REFUSALS:
                    raise
                self._never_direct()  # it has stricter rules than whole pages
                continue
            self._progress()
            data = data[taken:]
            if taken % _UNIT:  # a disk that is nearly full accepts only a part
                self._never_direct()

    def _never_direct(self) -> None:
        self._may_be_direct = False
        self._use_cache(True)

    def _use_cache(self, use: bool) -> None:
        """Turn O_DIRECT off or on if needed; a file system may refuse it."""
        if self._direct != use:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags ^ os.O_DIRECT)
        except OSError as error:
            if self._direct or error.errno not in _REFUSALS:
                raise
            self._may_be_direct = False
        else:
            self._direct = not use
