"""Write the `.idx` file of an indexed dataset of megatron-core, using little memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH_BYTES = 4
INDEX_BLOCK = 1 << 20  #: number of documents that are indexed at a time


def write_index(path: Path, lengths: Path, *, documents: int, dtype: type) -> None:
    """Write the index of a dataset in which every document is one sequence."""
    import numpy as np

    from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

    def blocks() -> Iterator[Any]:
        with lengths.open("rb") as file:
            while len(block := np.fromfile(file, dtype=np.int32, count=INDEX_BLOCK)):
                yield block

    with path.open("wb") as file:
        file.write(_INDEX_HEADER)
        file.write(struct.pack("<QBQQ", 1, DType.code_from_dtype(dtype), documents, documents + 1))
        for block in blocks():
            block.tofile(file)
        end = 0  # byte offset of the next document
        for block in blocks():
            ends = end + np.cumsum(block, dtype=np.int64) * DType.size(dtype)
            (ends - block.astype(np.int64) * DType.size(dtype)).tofile(file)
            end = int(ends[-1])
        for start in range(0, documents + 1, INDEX_BLOCK):
            numbers = np.arange(start, min(start + INDEX_BLOCK, documents + 1), dtype=np.int64)
            numbers.tofile(file)
        file.flush()
        os.fsync(file.fileno())
