"""Check the `.bin` and `.idx` files of a dataset, for `preprocess.py --check PREFIX`.

The index is checked against the token file, both files against the manifest, and every token id
against the size of the vocabulary. This size comes from --tokenizer-model if it is given, and
otherwise from the manifest. A given tokenizer must be the one with which the data was made. All
files are read in blocks.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

BLOCK = 1 << 22  #: number of token ids that are read at a time


def check_and_report(options: argparse.Namespace) -> int:
    """Print a summary of a dataset or its problems, and return the exit status."""
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
    """Return a summary of the dataset at `prefix`, and a list of its problems.

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
    smallest, largest = _range(Path(f"{prefix}.bin"), index.dtype)
    vocabulary = tokenizer.vocab_size if tokenizer is not None else None
    if manifest is not None:
        vocabulary = vocabulary or manifest.tokenizer.vocab_size
        counts = {"documents": index.documents, "tokens": tokens, "dtype": index.dtype.name}
        for name, value in counts.items():
            if (recorded := getattr(manifest, name)) != value:
                problems.append(f"{name}: {value}, but {prefix}.json records {recorded}")
    if vocabulary is not None and not 0 <= smallest <= largest < vocabulary:
        problems.append(
            f"token ids from {smallest} to {largest}, but the vocabulary has {vocabulary}"
        )
    summary = (
        f"{index.documents:,} documents, {tokens:,} tokens ({index.dtype.name}), ids {smallest} "
        f"to {largest} of "
    )
    summary += f"{vocabulary:,}" if vocabulary else "an unknown vocabulary (no manifest)"
    return summary, problems


def _range(path: Path, dtype: Any) -> tuple[int, int]:
    """Return the smallest and the largest token id in a `.bin` file."""
    import numpy as np

    smallest, largest = np.iinfo(dtype).max, 0
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype=dtype, count=BLOCK)):
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return int(smallest), int(largest)
