"""Whether a `.bin/.idx` pair is whole: what `preprocess.py --check PREFIX` says.

The index is held against the tokens, both against the manifest, and every token id against the
vocabulary: the manifest's, or that of the --tokenizer-model that is given (then it must also be the
tokenizer that made the data). Everything is read in blocks.
"""

from __future__ import annotations

import argparse
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

BLOCK = 1 << 22  # elements at a time
HEADER = struct.Struct("<9sQBQQ")  # mark, version, type of the ids, sequences, document bounds


def check_and_report(options: argparse.Namespace) -> int:
    """Print what was found; the exit status."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not")
    prefix = options.check.removesuffix(".bin").removesuffix(".idx")
    try:
        summary, problems = inspect(prefix, _tokenizer(options))
    except (ValueError, OSError) as error:
        summary, problems = "", [str(error)]
    for problem in problems:
        print(f"[ERROR] {prefix}: {problem}", file=sys.stderr)
    if problems:
        print("Make the data again with script/data/preprocess.py --overwrite.", file=sys.stderr)
        return 1
    print(f"{prefix}: {summary}")
    return 0


def _tokenizer(options: argparse.Namespace) -> Any:
    if options.tokenizer_model is None and options.tokenizer_type is None:
        return None
    from megatron.training.tokenizer import build_tokenizer

    return build_tokenizer(options.tokenizer_type, options.tokenizer_model, options.vocab_size)


def inspect(prefix: str, tokenizer: Any = None) -> tuple[str, list[str]]:
    """A line about sound data, and everything that is wrong.

    Raises:
        ValueError: the index cannot be read at all.
    """
    from megatron.training.manifest import check_fits, read_manifest

    manifest = read_manifest(prefix)
    problems: list[str] = []
    if tokenizer is not None:
        try:
            check_fits(prefix, tokenizer)
        except ValueError as error:
            problems.append(str(error))
    index = Index(Path(f"{prefix}.idx"))
    tokens, wrong = index.check()
    problems += wrong
    size = Path(f"{prefix}.bin").stat().st_size
    if size != tokens * index.dtype.itemsize:
        problems.append(
            f"the .bin has {size} bytes, but the index speaks of {tokens * index.dtype.itemsize}"
        )
    largest = _largest(Path(f"{prefix}.bin"), index.dtype)
    vocabulary = tokenizer.vocab_size if tokenizer is not None else None
    if manifest is not None:
        vocabulary = vocabulary or manifest.tokenizer.vocab_size
        found = {"documents": index.documents, "tokens": tokens, "dtype": index.dtype.name}
        for name, value in found.items():
            if (said := getattr(manifest, name)) != value:
                problems.append(f"{name}: {value}, but {prefix}.json says {said}")
    if vocabulary is not None and not 0 <= largest[0] <= largest[1] < vocabulary:
        problems.append(
            f"token ids from {largest[0]} to {largest[1]}, but the vocabulary has {vocabulary}"
        )
    summary = (
        f"{index.documents:,} documents, {tokens:,} tokens ({index.dtype.name}), ids {largest[0]} "
        f"to {largest[1]} of "
    )
    summary += f"{vocabulary:,}" if vocabulary else "an unknown vocabulary (no manifest)"
    return summary, problems


class Index:
    """An index file, read in blocks."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

        with path.open("rb") as file:
            start = file.read(HEADER.size)
        try:
            mark, version, code, self.sequences, bounds = HEADER.unpack(start)
            self.dtype = np.dtype(DType.dtype_from_code(code))
        except (struct.error, ValueError) as error:
            raise ValueError(f"{path} is no index ({error})") from error
        if mark != _INDEX_HEADER or version != 1:
            raise ValueError(f"{path} is no index of megatron-core (version 1)")
        self.path, self.documents = path, bounds - 1

    def check(self) -> tuple[int, list[str]]:
        """The number of tokens, and what is wrong."""
        size = self.path.stat().st_size
        wanted = HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)
        if size < wanted:
            return 0, [f"the index has {size} bytes, but needs {wanted}"]
        problems = []
        tokens = self._check_pointers(problems)
        self._check_bounds(problems)
        return tokens, problems

    def _blocks(self, dtype: Any, start: int, count: int) -> Any:
        import numpy as np

        with self.path.open("rb") as file:
            file.seek(start)
            while count:
                block = np.fromfile(file, dtype=dtype, count=min(count, BLOCK))
                yield block
                count -= len(block)

    def _check_pointers(self, problems: list[str]) -> int:
        """Sequences follow each other without gaps; the number of tokens in all."""
        import numpy as np

        end = HEADER.size + 4 * self.sequences
        lengths = self._blocks(np.int32, HEADER.size, self.sequences)
        pointers = self._blocks(np.int64, end, self.sequences)
        tokens = number = 0
        for length, pointer in zip(lengths, pointers, strict=True):
            ends = tokens + np.cumsum(length, dtype=np.int64)
            wrong = np.flatnonzero((ends - length) * self.dtype.itemsize != pointer)
            wrong = np.union1d(wrong, np.flatnonzero(length <= 0))
            if len(wrong) and not problems:
                problems.append(f"sequence {number + wrong[0]} has a wrong length or place")
            tokens, number = int(ends[-1]), number + len(length)
        return tokens

    def _check_bounds(self, problems: list[str]) -> None:
        """Documents begin with sequence 0, follow each other, and end with the last."""
        import numpy as np

        start = HEADER.size + 12 * self.sequences
        last = -1
        for block in self._blocks(np.int64, start, self.documents + 1):
            steps = np.diff(block, prepend=last if last >= 0 else block[0] - 1)
            if (last < 0 and block[0] != 0) or (steps <= 0).any():
                problems.append("the bounds of the documents do not ascend from 0")
                return
            last = int(block[-1])
        if last != self.sequences:
            problems.append(f"the documents end with sequence {last} of {self.sequences}")


def _largest(path: Path, dtype: Any) -> tuple[int, int]:
    """The smallest and the largest token id."""
    import numpy as np

    smallest, largest = np.iinfo(dtype).max, 0
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype=dtype, count=BLOCK)):
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return int(smallest), int(largest)
