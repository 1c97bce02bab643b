"""Fixtures that training tests share: a small data set, short runs and their checkpoints."""

from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.corpus import make_corpus
from tests.training.runs import ENTRY, MODEL, NO_DROPOUT, Training, succeeded


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run_quickly(corpus):
    """A function that trains an even smaller model for four iterations.

    file_bytes: size limit of a written file.
    variables: environment variables of the run.
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
    """A folder with the checkpoints of iterations 2 and 4 of a `run_quickly` run in fp32."""
    folder = tmp_path_factory.mktemp("quick") / "ck"
    succeeded(run_quickly("--save", folder, "--save-interval", "2"))
    return folder
