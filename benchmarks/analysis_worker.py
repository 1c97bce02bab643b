"""Measure the time and peak memory of one analysis, in a process that `analysis.py` starts.

    python benchmarks/analysis_worker.py ours FOLDER WORKERS FORMAT...
    python benchmarks/analysis_worker.py naive FOLDER EVERY FORMAT...      one tensor in EVERY

For example:

    python benchmarks/analysis_worker.py ours enhanced_tensor_logs/mxfp8 2 mxfp8 hifp8

Prints a JSON object: wall-clock and CPU seconds without the startup, the number of tensors and
their size in bytes, a checksum, and the peak memory in MiB.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.analysis.stats import QUANTILES, compute  # noqa: E402
from megatron.analysis.stats.matrix_view import matrix_view_of  # noqa: E402
from megatron.analysis.store import TensorStore  # noqa: E402
from megatron.fake_quant import fake_quantize, get_format, quantize  # noqa: E402
from megatron.fake_quant.code_points import unpack_nibbles  # noqa: E402


def main() -> None:
    how, folder, number, *formats = sys.argv[1:]
    store = TensorStore(folder)
    if how == "naive":
        torch.set_num_threads(os.cpu_count() or 1)
        done = naive(store, int(number), formats)
    else:
        done = ours(store, int(number), formats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(done | {"peak": peak}))


def ours(store: TensorStore, workers: int, formats: list[str]) -> dict[str, float]:
    # Load the kernels before the timing starts.
    compute(store, formats, select=store.records.head(1))
    start, cpu = time.perf_counter(), time.process_time()
    statistics = compute(store, formats, workers=workers)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert not statistics.problems, statistics.problems[0]
    checksum = float(statistics.formats["mse"].sum())
    return {
        "seconds": seconds,
        "cpu": cpu,
        "bytes": size(store.records),
        "tensors": len(store),
        "checksum": checksum,
    }


def size(records) -> int:
    return int(records["bytes"].sum())


def naive(store: TensorStore, every: int, formats: list[str]) -> dict[str, float]:
    """Measure plain code that makes one torch or numpy call per statistic and format.

    Every `every`-th tensor is loaded and copied to float32. Our fused kernels quantize it, once per
    format and axis.
    """
    chosen = store.records.iloc[::every]
    checksum, start, cpu = 0.0, time.perf_counter(), time.process_time()
    for row in chosen.itertuples():
        x = torch.load(row.path, weights_only=True)["tensor"]
        matrix = matrix_view_of(
            tuple(x.shape), layer_type=row.layer_type, tensor_name=row.tensor_name, head_dim=None
        )
        wide = x.float()
        values(wide, matrix.channels)
        views = {
            "row": (x.reshape(-1, matrix.run), -1),
            "column": (x.reshape(matrix.outer, matrix.rows, matrix.columns), 1),
        }
        for name in formats:
            fmt = get_format(name)
            results = []
            for axis in ("row", "column") if fmt.block_size else ("row",):
                view, dim = views[axis]
                checksum += errors(view, dim, name, results)
            if len(results) == 2:
                a, b = (result.reshape(-1) for result in results)
                (a != b).float().mean()
                (a - b).square().sum()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu": cpu,
        "bytes": size(chosen),
        "tensors": len(chosen),
        "checksum": checksum,
    }


def values(x: torch.Tensor, channels: tuple[int, ...]) -> None:
    """Compute and discard the statistics of an unquantized tensor."""
    x.numel(), x.isnan().sum(), x.isinf().sum(), (x == 0).sum(), torch.signbit(x).sum()
    x.min(), x.max(), x.mean(), x.std(correction=0), x.square().mean().sqrt(), x.abs().max()
    x.abs().sum()
    scaled = (x - x.mean()) / x.std(correction=0)
    scaled.pow(3).mean(), scaled.pow(4).mean()
    array = x.numpy().ravel()
    np.quantile(array, QUANTILES), np.quantile(np.abs(array), QUANTILES)
    np.bincount(np.frexp(array)[1] + 200, minlength=400)
    matrix = x.reshape(-1, int(np.prod(channels)) or 1).abs()
    matrix.amax(0), matrix.amax(1)


def errors(view: torch.Tensor, dim: int, name: str, results: list[torch.Tensor]) -> float:
    """Compute error measures of a quantized tensor; return its mean squared error.

    The dequantized tensor is appended to `results`.
    """
    fmt = get_format(name)
    x, y = view.float(), fake_quantize(view, fmt, dim).float()
    results.append(y)
    mse = (y - x).square().mean().item()
    10 * torch.log10(x.square().sum() / (y - x).square().sum())
    torch.nn.functional.cosine_similarity(x.reshape(-1), y.reshape(-1), 0)
    (y - x).mean(), (y - x).abs().max()
    nonzero = x != 0
    relative = torch.where(nonzero, (y - x).abs() / x.abs(), 0)
    relative.sum() / nonzero.sum(), ((y == 0) & nonzero).sum()
    binade = torch.frexp(x).exponent.reshape(-1).long() + 200
    for weights in (relative, (y - x).square(), y - x):
        torch.bincount(binade, weights=weights.reshape(-1), minlength=400)
    packed = quantize(view, fmt, dim)
    codes = packed.codes
    if fmt.element.bits <= 4:
        codes = unpack_nibbles(codes, view.shape[dim])
    torch.bincount(codes.reshape(-1).int(), minlength=256)
    if packed.scales.blocks is not None:
        torch.bincount(packed.scales.block().reshape(-1).int(), minlength=256)
    return mse


if __name__ == "__main__":
    main()
