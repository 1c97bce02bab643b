"""Time and compare number formats for benchmarks/formats.py, and report results as JSON lines.

This worker runs in the Python that has the peer packages. All functions are timed in this one
process. In each round, the copy, our function and every peer have one turn. The order of the turns
changes from round to round, so that other load on the machine affects all of them alike. Peers
print text when they are imported. Standard output is therefore reserved for the reports, and all
other output is redirected to standard error.

    PYTHONPATH=. python benchmarks/formats_worker.py REQUEST

REQUEST is a JSON object that `formats.py` writes; see `python benchmarks/formats.py --help` for
examples.
"""

import gc
import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import peer_process
from peer_process import reason, release, report, start_worker

if __name__ == "__main__":
    start_worker(__doc__)

import torch
from torch import Tensor

import peer_reasons
import peers
from formats_report import HUGE
from megatron.fake_quant import Format, fake_quantize, get_format
from megatron.fake_quant.fused import tensor_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INDEX = {"last": -1, "first": 0}
#: Goals of the project: the maximum time of our function, as a multiple of a copy's time. "two"
#: applies to formats that choose between two quantizations of each block.
GOALS = {"one": 2.0, "two": 4.0, "hifloat4": 2.5}
#: Limits for the timed calls of one peer in one case: maximum total seconds, minimum number.
SLOWEST, FEWEST = 5, 1
#: Number of calls that are timed together on a GPU, to hide the time of the first launch.
LAUNCHES = 10
#: Number of rows that are also quantized on the CPU if the device is a GPU.
ROWS_ON_CPU = 512
#: Number of matrices for which `touch_memory` allocates memory before each call on the CPU.
MATRICES = 8


def load_peers(device: str) -> dict[str, peers.Finder]:
    """Import every peer package that runs on this device type, and report which are available."""
    only_cpu = () if device == "cpu" else peers.ONLY_ON_CPU
    return peer_process.load_peers(
        {name: loader for name, loader in peers.PEERS.items() if name not in only_cpu}
    )


def known_formats(names: list[str], required: bool) -> list[Format]:
    """Return the formats in `names` that this version of our library supports.

    Unknown names are reported. If `required` is True, the first unknown name ends the process.
    """
    formats = []
    for name in names:
        try:
            formats.append(get_format(name))
        except ValueError as error:
            report("refused" if required else "skipped", format=name, reason=str(error))
            if required:
                sys.exit(2)
    return formats


