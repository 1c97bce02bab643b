"""Full statistics of a dump: ours beside plain torch and numpy, with one worker and two, and over
100,000 records.

    python benchmarks/analysis.py                     # collects 2 GB, measures, deletes: minutes
    python benchmarks/analysis.py --dump FOLDER       # of a dump that is there
    python benchmarks/analysis.py --quick             # small, seconds: does it run?

The dump comes from run_tensor_collection.sh: the tiny Llama with a larger hidden size, one
iteration in mxfp8. It is read once before, so that all find it in memory. `plain` loads a file,
copies it to float32 and makes one call of torch or numpy for each statistic and format (on all
cores), of one tensor in some; its time is scaled by the bytes. What values become is computed by
our fused kernels there too. Each measurement has a process of its own, whose peak memory is shown;
CPU seconds are those of all its threads.

The records for the linearity are tiny tensors (8 x 32, bf16), written for the purpose.
Prints Markdown tables and writes them to `docs/results/analysis.md`, with the command.
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

REPO = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("analysis_worker.py")
FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3")
#: Flags of pretrain_gpt.py for about 2 GB; and for --quick.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dump", type=Path, metavar="FOLDER", help="statistics of this dump; nothing is collected")
    add("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT")
    add("--every", type=int, default=16, metavar="N", help="plain: one tensor in N (16)")
    add("--rounds", type=int, default=3, metavar="N", help="the best of so many counts (3)")
    add(
        "--records",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of tiny tensors, for the linearity (1000 10000 100000)",
    )
    add("--scratch", type=Path, metavar="FOLDER", help="for what is written and deleted again")
    add("--quick", action="store_true", help="a small dump, 90 records; writes no file")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/analysis.md")
    options = parser.parse_args(arguments)
    options.records = options.records or ([30, 90] if options.quick else [1000, 10_000, 100_000])
    if options.quick:
        options.every, options.rounds = 2, 1
    elif options.output is None:
        options.output = REPO / "docs" / "results" / "analysis.md"
    return options


def collect(folder: Path, flags: str) -> None:
    """A dump of real tensors."""
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
    """A dump of tiny tensors with an index: the bytes of one file, under as many names."""
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
    """One measurement, see the worker."""
    command = [sys.executable, str(WORKER), how, str(folder), str(number), *formats]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count() if how == "naive" else 1)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"[ERROR] {' '.join(command)}:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_dump(folder: Path, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Rows of the first table."""
    for path in folder.rglob("*.pt"):
        path.read_bytes()
    plain = measure("naive", folder, options.every, options.formats)
    workers = sorted({1, 2, os.cpu_count() or 1})
    runs = {number: [] for number in workers}
    for _, number in itertools.product(range(options.rounds), workers):  # in turns
        runs[number].append(measure("ours", folder, number, options.formats))
    rows = [_row("plain", "all", plain, plain)]
    for number, measured in runs.items():
        best = min(measured, key=lambda each: each["seconds"])
        best["peak"] = max(each["peak"] for each in measured)
        rows.append(_row("ours", str(number), best, plain))
    return rows


def _row(
    what: str, workers: str, one: dict[str, float], plain: dict[str, float]
) -> tuple[str, ...]:
    speed = one["bytes"] / one["seconds"] / 1e9
    ratio = speed / (plain["bytes"] / plain["seconds"] / 1e9)
    return (
        what,
        workers,
        f"{one['tensors']}",
        f"{one['bytes'] / 1e9:.3g}",
        f"{one['seconds']:.4g}",
        f"{one['cpu']:.4g}",
        f"{speed:.3g}",
        f"{ratio:.3g}",
        f"{one['peak']:.0f}",
    )


def linearity(scratch: Path, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Rows of the second table."""
    rows = []
    for count in options.records:
        folder = scratch / f"tiny{count}"
        write_tiny(folder, count)
        one = measure("ours", folder, os.cpu_count() or 1, options.formats)
        shutil.rmtree(folder)
        each = 1000 * one["seconds"] / count
        rows.append((f"{count}", f"{one['seconds']:.4g}", f"{each:.3g}", f"{one['peak']:.0f}"))
    return rows


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    sys.path.insert(0, str(REPO))
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
            f"Formats: {', '.join(options.formats)}; every statistic, along both axes where there "
            f"are blocks. Made by `python benchmarks/analysis.py` in {time.time() - start:.0f} s.",
            "",
            *table(HEAD, rows),
            "",
            f"Plain: one tensor in {options.every}, on all cores. Ours: the best of "
            f"{options.rounds}; the peak is the largest.",
            "",
            "## Tiny tensors",
            "",
            *table(("records", "seconds", "ms a record", "peak MiB"), lines),
            "",
        ]
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
        print(f"Wrote {options.output}", file=sys.stderr)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
