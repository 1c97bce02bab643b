"""Check the index of a `.bin/.idx` pair before tokens are read from the pair.

An index holds the length of every sequence, the byte offset at which it begins, and the bounds of
the documents. megatron-core's writer leaves no gaps between sequences. The lengths, the offsets and
the size of the `.bin` file therefore determine each other, and a single wrong byte is detected.

`read_header` takes one small read. `Index.problems` reads the whole index, which has 20 bytes per
document, in blocks. For 10 million documents this takes about 0.3 s on one core and 50 MB of
memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.bounded_files import UnusableFileError, check_regular, open_regular
from megatron.training.errors import UserError

MARK = b"MMIDIDX\x00\x00"  #: first bytes of every megatron-core index
#: fields of the header: `MARK`, version, dtype code, number of sequences, number of document bounds
HEADER = struct.Struct("<9sQBQQ")
#: Integer dtypes by megatron-core's dtype code; codes 6 and 7 are floats, hence not token ids.
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
LENGTH = np.dtype("<i4")
PLACE = np.dtype("<i8")
BLOCK = 1 << 20  #: number of sequences that are checked at a time
ADVICE = "make the data again with script/data/preprocess.py, or get the files again"


@dataclass(frozen=True)
class Index:
    """The header of an index, and the sizes of the `.idx` and `.bin` files."""

    prefix: str
    dtype: np.dtype  #: dtype of the token ids
    sequences: int
    documents: int
    size: int  #: size of the `.idx` file in bytes
    bin_size: int  #: size of the `.bin` file in bytes

    @property
    def path(self) -> Path:
        """Path of the `.idx` file."""
        return Path(f"{self.prefix}.idx")

    @property
    def tokens(self) -> int:
        """Number of tokens in the `.bin` file, computed from its size."""
        return self.bin_size // self.dtype.itemsize

    def problems(self, *, allow_empty: bool = False) -> list[str]:
        """Read the index once, and return the first error in each of its parts, in file order.

        With `allow_empty`, sequences without tokens and documents without sequences are accepted.
        They do not harm training, but script/data/preprocess.py never writes them.
        """
        problems = self._size_problems()
        if not problems:
            least = 0 if allow_empty else 1
            problems += self._sequence_problems(least)
            problems += self._bound_problems(least)
        return problems

    def _size_problems(self) -> list[str]:
        needed = HEADER.size + (LENGTH.itemsize + PLACE.itemsize) * self.sequences
        needed += PLACE.itemsize * (self.documents + 1)
        # The index of multimodal data has one more byte per sequence: the mode.
        if self.size in (needed, needed + self.sequences):
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
                    f"sequence {number + at} has a wrong length or position: it has {length[at]} "
                    f"tokens and begins at byte {place[at]}, but the one before it ends at byte "
                    f"{expected}"
                ]
            tokens, number = int(ends[-1]), number + len(length)
        if (expected := tokens * self.dtype.itemsize) != self.bin_size:
            return [f"the .bin has {self.bin_size} bytes, but the index requires {expected}"]
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
    """Return the header of an index, and the sizes of the `.idx` and `.bin` files.

    Raises:
        FileNotFoundError: if one of the two files is missing.
        UnusableFileError: if one of the two files is not a regular file, the `.bin` file is empty,
            or the `.idx` file is not a valid index.
    """
    path = Path(f"{prefix}.idx")
    bin_size = check_regular(f"{prefix}.bin").st_size
    with open_regular(path) as file:
        start = file.read(HEADER.size)
        size = path.stat().st_size
    if len(start) < HEADER.size:
        raise UnusableFileError(
            path, f"is not an index: it has {len(start)} bytes, but a header has {HEADER.size}"
        )
    if not bin_size:
        raise UnusableFileError(f"{prefix}.bin", "is empty")
    mark, version, code, sequences, bounds = HEADER.unpack(start)
    if mark != MARK or version != 1:
        raise UnusableFileError(path, "is not a megatron-core index (version 1)")
    if code not in DTYPES:
        raise UnusableFileError(path, f"is not an index of token ids (dtype code {code})")
    if not 1 <= sequences <= size or not 2 <= bounds <= size:
        raise UnusableFileError(
            path, f"is not an index: {sequences} sequences and {bounds} bounds in {size} bytes"
        )
    return Index(prefix, np.dtype(DTYPES[code]), sequences, bounds - 1, size, bin_size)


def check_header(prefix: str) -> Index:
    """Return the header of an index after checking the header and the size of the index.

    Both files of the pair must exist. The check takes one small read.

    Raises:
        UserError: if the check fails; the message names the file and the remedy.
    """
    try:
        index = read_header(prefix)
    except (UnusableFileError, OSError) as error:
        raise UserError(f"data file {error}; {ADVICE}") from error
    if problem := index._size_problems():
        raise UserError(f"data file {index.path}: {problem[0]}; {ADVICE}")
    return index


def check_index(prefix: str) -> None:
    """Check the whole index of a `.bin/.idx` pair for errors.

    Raises:
        UserError: if the index is wrong; the message names the file, the first error and the
            remedy.
    """
    index = check_header(prefix)
    try:
        problems = index.problems(allow_empty=True)
    except (UnusableFileError, OSError) as error:
        raise UserError(f"data file {error}; {ADVICE}") from error
    if problems:
        raise UserError(f"data file {index.path}: {problems[0]}; {ADVICE}")
