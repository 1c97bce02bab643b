"""A small data set that a model can learn from."""

from pathlib import Path

import numpy as np
import pytest
import torch

DOCUMENTS = 200


def make_corpus(folder: Path) -> Path:
    """Prefix of a .bin/.idx pair: documents that count up in steps of one, two or three."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "counting"
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(DOCUMENTS):
        start, step, length = rng.integers(0, 8), rng.integers(1, 4), rng.integers(50, 400)
        builder.add_item(torch.from_numpy((start + step * np.arange(length)) % 97))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))
