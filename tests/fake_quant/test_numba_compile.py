"""Tests of compiling CPU kernels in several processes at the same time."""

import fcntl
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.fake_quant.fused.numba_compile import kernel_compiler

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def add_one(x):
    for i in range(x.size):
        x[i] += 1.0


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return kernel_compiler("test", tmp_path, lambda: [Path(__file__)])(add_one)


def compile_and_report(kernel, barrier, results):
    barrier.wait(timeout=60)
    x = np.zeros(3)
    kernel(x)
    results.put((x.tolist(), sum(kernel.stats.cache_misses.values())))


def test_processes_that_start_together_compile_a_kernel_once(kernel):
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(3), fork.Queue()
    processes = [
        fork.Process(target=compile_and_report, args=(kernel, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    reports = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [values for values, _ in reports] == [[1.0, 1.0, 1.0]] * 3
    assert sorted(misses for _, misses in reports) == [0, 0, 1]


def test_a_file_system_without_locks_compiles_all_the_same(kernel, monkeypatch):
    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    x = np.zeros(3)
    kernel(x)
    assert x.tolist() == [1.0, 1.0, 1.0]