def data(request: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return two matrices by name: "randn" to compare and time, "wide" only to compare."""
    generator = torch.Generator().manual_seed(request["seed"])
    rows, columns = request["shape"]
    normal = torch.randn(rows, columns, generator=generator)
    exponents = torch.rand(rows, 1, generator=generator) * 32 - 16
    wide = normal * torch.exp2(exponents)
    return {name: x.to(request["device"], dtype) for name, x in (("randn", normal), ("wide", wide))}


def differences(theirs: Tensor, ours: Tensor) -> tuple[int, int]:
    """Count the elements in which two results differ, and those that differ by more than 4 ulp."""
    differ, far = peers.unlike(theirs, ours)
    return int(differ.sum()), int(far.sum())


def other_bits(a: Tensor, b: Tensor) -> int:
    """Return the number of elements whose bits differ in two tensors; all NaNs count as equal."""
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    a, b = (t.cpu().masked_fill(t.cpu().isnan(), torch.nan).view(integers) for t in (a, b))
    return int((a != b).sum())


def copied(x: Tensor) -> Tensor:
    """Copy a matrix to new memory, in huge pages if the system has them."""
    return tensor_memory.in_new_memory(x).copy_(x)


def touch_memory(x: Tensor) -> None:
    """Allocate the memory of MATRICES matrices, write to it, and free it.

    A virtual machine may return free memory to its host after some seconds, for example while a
    slow peer computes. The next call that allocates memory would then wait for the host.
    """
    held = [copied(x) for _ in range(MATRICES)]
    del held


def milliseconds(call: Callable[[], Tensor], device: str) -> float:
    """Return the duration of one call, in milliseconds."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(LAUNCHES):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / LAUNCHES


def run_case(
    fmt: Format, axis: str, tensors: dict[str, Tensor], calls: dict[str, peers.Call], repeats: int
) -> dict[str, Any]:
    """Compare and time all implementations of one case: a format, a dtype and an axis.

    The comparison also serves as the warm-up. A slow peer takes part in the first rounds only.
    """
    randn, device = tensors["randn"], tensors["randn"].device.type

    def ours(x: Tensor) -> Tensor:
        return fake_quantize(x, fmt, INDEX[axis])

    expected = {name: ours(x) for name, x in tensors.items()}
    compared, failed, rounds = {}, {}, {}
    for name, call in calls.items():
        try:
            results, seconds = {}, math.inf
            for on, x in tensors.items():
                start = time.perf_counter()
                results[on] = differences(call(x), expected[on])
                seconds = min(seconds, time.perf_counter() - start)
            compared[name] = results
            rounds[name] = min(repeats, max(FEWEST, round(SLOWEST / seconds)))
        except Exception as error:  # A package may raise any error; continue with the others.
            failed[name] = reason(error)
    del expected
    unlike_cpu = None
    if device != "cpu":
        parts = [x[:ROWS_ON_CPU] for x in tensors.values()]
        unlike_cpu = sum(other_bits(ours(part.cpu()), ours(part)) for part in parts)

    turns = {"clone": torch.clone, "ours": ours} | {n: calls[n] for n in compared}
    if device == "cpu":
        turns[HUGE] = copied
    times: dict[str, list[float]] = {name: [] for name in turns}
    shuffle = random.Random(0).shuffle
    gc.collect()
    for number in range(repeats):
        order = [name for name in turns if number < rounds.get(name, repeats)]
        shuffle(order)
        for name in order:
            if device == "cpu":
                touch_memory(randn)
            times[name].append(milliseconds(lambda call=turns[name]: call(randn), device))
    unlike = [name for name, counts in compared.items() if any(map(any, counts.values()))]
    return {
        "limit": limit(fmt),
        "times": times,
        "differ": compared,
        "why": {name: peer_reasons.why(name, fmt.name) for name in unlike},
        "failed": failed,
        "unlike_cpu": unlike_cpu,
    }


def limit(fmt: Format) -> float:
    """Return the project's goal for a format: our maximum time, as a multiple of a copy's time."""
    if fmt.scaling is None:
        return GOALS["one"]
    if fmt.scaling.method == "hifloat4":
        return GOALS["hifloat4"]
    chooses = fmt.scaling.alternative or getattr(fmt.scaling, "search", "none") != "none"
    return GOALS["two" if chooses else "one"]


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        import numba
    except ImportError:  # Our library also works without numba.
        return
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def main() -> None:
    request = json.loads(sys.argv[1])
    set_threads(request["threads"])
    if request["device"] == "cuda" and not torch.cuda.is_available():
        report("refused", format=None, reason="this Python's torch sees no CUDA device")
        sys.exit(2)
    formats = known_formats(request["formats"], request["required"])
    finders = load_peers(request["device"])
    device_name = torch.cuda.get_device_name() if request["device"] == "cuda" else None
    releases = {"Python": platform.python_version()}
    releases |= {name: release(name) for name in ("torch", "numpy", "numba")}
    cases = [
        (fmt, dtype, axis)
        for fmt in formats
        for dtype in request["dtypes"]
        # A format without blocks gives the same result on every axis, so measure it only once.
        for axis in (request["axes"] if fmt.block_size else ["last"])
    ]
    report("plan", cases=len(cases), releases=releases, device_name=device_name)
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, (fmt, dtype, axis) in enumerate(cases):
        chosen = request["peers"][number] if request["peers"] is not None else None
        tensors[dtype] = tensors.get(dtype) or data(request, DTYPES[dtype])
        calls = {
            name: peers.along(call, axis)
            for name, find in finders.items()
            if (chosen is None or name in chosen) and (call := find(fmt)) is not None
        }
        result = run_case(fmt, axis, tensors[dtype], calls, request["repeats"])
        shown = axis if fmt.block_size else "-"
        report("case", format=fmt.name, dtype=dtype, axis=shown, **result)


if __name__ == "__main__":
    main()
