"""A small dump of two runs and an explorer whose tensors are all measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.analysis.serve.explorer import Explorer
from tests.analysis.fake_dump import RUNS, write_dump

FORMATS = ["mxfp8", "mxfp4"]


@pytest.fixture(scope="session")
def dump(tmp_path_factory) -> Path:
    """Return a dump of two runs with one layer each; tests must not change it."""
    folder = tmp_path_factory.mktemp("served")
    for quant_type, run_id in RUNS.items():
        write_dump(folder / quant_type, quant_type=quant_type, run_id=run_id, layers=1)
    return folder


@pytest.fixture(scope="session")
def explorer(dump):
    """Return an explorer of the dump that has measured everything."""
    (dump / ".statistics").mkdir()
    opened = opened_explorer(dump, cache=dump / ".statistics")
    opened.measurer.start()
    wait_for(lambda: opened.measurer.total and opened.measurer.done == opened.measurer.total)
    yield opened
    opened.close()


def opened_explorer(folder: Path, cache: Path | None = None) -> Explorer:
    opened = Explorer(folder, FORMATS, cache=cache, in_process=True)
    opened.follower.poll_all()
    return opened


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
