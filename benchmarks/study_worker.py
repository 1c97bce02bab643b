"""Measure studies for benchmarks/study_speed.py, and report results as JSON lines.

    PYTHONPATH=. python benchmarks/study_worker.py REQUEST

REQUEST is a JSON object that `study_speed.py` writes; see `python benchmarks/study_speed.py --help`
for examples. Standard output is reserved for the reports.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peer_process
from peer_process import release, report, start_worker

if __name__ == "__main__":
    start_worker(__doc__)

import torch

import peers
import study_plain
from megatron.analysis.store import TensorStore
from megatron.analysis.study import candidates_of, study
from megatron.fake_quant import get_format
from megatron.tensor_record import COMPONENTS, TensorRecord, index_name, run_card_name

RUN = "20260101_000000_000001"
HEAD_DIM = 64
LAYERS = 2
SEED = 1234


def shapes(hidden: int, tokens: int) -> dict[str, dict[str, list[int]]]:
    """Return the tensor shapes of each module of a layer, with attention first."""
    heads = [tokens, 1, hidden // HEAD_DIM, HEAD_DIM]
    attention = dict.fromkeys(("query", "key", "value"), heads)
    attention["grad_output"] = [tokens, 1, hidden]
    linear = {
        "mlp.linear_fc1": (hidden, 4 * hidden),
        "mlp.linear_fc2": (4 * hidden, hidden),
        "self_attention.linear_qkv": (hidden, 3 * hidden),
        "self_attention.linear_proj": (hidden, hidden),
    }
    return {"self_attention.core_attention": attention} | {
        name: {"input": [tokens, 1, k], "weight": [n, k], "grad_output": [tokens, 1, n]}
        for name, (k, n) in linear.items()
    }


def write_dump(folder: Path, hidden: int, tokens: int) -> dict[str, list[str]]:
    """Write the operands of all layers, and return the files of each module.

    Values are normally distributed; one channel in 16 is 6 times as large.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(SEED)
    passes: dict[str, list[str]] = {}
    lines = []
    modules = [(layer, *each) for each in shapes(hidden, tokens).items() for layer in range(LAYERS)]
    for layer, name, tensors in modules:
        for tensor_name, shape in tensors.items():
            x = torch.randn(shape, generator=generator) * (1e-4 if "grad" in tensor_name else 0.3)
            x[..., ::16] *= 6
            record = record_of(layer, name, tensor_name, shape=shape, counter=len(lines) + 1)
            content = {"tensor": x.bfloat16(), "metadata": record.to_metadata()}
            torch.save(content, folder / record.filename)
            size = (folder / record.filename).stat().st_size
            lines.append(record.to_metadata() | {"file": record.filename, "bytes": size})
            passes.setdefault(record.module, []).append(record.filename)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / index_name(RUN, 0)).write_text(text)
    card = {"run_id": RUN, "quant_type": "bf16", "topology": {"world_size": 1}}
    (folder / run_card_name(RUN)).write_text(json.dumps(card))
    return passes


def record_of(
    layer: int, name: str, tensor_name: str, *, shape: list[int], counter: int
) -> TensorRecord:
    """Return the record of one tensor of the dump."""
    layer_type = "attention" if name.endswith("core_attention") else "linear"
    gradient = tensor_name.startswith("grad")
    return TensorRecord(
        run_id=RUN,
        iteration=1,
        micro_batch=0,
        sample_idx=0,
        counter=counter,
        timestamp="20260101_000000",
        layer_type=layer_type,
        layer_idx=layer,
        module=f"decoder.layers.{layer}.{name}",
        operation="backward" if gradient else "forward",
        phase="pre",
        component=COMPONENTS[layer_type],
        tensor_name=tensor_name,
        quant_type="bf16",
        format=None,
        shape=shape,
        dtype="bfloat16",
        dims=None,
        global_shape=shape,
        rank={"world": 0, "world_size": 1},
        recomputed=False,
        wall_time=0.0,
    )


