"""Test that a Dask cluster computes the same statistics, with workers on this machine."""

from __future__ import annotations

import http.server
import os
import re
import sys
import threading
import time

import pandas as pd
import pytest

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.stats import executors
from megatron.analysis.store import TensorStore
from tests import forks
from tests.analysis.fake_dump import write_dump
from tests.subprocesses import REPO, environment

FORMATS = ["mxfp8", "nvfp4", "hifp8"]


@pytest.fixture(scope="module")
def address():
    distributed = pytest.importorskip("distributed")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPO)
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    )
    cluster.scheduler.allowed_failures = 0
    try:
        with cluster:
            pids = {worker.pid for worker in cluster.workers.values()}
            assert len(pids) == 2
            assert os.getpid() not in pids
            yield cluster.scheduler_address
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def test_a_cluster_gives_the_very_same_tables(address, tmp_path, monkeypatch, capsys):
    write_dump(tmp_path / "dump", layers=1)
    (tmp_path / "dump" / "broken.pt").write_bytes(b"")
    store = TensorStore(tmp_path / "dump")
    here = stats.compute(store, FORMATS)
    monkeypatch.setattr(executors, "BATCH_JOBS", 3)
    there = stats.compute(store, FORMATS, scheduler=address, cache=tmp_path / "cache")
    pd.testing.assert_frame_equal(here.tensors, there.tensors)
    pd.testing.assert_frame_equal(here.formats, there.formats)
    assert there.problems == here.problems
    # the results were sent back and are cached here
    monkeypatch.setattr(executors, "batches", lambda jobs: iter([jobs] if jobs else []))
    monkeypatch.setattr(executors, "measure_jobs", None)
    again = stats.compute(store, FORMATS, cache=tmp_path / "cache")
    pd.testing.assert_frame_equal(here.formats, again.formats)
    monkeypatch.undo()
    folder = str(tmp_path / "dump")
    options = ["stats", folder, "--formats", "mxfp4", "--scheduler", address, "--cache", "none"]
    assert main(options) == 3
    assert "broken.pt" in capsys.readouterr().err


def die(jobs):
    """End the process as if the system had killed the worker."""
    os._exit(1)


def test_workers_that_die_are_said_in_words(address, tmp_path, monkeypatch, capsys):
    write_dump(tmp_path, layers=1)
    monkeypatch.setattr(executors, "measure_jobs", die)
    options = ["stats", str(tmp_path), "--scheduler", address, "--cache", "none"]
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert re.search(r"\[ERROR\] workers of .* ended repeatedly.*--memory-limit", printed)


def test_a_scheduler_that_is_not_there_is_an_error(tmp_path, monkeypatch, capsys):
    pytest.importorskip("distributed")
    write_dump(tmp_path, layers=1)
    monkeypatch.setattr(executors, "PATIENCE", "1s")
    options = ["stats", str(tmp_path), "--scheduler", "tcp://127.0.0.1:1", "--cache", "none"]
    assert main(options) == 2
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in capsys.readouterr().err


@pytest.fixture
def no_dask_server():
    """Return the address of a server that is no Dask scheduler."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "address",
    ["nonsense", "tcp://127.0.0.1:port", "http://{}", "tcp://", "tcp://{}", "ws://{}", "x\x1b[2J"],
)
def test_an_address_that_is_no_scheduler_ends_at_once(tmp_path, no_dask_server, address):
    """The process ends soon: an abandoned client would wait for 40 s."""
    pytest.importorskip("distributed")
    write_dump(tmp_path, layers=1)
    address = address.format(no_dask_server)
    code = (
        "import sys; from megatron.analysis.stats import executors; executors.PATIENCE = '2s';"
        "from megatron.analysis.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["-c", code, "stats", tmp_path, "--scheduler", address, "--cache", "none"]
    env = environment(PYTHONPATH=REPO)
    forks.run("-c", "import megatron.analysis", env=env)  # the first one starts the server
    started = time.monotonic()
    done = forks.run(*words, env=env)
    assert time.monotonic() - started < 35
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"[ERROR] no Dask scheduler answers at {address!r} (")
    assert "--scheduler" in line


def test_without_dask_the_message_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    write_dump(tmp_path, layers=1)
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["stats", str(tmp_path), "--scheduler", "tcp://x:1", "--cache", "none"]) == 2
    assert "pip install -e .[cluster]" in capsys.readouterr().err
