"""Writes a file past the system's page cache, where the file system lets one (O_DIRECT, open(2)).

A dump is read later, if at all. Through the page cache it would take training's processors three
times as long, push the training data out of memory, and wait there for the disk by the gigabyte,
which no limit of ours bounds.
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

PIECE = 4 << 20  #: bytes of a write; a smaller file goes through the cache
_UNIT = mmap.PAGESIZE  #: what O_DIRECT wants addresses, offsets and lengths to be multiples of
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  #: of O_DIRECT, not of the file


class _Buffers(threading.local):
    """A thread's own piece of memory, used for all of its files."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins with a page
        self.piece = np.frombuffer(memory, np.uint8)


_buffers = _Buffers()


class DirectFile:
    """A new file, which its thread writes from the beginning to the end, in a `with` statement.

    Bytes are gathered in pieces. Of the last one, what is no whole page goes through the cache, as
    does all of a file whose file system refuses O_DIRECT.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None):
        """Make the file, or empty the one that is there; `progress` is called whenever the file
        system has taken something.

        Raises:
            OSError: the file system refused.
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
            OSError: the file system refused.
        """
        with self._file:
            if kind is None:
                self._finish()

    def write(self, data: bytes) -> int:
        """Take all of `data`.

        Raises:
            OSError: the file system refused.
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
        # What is in the cache goes to the disk now, while the next file is written: left to itself
        # Linux waits for many seconds, and then all wait for the disk.
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with contextlib.suppress(OSError):  # a file system that does not know it loses nothing
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _put(self, data: np.ndarray) -> None:
        """Write all of `data`, past the cache while that is on and possible."""
        while data.size:
            try:
                taken = self._file.write(data.data)
            except OSError as error:
                if not self._direct or error.errno not in _REFUSALS:
                    raise
                self._never_direct()  # it wants more than whole pages
                continue
            self._progress()
            data = data[taken:]
            if taken % _UNIT:  # a disk that is nearly full takes a part
                self._never_direct()

    def _never_direct(self) -> None:
        self._may_be_direct = False
        self._use_cache(True)

    def _use_cache(self, use: bool) -> None:
        """Switch O_DIRECT, where that changes something; a file system may refuse it."""
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
