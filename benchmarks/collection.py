"""Measure the cost of tensor collection (step time, blocked time, memory) and its writing speed.

    python benchmarks/collection.py                       # compared with mindstudio-probe
    python benchmarks/collection.py --peers-python .venv-peers/bin/python
    python benchmarks/collection.py --quick               # only check that it runs (seconds)

Each mode of collection runs in a separate process. In each round, every process trains one step, in
random order, so that other load on the machine affects all of them alike:

    plain       no collection
    idle        collection switched on, but no iteration selected
    sparse      every N-th iteration (--every)
    everything  all tensors of all micro-batches of every iteration
    msprobe     mindstudio-probe dumps the same model (level L0: inputs, outputs, weights and
                gradients of every module), with its synchronous and its asynchronous dump

Tensors are deleted after each step. `blocked` is the time that the training thread spends in the
collection; it is compared with plain copies of the same tensors to the host in the same step.
`on disk` is the time until the last tensor is written. The writer is also measured without
training and compared with raw sequential writes of the same size to the same disk; see
`writing_speed.py`.

Prints Markdown and writes it to `docs/results/collection.md`, with the command.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

import peers_env
import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("collection_worker.py")
MODES = ("plain", "idle", "sparse", "everything", "msprobe", "msprobe async")
HEAD = (
    "collection",
    "step s",
    "over plain",
    "quartiles",
    "until on disk s",
    "over plain",
    "tensors",
    "MB",
    "peak MiB",
)
#: Text that the report adds for each kind of raw write; `writing_speed.py` defines the kinds.
RAW = {"raw": "", "direct": ", bypassing the page cache"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name, default in (("hidden-size", 1024), ("layers", 4), ("seq-length", 256)):
        add(f"--{name}", type=int, default=default, metavar="N")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add(
        "--every",
        type=int,
        default=5,
        metavar="N",
        help="sparse collects every N-th iteration (default: %(default)s)",
    )
    add("--rounds", type=int, default=20, metavar="N", help="rounds after 2 of warm-up")
    add("--threads", type=int, default=os.cpu_count(), metavar="N")
    add(
        "--host-gib",
        type=float,
        default=1.0,
        metavar="X",
        help="--collect-max-host-gib of our collection (default: %(default)g)",
    )
    add(
        "--disk-mib",
        type=int,
        default=3072,
        metavar="N",
        help="MiB that the writer alone writes in each of 5 rounds (default: %(default)s)",
    )
    add(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder on the disk to measure (default: the folder for temporary files)",
    )
    add(
        "--peers-python",
        type=Path,
        metavar="PATH",
        help="Python with mindstudio-probe and megatron-core (default: .venv-peers, made if "
        "missing)",
    )
    add("--no-peers", action="store_true", help="do not measure mindstudio-probe")
    add("--quick", action="store_true", help="hidden size 64, 1 layer, 6 rounds; write no file")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="report (default: docs/results/collection.md; none with --quick)",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden_size, options.layers, options.seq_length, options.rounds = 64, 1, 32, 6
        options.every, options.disk_mib = 3, 4
    elif options.output is None:
        options.output = REPO / "docs" / "results" / "collection.md"
    if options.rounds < max(3, 2 * options.every):
        parser.error(f"--rounds is {options.rounds}; give at least 3 and at least twice --every")
    return options


class Worker:
    """Worker process that trains step by step in one collection mode."""

    def __init__(self, name: str, python: Path, folder: Path, options: argparse.Namespace):
        self.name = name
        folder.mkdir()
        mode, _, asynchronous = name.partition(" ")
        command = [str(python), str(WORKER), mode, "--folder", str(folder)]
        for option in (
            "every",
            "host_gib",
            "hidden_size",
            "layers",
            "seq_length",
            "dtype",
            "disk_mib",
        ):
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("CUSTOM_", "QUANT"))
        }
        environment |= {"OMP_NUM_THREADS": str(options.threads), "GOMP_SPINCOUNT": "1000"}
        environment.pop("PYTHONPATH", None)
        self.log = folder.with_suffix(".log")
        self.process = subprocess.Popen(
            command + (["--async-dump"] if asynchronous else []),
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
        )
        self.steps: list[dict[str, float]] = []

    def answer(self, prefix: str) -> str:
        """Return the worker's next output line that starts with `prefix`; skip all other lines."""
        while line := self.process.stdout.readline():
            if line.startswith(prefix):
                return line
        message = self.log.read_text().strip().splitlines()
        raise SystemExit(f"[ERROR] {self.name} ended: {message[-1] if message else 'no message'}")

    def ask(self, request: str) -> dict:
        """Send one request to the worker and return the measurements in its answer."""
        try:
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # The process has ended; the call to `answer` below reports why.
        return json.loads(self.answer("{"))

    def end(self) -> None:
        """Kill the worker process."""
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def python_of_peers(options: argparse.Namespace) -> Path | None:
    """Return a Python that has mindstudio-probe; None if mindstudio-probe is not measured."""
    if options.no_peers:
        return None
    given = options.peers_python
    python = peers_env.made() if given is None else peers_env.given(given)
    installed = peers_env.installed(python)
    if missing := {"mindstudio-probe", "megatron-core"} - installed.keys():
        peers_env.say(
            "[WARNING] mindstudio-probe is not measured, because "
            f"{python} lacks {' and '.join(sorted(missing))}"
        )
        return None
    return python


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Worker], dict, str]:
    """Measure training steps in every collection mode, then the writing speed without training.

    Return the workers by mode, the writing speeds, and the release of mindstudio-probe.
    """
    peers = python_of_peers(options)
    modes = [mode for mode in MODES if peers is not None or not mode.startswith("msprobe")]
    workers = []
    try:
        for number, mode in enumerate(modes):
            python = peers if mode.startswith("msprobe") else Path(sys.executable)
            workers.append(Worker(mode, python, folder / str(number), options))
        for worker in tqdm(workers, desc="starting"):
            worker.answer("ready")
        order = random.Random(0)
        for _ in tqdm(range(options.rounds + 2), desc="rounds"):
            # The order is random, because a step's speed depends on which process ran before it.
            for worker in order.sample(workers, len(workers)):
                worker.steps.append(worker.ask("step"))
        disk = next(worker for worker in workers if worker.name == "plain").ask("disk")
    finally:
        for worker in workers:
            worker.end()
    for worker in workers:
        worker.steps = worker.steps[2:]
    release = peers_env.installed(peers)["mindstudio-probe"] if peers is not None else ""
    return {worker.name: worker for worker in workers}, disk, release


