"""Results that were computed before: a table in one SQLite file, a row a tensor and format.

The key is what the result follows from: the files (path, size, time of the last change), how the
tensor is read, the format, and the sources of this package and of `fake_quant`. Rows are written as
results come, so that what was interrupted goes on from there. Rows hold arrays of numbers only;
nothing that is read can run code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sqlite3
import struct
import time
from collections.abc import Iterable
from dataclasses import astuple
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron import fake_quant
from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.logical import Part
from megatron.analysis.stats.moments import Moments
from megatron.analysis.stats.values import Values

NAME = "statistics.sqlite"
VALUES = "values"
_EVERY = 1.0  #: seconds between commits


@functools.cache
def code_version() -> str:
    """Of all that a result follows from besides the data."""
    folders = (Path(__file__).parent, Path(str(fake_quant.__file__)).parent)
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def key_of(part: Part) -> str:
    """Of a part's content. Its replicas belong to it: what is kept was measured when all of them
    could be read.

    Raises:
        OSError: a file is not there.
    """
    files = []
    for path in chain(part.paths, *part.replicas):
        stat = Path(path).stat()
        files.append((str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns))
    text = json.dumps([code_version(), files, astuple(part.layout)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Cache:
    """Results by key and name, in a folder.

    Raises:
        OSError, ValueError: the folder cannot be written, or the file in it is none of ours.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        try:
            self._base = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute(
                "CREATE TABLE IF NOT EXISTS results (key TEXT, name TEXT, content BLOB, "
                "PRIMARY KEY (key, name)) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise ValueError(
                f"{self.path} cannot be used as a cache ({error}); name another folder, or remove "
                "the file"
            ) from None
        self._committed = time.monotonic()

    def get(self, key: str) -> dict[str, bytes]:
        """All results of a part, by name."""
        rows = self._base.execute("SELECT name, content FROM results WHERE key = ?", (key,))
        return {name: bytes(content) for name, content in rows}

    def put(self, key: str, contents: Iterable[tuple[str, bytes]]) -> None:
        """Add results; those that are there are replaced."""
        rows = [(key, name, content) for name, content in contents]
        self._base.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", rows)
        if time.monotonic() - self._committed > _EVERY:
            self.commit()

    def commit(self) -> None:
        """Write what is in memory."""
        self._base.commit()
        self._committed = time.monotonic()

    def close(self) -> None:
        """Write, and let go of the file."""
        self._base.commit()
        self._base.close()


def pack(*arrays: NDArray[np.int64] | NDArray[np.float64]) -> bytes:
    """Arrays as bytes: only their numbers other than zero, where that takes less."""
    parts = [struct.pack("<I", len(arrays))]
    for array in arrays:
        flat = np.ascontiguousarray(array).ravel()
        places = np.flatnonzero(flat)
        sparse = 12 * len(places) < flat.nbytes
        shape = struct.pack(f"<B{array.ndim}q", array.ndim, *array.shape)
        kind = b"i" if flat.dtype == np.int64 else b"f"
        held = flat[places] if sparse else flat
        head = struct.pack("<Bq", sparse, len(held))
        parts += [kind, shape, head, places.astype("<u4").tobytes() if sparse else b""]
        parts.append(held.tobytes())
    return b"".join(parts)


def unpack(content: bytes) -> list[NDArray[np.int64] | NDArray[np.float64]]:
    """Undo `pack`."""
    (number,) = struct.unpack_from("<I", content)
    place, arrays = 4, []
    for _ in range(number):
        dtype = np.dtype(np.int64 if content[place : place + 1] == b"i" else np.float64)
        dims = content[place + 1]
        shape = struct.unpack_from(f"<{dims}q", content, place + 2)
        place += 2 + 8 * dims
        sparse, held = struct.unpack_from("<Bq", content, place)
        place += 9
        array = np.zeros(int(np.prod(shape, dtype=np.int64)), dtype)
        index: slice | NDArray[np.uint32] = slice(None)
        if sparse:
            index = np.frombuffer(content, "<u4", held, place)
            place += 4 * held
        array[index] = np.frombuffer(content, dtype, held, place)
        place += dtype.itemsize * held
        arrays.append(array.reshape(shape))
    return arrays


def pack_values(values: Values) -> bytes:
    """The statistics of a part's values as bytes."""
    numbers = np.array(astuple(values.moments), np.float64)
    counts = np.array(astuple(values.moments)[:5], np.int64)
    amax = values.token_amax, values.channel_amax
    zero = values.channel_zero.astype(np.int64)
    return pack(counts, numbers[5:], values.histogram.counts, *amax, zero)


def unpack_values(content: bytes) -> Values:
    """Undo `pack_values`."""
    counts, numbers, histogram, tokens, channels, zero = unpack(content)
    moments = Moments(*counts.tolist(), *numbers.tolist())
    of_channels = channels, zero.astype(np.bool_)
    return Values(moments, Histogram(histogram), tokens, *of_channels)  # type: ignore[arg-type]


def pack_errors(found: dict[str, Errors]) -> bytes:
    """Those of one format by axis, in the order of `plan.axes_of`."""
    return pack(*(array for errors in found.values() for array in (errors.ints, errors.floats)))


def unpack_errors(content: bytes, codes: int, axes: Iterable[str]) -> dict[str, Errors]:
    """Undo `pack_errors`."""
    arrays = iter(unpack(content))
    return {axis: Errors(codes, next(arrays), next(arrays)) for axis in axes}  # type: ignore[arg-type]
