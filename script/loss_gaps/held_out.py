"""Cut tokens into training data and the held-out text on which all runs are evaluated.

The held-out text is a single document with exactly as many tokens as an evaluation takes. Training
shuffles documents and samples by the seed of a run, and would evaluate on a different part of a
longer text for each seed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.lookup import ConfigError
from configs.resolve import REPO

if str(REPO / "script" / "data") not in sys.path:
    sys.path.append(str(REPO / "script" / "data"))

from index_file import write_index
from megatron.training.data.indexed_data import HEADER, LENGTH, Index, read_header
from megatron.training.data.paths import index_state

LARGEST = 1 << 30  #: largest file, in bytes, that is copied to separate the held-out text


@dataclass(frozen=True)
class Parts:
    """Path prefixes of the training data and the held-out text."""

    train: str
    held_out: str


def cut(data: str, valid: str | None, tokens: int, folder: Path) -> Parts:
    """Return the paths of the training data and the held-out text; make these files if necessary.

    Args:
        data: prefix of the training data.
        valid: prefix of the data that begin with the held-out text; None takes the text from the
            last documents of the training data, which are then not trained on.
        tokens: number of tokens of the held-out text.
        folder: folder for the parts.

    Raises:
        ConfigError: if there are too few tokens, or too many to copy.
    """
    source = read_header(valid or data)
    if source.tokens < tokens:
        raise ConfigError(
            f"an evaluation takes {tokens:,} tokens, but {source.prefix} has {source.tokens:,}; "
            "give a smaller --eval-iters or more text"
        )
    name = f"{index_state([source.prefix])}_{tokens}"
    held_out = str(folder / f"held_out_{name}")
    if valid is not None:
        held_out = str(folder / f"held_out_first_{name}")  # without `first`: the last tokens
        _write(source, 0, tokens, [tokens], held_out)
        return Parts(data, held_out)
    if source.bin_size > LARGEST:
        raise ConfigError(
            f"{data} is too large to be cut into training data and held-out text; give another "
            "data set in --valid-data-path"
        )
    lengths = np.fromfile(source.path, LENGTH, source.sequences, offset=HEADER.size)
    ends = np.cumsum(lengths, dtype=np.int64)
    first = int(np.searchsorted(ends, source.tokens - tokens, side="right"))
    if first == 0:
        raise ConfigError(
            f"the last {tokens:,} tokens of {data} belong to its first document, so none are left "
            "to train on; give a smaller --eval-iters, or another data set in --valid-data-path"
        )
    start, train = int(ends[first - 1]), str(folder / f"train_{name}")
    _write(source, 0, start, lengths[:first], train)
    _write(source, start, start + tokens, [tokens], held_out)
    return Parts(train, held_out)


def _write(source: Index, start: int, stop: int, lengths, prefix: str) -> None:
    """Write the tokens from `start` to `stop`, divided into documents, unless the output exists."""
    if Path(f"{prefix}.idx").is_file():  # written last
        return
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    size = source.dtype.itemsize
    path = Path(f"{source.prefix}.bin")
    np.fromfile(path, source.dtype, stop - start, offset=start * size).tofile(f"{prefix}.bin")
    table = Path(f"{prefix}.lengths")
    np.asarray(lengths, LENGTH).tofile(table)
    partial = Path(f"{prefix}.idx.partial")
    write_index(partial, table, documents=len(lengths), dtype=source.dtype.type)
    table.unlink()
    partial.replace(f"{prefix}.idx")
