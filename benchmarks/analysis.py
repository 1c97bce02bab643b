"""Time the computation of a dump's statistics, and compare it with plain torch and numpy code.

    python benchmarks/analysis.py                     # collect 2 GB, measure, delete (minutes)
    python benchmarks/analysis.py --dump FOLDER       # measure an existing dump
    python benchmarks/analysis.py --quick             # only check that it runs (seconds)

The dump comes from run_tensor_collection.sh: the tiny Llama with a larger hidden size, one
iteration in mxfp8. All files are read once beforehand, so that every measurement finds them in the
page cache. `plain` loads each file, copies the tensor to float32 and makes one torch or numpy call
per statistic and format, on all cores. It measures a sample of the tensors and is compared by its
speed in bytes per second. It also uses our fused kernels for the quantized values. Each measurement
runs in a separate process, whose peak memory is shown; CPU seconds include all its threads.

A second table shows how the time grows with the number of records, up to 100,000. These records are
tiny tensors (8 x 32, bf16), written for this purpose. Prints Markdown tables and writes them to
`docs/results/analysis.md`, with the command.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("analysis_worker.py")
FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3")
#: Flags of pretrain_gpt.py that give a dump of about 2 GB. `SMALL` is used with --quick instead.
MODEL = (
    "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
    "--num-query-groups 4 --kv-channels 128 --seq-length 2048 --micro-batch-size 1 "
    "--global-batch-size 1"
)
SMALL = (
    "--num-layers 1 --hidden-size 128 --seq-length 64 --micro-batch-size 1 --global-batch-size 1"
)
HEAD = ("what", "workers", "tensors", "GB", "seconds", "CPU s", "GB/s", "over plain", "peak MiB")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dump", type=Path, metavar="FOLDER", help="measure this dump instead of a new one")
    add("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT")
    add("--every", type=int, default=16, metavar="N", help="plain: measure one tensor in N (16)")
    add("--rounds", type=int, default=3, metavar="N", help="repetitions; the best one counts (3)")
    add(
        "--records",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of tiny tensors in the second table (1000 10000 100000)",
    )
    add("--scratch", type=Path, metavar="FOLDER", help="folder for temporary files")
    add("--quick", action="store_true", help="use a small dump and 90 records; write no file")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/analysis.md")
    options = parser.parse_args(arguments)
    options.records = options.records or ([30, 90] if options.quick else [1000, 10_000, 100_000])
    if options.quick:
        options.every, options.rounds = 2, 1
    elif options.output is None:
        options.output = REPO / "docs" / "results" / "analysis.md"
    return options


def collect(folder: Path, flags: str) -> None:
    """Collect a dump from a training run whose model flags are `flags`."""
    print("collecting ...", file=sys.stderr)
    command = ["bash", "run_tensor_collection.sh", "single", "mxfp8", "--tensor-path", str(folder)]
    environment = {k: v for k, v in os.environ.items() if "QUANT" not in k}
    done = subprocess.run(
        [*command, "--", *flags.split()],
        cwd=REPO,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(f"[ERROR] nothing was collected: {done.stdout.strip().splitlines()[-1]}")


def write_tiny(folder: Path, count: int) -> None:
    """Write a dump of `count` tiny tensors: an index, and tensor files with identical content."""
    import torch

    from megatron.tensor_record import COMPONENTS, TensorRecord, index_name

    folder.mkdir()
    tensor = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    content = None
    with (folder / index_name("tiny", 0)).open("w", encoding="utf-8") as index:
        for counter in range(1, count + 1):
            record = TensorRecord(
                run_id="tiny",
                iteration=counter,
                micro_batch=0,
                sample_idx=0,
                counter=counter,
                timestamp="20250908_095220",
                layer_type="linear",
                layer_idx=0,
                module="decoder.layers.0.mlp.linear_fc1",
                operation="forward",
                phase="pre",
                component=COMPONENTS["linear"],
                tensor_name="input",
                quant_type="mxfp8",
                format="mxfp8",
                shape=[8, 32],
                dtype="bfloat16",
                dims="t h",
                global_shape=[8, 32],
                rank={"world": 0, "world_size": 1},
                recomputed=False,
                wall_time=0.0,
            )
            path = folder / record.filename
            if content is None:
                torch.save({"tensor": tensor, "metadata": record.to_metadata()}, path)
                content = path.read_bytes()
            path.write_bytes(content)
            line = record.to_metadata() | {"file": path.name, "bytes": len(content)}
            index.write(json.dumps(line) + "\n")


def measure(how: str, folder: Path, number: int, formats: list[str]) -> dict[str, float]:
    """Run analysis_worker.py in a separate process; return its measurements by name.

    Args:
        how: "ours" or "naive".
        folder: folder of the dump.
        number: number of workers for "ours"; for "naive", one tensor in `number` is measured.
        formats: names of the number formats.
    """
    command = [sys.executable, str(WORKER), how, str(folder), str(number), *formats]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count() if how == "naive" else 1)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"[ERROR] {' '.join(command)}:\n{done.stderr.strip()[-2000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def of_dump(folder: Path, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Time how long plain code and our code take for one dump's statistics; return table rows."""
    for path in folder.rglob("*.pt"):
        path.read_bytes()
    plain = measure("naive", folder, options.every, options.formats)
    workers = sorted({1, 2, os.cpu_count() or 1})
    runs = {number: [] for number in workers}
    # Alternate between the worker counts, so that other load on the machine affects all of them
    # alike.
    for _, number in itertools.product(range(options.rounds), workers):
        runs[number].append(measure("ours", folder, number, options.formats))
    rows = [_row("plain", "all", plain, plain)]
    for number, measured in runs.items():
        best = min(measured, key=lambda numbers: numbers["seconds"])
        best["peak"] = max(numbers["peak"] for numbers in measured)
        rows.append(_row("ours", str(number), best, plain))
    return rows


