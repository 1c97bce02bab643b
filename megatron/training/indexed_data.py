"""Check a `.bin/.idx` pair before anything is read through it.

An index holds the length of every sequence, the byte at which it begins, and the bounds of the
documents. Sequences follow one another without a gap, as megatron-core's writer makes them, so that
lengths, places and the size of the `.bin` file determine each other: a single wrong byte is found.

`read_header` costs one small read. `Index.problems` reads the whole index, 20 bytes per document,
in blocks: about 0.3 s of one core for 10 million documents, in 50 MB of memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.bounded_files import UnusableFileError, check_regular, open_regular
from megatron.training.errors import UserError

MARK = b"MMIDIDX\x00\x00"  #: begins every index of megatron-core
HEADER = struct.Struct("<9sQBQQ")  #: mark, version, code of the ids, sequences, document bounds
#: Integer types by megatron-core's codes; it has floats as well (6, 7), which are no token ids.
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
LENGTH = np.dtype("<i4")
PLACE = np.dtype("<i8")
BLOCK = 1 << 20  #: sequences at a time
ADVICE = "make the data again with script/data/preprocess.py, or get the files again"


@dataclass(frozen=True)
class Index:
    """The header of an index and the size of its token file."""

    prefix: str
    dtype: np.dtype  #: of the token ids
    sequences: int
    documents: int
    size: int  #: bytes of the `.idx` file
    bin_size: int  #: bytes of the `.bin` file

    @property
    def path(self) -> Path:
        """The `.idx` file."""
        return Path(f"{self.prefix}.idx")

    @property
    def tokens(self) -> int:
        """The number of tokens, by the size of the `.bin` file."""
        return self.bin_size // self.dtype.itemsize

    def problems(self, *, allow_empty: bool = False) -> list[str]:
        """Return what is wrong with the pair, in the order of the file; read everything once.

        Sequences without tokens and documents without sequences do training no harm, but
        script/data/preprocess.py writes none: `allow_empty` accepts them.
        """
        found = self._size_problems()
        if not found:
            least = 0 if allow_empty else 1
            found += self._sequence_problems(least)
            found += self._bound_problems(least)
        return found

    def _size_problems(self) -> list[str]:
        needed = HEADER.size + (LENGTH.itemsize + PLACE.itemsize) * self.sequences
        needed += PLACE.itemsize * (self.documents + 1)
        if self.size in (needed, needed + self.sequences):  # a byte each: modes of multimodal data
            return []
        return [f"the index has {self.size} bytes, but needs {needed}"]

    def _blocks(self, dtype: np.dtype, start: int, count: int) -> Iterator[np.ndarray]:
        with open_regular(self.path) as file:
            file.seek(start)
            while count:
                block = np.fromfile(file, dtype=dtype, count=min(count, BLOCK))
                if not len(block):
                    raise UnusableFileError(self.path, "became shorter while it was read")
                yield block
                count -= len(block)

    def _sequence_problems(self, least: int) -> list[str]:
        start = HEADER.size + LENGTH.itemsize * self.sequences
        lengths = self._blocks(LENGTH, HEADER.size, self.sequences)
        places = self._blocks(PLACE, start, self.sequences)
        tokens = number = 0
        for length, place in zip(lengths, places, strict=True):
            ends = tokens + np.cumsum(length, dtype=np.int64)
            wrong = np.flatnonzero(
                (length < least) | ((ends - length) * self.dtype.itemsize != place)
            )
            if len(wrong):
                at = int(wrong[0])
                expected = int(ends[at] - length[at]) * self.dtype.itemsize
                return [
                    f"sequence {number + at} has a wrong length or place: it has {length[at]} "
                    f"tokens from byte {place[at]} on, and the one before it ends at byte "
                    f"{expected}"
                ]
            tokens, number = int(ends[-1]), number + len(length)
        if (expected := tokens * self.dtype.itemsize) != self.bin_size:
            return [f"the .bin has {self.bin_size} bytes, but the index speaks of {expected}"]
        return []

    def _bound_problems(self, least: int) -> list[str]:
        start = HEADER.size + (LENGTH.itemsize + PLACE.itemsize) * self.sequences
        last = -least
        for number, block in enumerate(self._blocks(PLACE, start, self.documents + 1)):
            if (not number and block[0] != 0) or (np.diff(block, prepend=last) < least).any():
                return ["the bounds of the documents do not ascend from 0"]
            last = int(block[-1])
        if last != self.sequences:
            return [f"the documents end with sequence {last} of {self.sequences}"]
        return []


def read_header(prefix: str) -> Index:
    """Read the header of an index and the sizes of both files.

    Raises:
        FileNotFoundError: one of the two files is missing.
        UnusableFileError: one is no regular file, or the `.idx` file is no index of token ids.
    """
    path = Path(f"{prefix}.idx")
    bin_size = check_regular(f"{prefix}.bin").st_size
    with open_regular(path) as file:
        start = file.read(HEADER.size)
        size = path.stat().st_size
    if len(start) < HEADER.size:
        raise UnusableFileError(
            path, f"is no index: it has {len(start)} bytes, and a header has {HEADER.size}"
        )
    if not bin_size:
        raise UnusableFileError(f"{prefix}.bin", "is empty")
    mark, version, code, sequences, bounds = HEADER.unpack(start)
    if mark != MARK or version != 1:
        raise UnusableFileError(path, "is no index of megatron-core (version 1)")
    if code not in DTYPES:
        raise UnusableFileError(path, f"is no index of token ids (type {code})")
    if not 1 <= sequences <= size or not 2 <= bounds <= size:
        raise UnusableFileError(
            path, f"is no index: {sequences} sequences and {bounds} bounds in {size} bytes"
        )
    return Index(prefix, np.dtype(DTYPES[code]), sequences, bounds - 1, size, bin_size)


def check_header(prefix: str) -> Index:
    """Refuse a pair whose header or file size is wrong; both files must exist. One small read.

    Raises:
        UserError: names the file and what to do.
    """
    try:
        index = read_header(prefix)
    except (UnusableFileError, OSError) as error:
        raise UserError(f"data file {error}; {ADVICE}") from error
    if problem := index._size_problems():
        raise UserError(f"data file {index.path}: {problem[0]}; {ADVICE}")
    return index


def check_index(prefix: str) -> None:
    """Refuse a pair whose index is wrong anywhere. Reads the whole index.

    Raises:
        UserError: names the file, the first thing that is wrong, and what to do.
    """
    index = check_header(prefix)
    try:
        problems = index.problems(allow_empty=True)
    except (UnusableFileError, OSError) as error:
        raise UserError(f"data file {error}; {ADVICE}") from error
    if problems:
        raise UserError(f"data file {index.path}: {problems[0]}; {ADVICE}")
