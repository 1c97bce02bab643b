"""Decompress gzip, bzip2 and zstandard files, which are recognized by their first bytes.

(This module must not be called compression, because Python 3.14's own gzip imports a module with
this name.)
"""

from __future__ import annotations

import bz2
import gzip
import io
from typing import Any, BinaryIO

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstandard"}


class _Zstandard(io.RawIOBase):
    """Zstandard stream that detects truncated files; the library's own reader does not."""

    def __init__(self, raw: BinaryIO) -> None:
        from megatron.optional_packages import check_installed

        check_installed("zstandard", f"{raw.name}, which is compressed by zstandard,")
        import zstandard

        self._frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._raw, self._frame = raw, self._frames.decompressobj()
        self._rest, self._fed, self._error = b"", False, zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if self._frame.eof:
                data = self._frame.unused_data or self._raw.read(1 << 16)
                self._frame, self._fed = self._frames.decompressobj(), False
            else:
                data = self._raw.read(1 << 16)
            if not data:
                if self._fed:
                    raise EOFError("the compressed file ends before its end mark")
                return 0
            self._fed = True
            try:
                self._rest = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def decompressed(raw: BinaryIO) -> BinaryIO:
    """Return a stream of a file's decompressed content, or `raw` if it is not compressed."""
    start = raw.read(4)
    raw.seek(0)
    kind = next((kind for magic, kind in COMPRESSIONS.items() if start.startswith(magic)), None)
    if kind == "gzip":
        return gzip.open(raw)
    if kind == "bzip2":
        return bz2.open(raw)
    if kind == "zstandard":
        return io.BufferedReader(_Zstandard(raw), 1 << 16)
    return raw
