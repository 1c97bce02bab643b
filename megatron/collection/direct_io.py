"""Write files with O_DIRECT, which bypasses the page cache, if the file system allows it.

A dump is read later, if at all. Writing through the page cache would take three times the CPU time
and evict the training data from memory. Gigabytes would also wait in the cache for the disk, and
the collection's limits do not cover that memory.
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

PIECE = 4 << 20  #: size of one write, in bytes; smaller files use the page cache
#: Alignment in bytes that O_DIRECT requires of addresses, offsets and lengths.
_UNIT = mmap.PAGESIZE
#: Error numbers with which a file system refuses O_DIRECT.
_REFUSALS = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)


class _Buffers(threading.local):
    """Thread-local write buffer; each thread uses its own buffer for all files that it writes."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned memory
        self.piece = np.frombuffer(memory, np.uint8)


_buffers = _Buffers()


class DirectFile:
    """Context manager for a new file that one thread writes from beginning to end.

    Data is buffered and written in chunks of `PIECE` bytes, without the page cache. The bytes after
    the last full page are written through the page cache. If the file system refuses O_DIRECT, the
    whole file is written through the page cache.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None):
        """Create the file, or truncate an existing one.

        Args:
            path: path of the file.
            progress: called whenever the file system has accepted data.

        Raises:
            OSError: if the file cannot be opened.
        """
        self._progress = progress
        self._piece = _buffers.piece
        self._filled = 0
        self._file = path.open("wb", buffering=0)
        self._direct = False
        self._may_be_direct = hasattr(os, "O_DIRECT")  # macOS has no O_DIRECT

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the buffered data, unless the `with` block raised an exception, and close the file.

        Raises:
            OSError: if writing fails.
        """
        with self._file:
            if kind is None:
                self._finish()

    def write(self, data: bytes) -> int:
        """Write all of `data` and return its length in bytes.

        Raises:
            OSError: if writing fails.
        """
        new = np.frombuffer(data, np.uint8)
        while new.size:
            part = new[: PIECE - self._filled]
            # NumPy releases the GIL while it copies; a memoryview does not.
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
        # Start writing the part in the page cache to disk now, while the next file is being filled.
        # Otherwise, Linux delays this by many seconds, and all later writes then wait for the disk.
        if hasattr(os, "posix_fadvise"):  # macOS has no posix_fadvise
            with contextlib.suppress(OSError):  # if this call fails, no data is lost
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _put(self, data: np.ndarray) -> None:
        """Write all of `data`; if O_DIRECT fails midway, continue through the page cache."""
        while data.size:
            try:
                taken = self._file.write(data.data)
            except OSError as error:
                if not self._direct or error.errno not in _REFUSALS:
                    raise
                self._never_direct()  # the file system requires a larger alignment
                continue
            self._progress()
            data = data[taken:]
            if taken % _UNIT:  # An almost full disk may accept only part of the data.
                self._never_direct()

    def _never_direct(self) -> None:
        self._may_be_direct = False
        self._use_cache(True)

    def _use_cache(self, use: bool) -> None:
        """Clear the file's O_DIRECT flag if `use` is True; otherwise try to set the flag."""
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
