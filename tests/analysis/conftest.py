"""Fixtures with real dumps in several parallel layouts, written once per run of the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).parent / "dump" / "layouts_worker.py"
OF_ONE_RANK = (
    *("one", "mxfp8", "hifp8-frozen", "dropout", "stochastic"),
    *("window", "recipe", "experts", "latent-mxfp8"),
)
OF_TWO_RANKS = (
    *("tp2", "tp2sp", "pp2", "cp2", "dp2", "tp2sp-mxfp4", "cp2-mxfp8"),
    *("window-cp2", "ep2", "ep2-mxfp8"),
)


@pytest.fixture(scope="session")
def dumps(made_once) -> Path:
    """Return a read-only folder with one dump per layout of the worker."""
    return made_once("dumps", write_dumps)


def write_dumps(folder: Path) -> None:
    env = environment(PYTHONPATH=REPO)
    alone = forks.run(WORKER, folder, *OF_ONE_RANK, env=env)
    assert alone.returncode == 0, alone.stderr[-3000:]
    together = forks.run(WORKER, folder, *OF_TWO_RANKS, ranks=2, env=env)
    assert together.returncode == 0, together.stderr[-3000:]


@pytest.fixture
def small_pictures(monkeypatch):
    """Draw pictures with few pixels and without arranging the axes, for tests that ignore them."""
    from megatron.analysis import quick
    from megatron.analysis.outputs import render

    for module in (render, quick):
        monkeypatch.setattr(module, "DPI", 20)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)


@pytest.fixture
def copied(dumps, tmp_path):
    """Return a function that copies the dump of a layout, so that a test can damage it."""

    def copy(name):
        return shutil.copytree(dumps / name, tmp_path / name)

    return copy
