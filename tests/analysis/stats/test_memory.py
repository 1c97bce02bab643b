"""Test that memory does not grow with the size of a tensor."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
import torch

from megatron.analysis.stats import chunks, tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from tests.subprocesses import REPO, environment, run


def peak(x: torch.Tensor, names: list[str]) -> int:
    """Return the largest number of bytes that numpy allocates while `x` is measured."""
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    tensor.measure(x, matrix, group_formats(names))  # compiles
    tracemalloc.start()
    try:
        tensor.measure(x, matrix, group_formats(names))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_not_kept_until_the_end(monkeypatch, dtype):
    monkeypatch.setattr(chunks, "PIECE", 1 << 14)
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    names = ["mxfp8", "nvfp4"]
    growth = peak(x.repeat(4, 1), names) - peak(x, names)
    assert growth < 3072 * 16 + 50_000  # the magnitude of each token, as bits and as float64


#: Script that measures a file's tensor and prints the peak memory of the process in MiB.
WORKER = """
import sys
from pathlib import Path
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.logical_tensors import Part
from megatron.analysis.stats.jobs import Job, measure_job

path, rows = sys.argv[1], int(sys.argv[2])
matrix = matrix_view_of((rows, 1024), layer_type="linear", tensor_name="input")
outcome = measure_job(Job(0, Part((path,), ((),), matrix, True, 0), ("mxfp8",)))
assert outcome.contents and not outcome.failures, outcome.failures
# not ru_maxrss, which starts at the memory use of the parent process
[peak] = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")]
print(int(peak.split()[1]) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_float32_tensor_of_300_mb_takes_the_memory_of_one_of_30(tmp_path):
    """Mapped pages count until they are released.

    At most `chunks.LARGE` bytes of a tensor stay mapped, so the larger tensor may take that much
    more.
    """
    peaks = []
    for rows in (30 * 256, 300 * 256):  # each of 4 KiB
        path = tmp_path / f"{rows}.pt"
        x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
        torch.save({"tensor": x.repeat(rows // 1024 + 1, 1)[:rows].contiguous()}, path)
        done = run(
            [sys.executable, "-c", WORKER, path, str(rows)], env=environment(PYTHONPATH=REPO)
        )
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(float(done.stdout))
        path.unlink()
    assert peaks[1] - peaks[0] < 64, peaks
