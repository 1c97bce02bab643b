"""A small data set that a model can learn from: documents of numbers that count up."""

from pathlib import Path

import numpy as np
import torch

DOCUMENTS = 200


def make_corpus(folder: Path, *, seed: int = 0) -> Path:
    """Write documents that count up in steps of one to three, and return the data set's prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "counting"
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(DOCUMENTS):
        start, step, length = rng.integers(0, 8), rng.integers(1, 4), rng.integers(50, 400)
        builder.add_item(torch.from_numpy((start + step * np.arange(length)) % 97))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
