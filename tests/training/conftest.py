"""A small data set that a model can learn from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.runs import ENTRY, MODEL, NO_DROPOUT, Training, succeeded

DOCUMENTS = 200


def make_corpus(folder: Path, *, seed: int = 0) -> Path:
    """Prefix of a .bin/.idx pair: documents that count up in steps of one, two or three."""
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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run_quickly(corpus):
    """Trains four iterations of a model that is smaller still.

    file_bytes: the largest file that can be written.
    variables: of the environment.
    """

    def start(*options: str | Path, file_bytes: int | None = None, **variables: str) -> Training:
        size = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2")
        words = ("--data-path", corpus, *size, "--train-iters", "4", *options)
        done = forks.run(
            *(ENTRY, *MODEL, *NO_DROPOUT, *words),
            env=environment(PYTHONPATH=REPO, **variables),
            file_bytes=file_bytes,
        )
        return Training(done.returncode, done.stdout, done.stderr)

    return start


@pytest.fixture(scope="session")
def checkpoints(run_quickly, tmp_path_factory) -> Path:
    """Those of iterations 2 and 4 of such a run in fp32."""
    folder = tmp_path_factory.mktemp("quick") / "ck"
    succeeded(run_quickly("--save", folder, "--save-interval", "2"))
    return folder