def ours(folder: Path, names: list[str], threads: int, *, budget: bool) -> study_plain.Errors:
    """Return the errors that our study finds, by matmul (module and operation), GEMM and format.

    With `budget`, the study also measures the error budgets, which are not returned.
    """
    candidates = candidates_of(names, [])
    result = study(TensorStore(folder), candidates, workers=threads, budget=budget)
    if result.problems or result.left_out:
        raise SystemExit(f"[ERROR] not studied: {result.problems} {dict(result.left_out)}")
    columns = ("relative_error", "gain", "cosine", "mean_error")
    errors: study_plain.Errors = {}
    for row in result.rows.itertuples():
        key = (f"{row.module} {row.operation}", row.gemm, row.format)
        errors[key] = {each: getattr(row, each) for each in columns}
    return errors


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differences(own: study_plain.Errors, other: study_plain.Errors) -> dict[str, tuple[float, int]]:
    """Return the largest relative difference of two studies' errors and their number, by format."""
    found: dict[str, tuple[float, int]] = {}
    for key, numbers in own.items():
        a, b = numbers["relative_error"], other[key]["relative_error"]
        largest, count = found.get(key[2], (0.0, 0))
        found[key[2]] = max(largest, abs(a - b) / a), count + 1
    return found


def measure(
    request: dict[str, Any],
    dump: tuple[Path, dict[str, list[str]]],
    quantizers: dict[str, study_plain.Quantizer],
    *,
    budget: bool,
) -> dict[str, Any]:
    """Measure the study of one dump, with or without error budgets.

    Args:
        request: the request of `study_speed.py`.
        dump: folder of the dump and the files of each of its passes.
        quantizers: torchao's quantizer of each format; empty without torchao.
        budget: whether both sides also multiply with only one operand quantized.

    Returns:
        Numbers to report.
    """
    (folder, passes), threads = dump, request["threads"]

    def own() -> study_plain.Errors:
        return ours(folder, request["formats"], threads, budget=budget)

    ways: dict[str, Callable[[], Any]] = {"ours": own}
    if quantizers:

        def plain(of_torch: int, workers: int) -> study_plain.Errors:
            with torch_threads(of_torch):
                return study_plain.study(folder, passes, quantizers, workers=workers, budget=budget)

        def products(of_torch: int, workers: int) -> None:
            with torch_threads(of_torch):
                study_plain.multiply(
                    folder, passes, len(quantizers), workers=workers, budget=budget
                )

        ways |= {"intra": lambda: plain(threads, 1), "inter": lambda: plain(1, threads)}
        ways["products, intra"] = lambda: products(threads, 1)
        ways["products, inter"] = lambda: products(1, threads)
    times: dict[str, list[float]] = {name: [] for name in ways}
    # The first round of each size is not measured, because it compiles or loads kernels, and oneDNN
    # chooses kernels for the shapes. A round on small tensors would not do the same.
    results = {name: way() for name, way in ways.items()}
    for _ in range(request["rounds"]):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {
        "budget": budget,
        "tokens": request["tokens"],
        "operands": 2 * len(results["ours"]),
        "times": times,
        "differences": differences(results["ours"], results["intra"]) if quantizers else {},
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        formats = [get_format(name) for name in request["formats"]]
    except ValueError as error:
        report("refused", reason=str(error))
        return
    loaded = peer_process.load_peers({"torchao": peers.PEERS["torchao"]})
    quantizers: dict[str, study_plain.Quantizer] = {}
    if "torchao" in loaded:
        calls = {fmt.name: loaded["torchao"](fmt) for fmt in formats}
        if missing := [name for name, call in calls.items() if call is None]:
            report("refused", reason=f"torchao does not implement {' and '.join(missing)}")
            return
        quantizers = {name: call for name, call in calls.items() if call is not None}
    names = ("torch", "torchao", "numba")
    report("plan", releases={name: release(name) for name in names})
    for hidden in request["hidden_sizes"]:
        folder = Path(request["folder"]) / str(hidden)
        dump = (folder, write_dump(folder, hidden, request["tokens"]))
        for budget in (True, False):
            case = measure(request, dump, quantizers, budget=budget)
            report("case", hidden_size=hidden, **case)


if __name__ == "__main__":
    main()