def _row(
    name: str, workers: str, numbers: dict[str, float], plain: dict[str, float]
) -> tuple[str, ...]:
    speed = numbers["bytes"] / numbers["seconds"] / 1e9
    ratio = speed / (plain["bytes"] / plain["seconds"] / 1e9)
    return (
        name,
        workers,
        f"{numbers['tensors']}",
        f"{numbers['bytes'] / 1e9:.3g}",
        f"{numbers['seconds']:.4g}",
        f"{numbers['cpu']:.4g}",
        f"{speed:.3g}",
        f"{ratio:.3g}",
        f"{numbers['peak']:.0f}",
    )


def linearity(scratch: Path, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Time our code on dumps with different numbers of tiny tensors; return one row per dump."""
    rows = []
    for count in options.records:
        folder = scratch / f"tiny{count}"
        write_tiny(folder, count)
        numbers = measure("ours", folder, os.cpu_count() or 1, options.formats)
        shutil.rmtree(folder)
        seconds, peak = numbers["seconds"], numbers["peak"]
        rows.append((f"{count}", f"{seconds:.4g}", f"{1000 * seconds / count:.3g}", f"{peak:.0f}"))
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    start = time.time()
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="analysis_") as name:
        scratch = Path(name)
        folder = options.dump
        if folder is None:
            folder = scratch / "dump"
            collect(folder, SMALL if options.quick else MODEL)
        rows = of_dump(folder, options)
        lines = linearity(scratch, options)
    processor = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor(),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "numba"))
    text = "\n".join(
        [
            "# Statistics of a dump",
            "",
            f"{processor}; {os.cpu_count()} cores; Python {platform.python_version()}, {versions}. "
            f"Formats: {', '.join(options.formats)}. All statistics are measured; those of formats "
            "with blocks are measured along both axes. Made by `python benchmarks/analysis.py` in "
            f"{time.time() - start:.0f} s.",
            "",
            results_page.table(HEAD, rows),
            "",
            f"The row plain measures one tensor in {options.every}, on all cores. In the rows "
            f"ours, times are the best of {options.rounds} rounds, and peaks are the largest.",
            "",
            "## Tiny tensors",
            "",
            results_page.table(("records", "seconds", "ms per record", "peak MiB"), lines),
            "",
        ]
    )
    results_page.publish(text, options.output)
    if options.output is not None:
        print(f"Wrote {options.output}", file=sys.stderr)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
