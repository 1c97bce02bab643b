"""Whether a `.bin/.idx` pair is whole: what `preprocess.py --check PREFIX` says.

The index is held against the tokens, both against the manifest, and every token id against the
vocabulary: the manifest's, or that of the --tokenizer-model that is given (then it must also be the
tokenizer that made the data). Everything is read in blocks.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

BLOCK = 1 << 22  # elements at a time


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
    from megatron.training.data.tokenizer import build_tokenizer

    return build_tokenizer(options.tokenizer_type, options.tokenizer_model, options.vocab_size)


def inspect(prefix: str, tokenizer: Any = None) -> tuple[str, list[str]]:
    """Return a summary of the data set, and a list of everything that is wrong with it.

    Raises:
        ValueError: if the index cannot be read at all.
        FileNotFoundError: if the index or the token file is missing.
    """
    from megatron.training.data.indexed_data import read_header
    from megatron.training.data.manifest import check_fits, read_manifest

    manifest = read_manifest(prefix)
    problems: list[str] = []
    if tokenizer is not None:
        try:
            check_fits(prefix, tokenizer)
        except ValueError as error:
            problems.append(str(error))
    index = read_header(prefix)
    problems += index.problems()
    tokens = index.tokens
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


def _largest(path: Path, dtype: Any) -> tuple[int, int]:
    """The smallest and the largest token id."""
    import numpy as np

    smallest, largest = np.iinfo(dtype).max, 0
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype=dtype, count=BLOCK)):
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return int(smallest), int(largest)
