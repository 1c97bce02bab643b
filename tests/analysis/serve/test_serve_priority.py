"""Test that the work in the background waits while a view is drawn, and never for long."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.analysis.serve import priority
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.priority import Priority
from tests.analysis.fake_dump import write_dump
from tests.analysis.serve.conftest import FORMATS, wait_for


def test_a_thread_waits_while_requests_arrive(monkeypatch):
    monkeypatch.setattr(priority, "QUIET", 0.2)
    monkeypatch.setattr(priority, "LONGEST", 0.5)
    shared, stop = Priority(), threading.Event()
    started = time.monotonic()
    shared.wait(stop)
    assert time.monotonic() - started < 0.1
    shared.request()
    shared.wait(stop)
    assert time.monotonic() - started >= 0.2
    monkeypatch.setattr(priority, "QUIET", 60.0)
    shared.request()
    started = time.monotonic()
    shared.wait(stop)
    assert 0.5 <= time.monotonic() - started < 30.0
    stop.set()
    shared.wait(stop)


def cpu_time(process: int) -> int:
    """Return the processor time of a process, in ticks of the clock."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.slow
def test_the_measuring_process_waits_while_a_view_is_drawn(tmp_path):
    write_dump(tmp_path, layers=8, iterations=8)
    explorer = Explorer(tmp_path, FORMATS, cache=None)
    explorer.measurer.fork()
    explorer.start()
    try:
        measurer = explorer.measurer
        wait_for(lambda: measurer.done > 8)
        (process,) = explorer.priority._processes

        def is_waiting():
            explorer.priority.request()
            before = cpu_time(process)
            time.sleep(0.4)
            return cpu_time(process) - before <= 2

        wait_for(is_waiting)
        tensor = len(explorer.catalog) - 1
        answer = measurer.answer(explorer.catalog, tensor, FORMATS)  # does not need the process
        assert answer.arrays is not None
        wait_for(lambda: measurer.done == measurer.total)  # it has continued
        os.kill(process, signal.SIGKILL)  # as if memory ran out: another process takes its place
        write_dump(tmp_path / "later", layers=1, run_id="later")
        explorer.follower._walked = -1e9
        wait_for(lambda: "later" in {run["id"] for run in explorer.catalog.runs})
        wait_for(lambda: measurer.done == measurer.total == len(explorer.catalog))
        assert explorer.priority._processes.isdisjoint({process})
        assert not explorer.numbers.failures
    finally:
        explorer.close()