def windows(values: list[float], size: int) -> list[float]:
    """Return the mean of each complete group of `size` consecutive values."""
    return [
        statistics.fmean(values[start : start + size])
        for start in range(0, len(values) - size + 1, size)
    ]


def row(worker: Worker, plain: Worker, size: int) -> tuple[str, ...]:
    """Return the cells of the table row for one collection mode.

    Times are averaged over groups of `size` consecutive steps. In the mode "sparse", one step of
    each group is collected.
    """
    whole = [step["step"] + step["rest"] for step in worker.steps]
    base = windows([step["step"] for step in plain.steps], size)
    steps = windows([step["step"] for step in worker.steps], size)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(steps, base, strict=True)], n=4)
    on_disk = [a / b for a, b in zip(windows(whole, size), base, strict=True)]
    collected = [step for step in worker.steps if step["tensors"]] or worker.steps
    return (
        worker.name,
        f"{statistics.median(steps):.4g}",
        f"{middle:.4g}",
        f"{low:.4g} to {high:.4g}",
        f"{statistics.median(windows(whole, size)):.4g}",
        f"{statistics.median(on_disk):.4g}",
        f"{statistics.median(step['tensors'] for step in collected):.0f}",
        f"{statistics.median(step['bytes'] for step in collected) / 1e6:.4g}",
        f"{max(step['peak'] for step in worker.steps):.0f}",
    )


def findings(workers: dict[str, Worker], disk: dict, options: argparse.Namespace) -> list[str]:
    """Return a list of Markdown items with the results that the table does not show."""
    steps = workers["everything"].steps
    ratios = [step["blocked"] / step["copies"] for step in steps]
    low, middle, high = statistics.quantiles(ratios, n=4)
    blocked = statistics.median(step["blocked"] for step in steps)
    host = max(step["host"] for step in steps)
    return [
        f"- If everything is collected, the training thread is blocked for {blocked * 1e3:.4g} ms "
        f"per step, which is {middle:.3g} times the time of plain copies of the same tensors to "
        f"the host (quartiles {low:.3g} to {high:.3g}).",
        f"- Host memory used by the collection: at most {host:.0f} MiB of the permitted "
        f"{options.host_gib * 1024:.0f} MiB (`--collect-max-host-gib`).",
        f"- The writer alone, with {options.disk_mib} MiB per round until all data is on the disk: "
        f"{statistics.median(disk['ours']) / 1e9:.3g} GB/s.",
        *(
            f"- A raw sequential write of the same size to the same disk{RAW[name]}: "
            f"{statistics.median(disk[name]) / 1e9:.3g} GB/s; {_beside(disk, name)}."
            for name in RAW
            if name in disk
        ),
    ]


def _beside(disk: dict[str, list[float]], name: str) -> str:
    """Describe the ratio of our writing speed to that of a kind of raw write: median and range."""
    shares = [ours / raw for ours, raw in zip(disk["ours"], disk[name], strict=True)]
    return (
        f"the writer reaches {statistics.median(shares):.3g} times this speed "
        f"({min(shares):.3g} to {max(shares):.3g} in single rounds)"
    )


def page(options: argparse.Namespace, workers: dict[str, Worker], disk: dict, release: str) -> str:
    """Return the report as Markdown: the setup, the table and the other results."""
    sizes = {name: options.every if name in ("sparse", "idle") else 1 for name in workers}
    table = [row(worker, workers["plain"], sizes[name]) for name, worker in workers.items()]
    table = [
        (f"sparse, 1 in {options.every}" if cells[0] == "sparse" else cells[0], *cells[1:])
        for cells in table
    ]
    peer = f", mindstudio-probe {release}" if release else ""
    facts = (
        f"{options.layers} layers of width {options.hidden_size}, sequences of "
        f"{options.seq_length}, 2 micro-batches of 2 per step, {options.dtype}, no quantization; "
        f"{options.rounds} rounds, {options.threads} threads, "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch "
        f"{version('torch')}, megatron-core {version('megatron-core')}{peer}."
    )
    head = ["# Collection", "", f"`{results_page.quoted('collection.py')}`", "", facts, ""]
    return "\n".join(
        [*head, results_page.table(HEAD, table), "", *findings(workers, disk, options), ""]
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(tempfile.mkdtemp(prefix="collection_", dir=options.folder))
    try:
        text = page(options, *measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results_page.publish(text, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
