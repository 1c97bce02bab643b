"""Measure the step time and memory of training in each quantization type, relative to bf16.

    python benchmarks/training.py                       # the tiny Llama at hidden size 1024
    python benchmarks/training.py --types mxfp8 hifp8 recipe:examples/recipes/ocp_mxfp8.yaml
    python benchmarks/training.py --quick               # only check that it runs (seconds)

Each quantization type has its own process. The processes take turns, one step each per round, so
that other load on the machine affects all of them alike. A ratio compares two times of the same
round; the table shows its median and quartiles over the rounds. `wheel` is the megatron-core wheel
without this repository: bf16 with the repository's overlay should take as long.

Memory is the peak of the process (on CUDA: of the allocated memory). A second column shows how much
training adds to the peak that is reached when libraries are loaded and the model is built. Prints a
Markdown table and writes it to `docs/results/training.md`, with the command.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("training_worker.py")
TYPES = (
    "wheel",
    "bf16",
    "mxfp8",
    "mxfp4",
    "hifp8",
    "nvfp4",
    "linear_mxfp8",
    "FA_mxfp8",
    "recipe:examples/recipes/mxfp4_stochastic.yaml",
)
BASE = "bf16"
HEAD = ("type", "step s", "over bf16", "quartiles", "peak MiB", "over bf16", "added", "over bf16")
READING = (
    "The columns over bf16 give the value to their left divided by that of bf16. The ratio of step "
    "times is a median over the rounds, followed by its quartiles. The column added is the peak of "
    "training minus the peak that had been reached when the model was built, in MiB."
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--types",
        nargs="+",
        default=list(TYPES),
        metavar="TYPE",
        help="wheel, quantization types, or recipe:FILE (default: %(default)s)",
    )
    add("--hidden-size", type=int, default=1024, metavar="N")
    add("--layers", type=int, default=4, metavar="N")
    add("--seq-length", type=int, default=256, metavar="N")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--rounds", type=int, default=15, metavar="N", help="rounds after 2 of warm-up")
    add("--threads", type=int, default=os.cpu_count(), metavar="N")
    add("--quick", action="store_true", help="hidden size 128, 1 layer, 3 rounds; write no file")
    add(
        "--output",
        type=Path,
        default=None,
        metavar="FILE",
        help="report (default: docs/results/training.md; none with --quick)",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden_size, options.layers, options.seq_length, options.rounds = 128, 1, 64, 3
    elif options.output is None:
        options.output = REPO / "docs" / "results" / "training.md"
    if options.rounds < 3:
        parser.error(f"--rounds is {options.rounds}, but quartiles need at least 3 rounds")
    if BASE not in options.types:
        options.types.insert(0, BASE)
    return options


class Worker:
    """Worker process that trains step by step with one quantization type."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name = name
        command = [sys.executable, str(WORKER), "--hidden-size", str(options.hidden_size)]
        command += ["--layers", str(options.layers), "--seq-length", str(options.seq_length)]
        command += ["--dtype", options.dtype, *(["--plain"] if name == "wheel" else [])]
        environment = {k: v for k, v in os.environ.items() if "QUANT" not in k}
        environment |= {"OMP_NUM_THREADS": str(options.threads), "GOMP_SPINCOUNT": "1000"}
        environment.pop("PYTHONPATH", None)
        if name.startswith("recipe:"):
            environment["QUANT_RECIPE"] = str(REPO / name.removeprefix("recipe:"))
        elif name != "wheel":
            environment["CUSTOM_QUANT_TYPE"] = name
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPO.parent,
        )
        self.seconds: list[float] = []
        self.losses: list[float] = []
        #: Peak memory of the worker in MiB: after it built the model, and over all steps so far.
        self.built = self.peak = 0.0

    def answer(self) -> str:
        """Return the worker's next result line, skipping lines that libraries print."""
        while line := self.process.stdout.readline():
            if line.startswith("ready") or line[0].isdigit():
                return line
        message = self.process.stderr.read().strip().splitlines()
        raise SystemExit(f"[ERROR] {self.name} ended: {message[-1] if message else 'no message'}")

    def step(self) -> None:
        """Let the worker process train one step, and record the step's duration and loss."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # The process has ended; the call to `answer` below reports why.
        seconds, self.peak, loss = map(float, self.answer().split())
        self.seconds.append(seconds)
        self.losses.append(loss)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace) -> dict[str, Worker]:
    """Start one worker per type, let each train one step per round, and return them by name.

    The first two rounds are a warm-up; their times are not counted.
    """
    workers = [Worker(name, options) for name in options.types]
    try:
        for worker in tqdm(workers, desc="starting"):
            worker.built = float(worker.answer().split()[1])
        order = random.Random(0)
        for _ in tqdm(range(options.rounds + 2), desc="rounds"):
            # The order is random, because a step's speed depends on which process ran before it.
            for worker in order.sample(workers, len(workers)):
                worker.step()
    finally:
        for worker in workers:
            worker.process.stdin.close()
            worker.process.kill()
            worker.process.wait()
    for worker in workers:
        worker.seconds = worker.seconds[2:]
    return {worker.name: worker for worker in workers}


def rows(workers: dict[str, Worker]) -> list[tuple[str, ...]]:
    """Return the rows of the table, one per quantization type."""
    base = workers[BASE]
    table = []
    for worker in workers.values():
        ratios = [a / b for a, b in zip(worker.seconds, base.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.append(
            (
                worker.name.removeprefix("recipe:"),
                f"{statistics.median(worker.seconds):.4g}",
                f"{middle:.4g}",
                f"{low:.4g} to {high:.4g}",
                f"{worker.peak:.0f}",
                f"{worker.peak / base.peak:.3g}",
                f"{worker.peak - worker.built:.0f}",
                f"{(worker.peak - worker.built) / (base.peak - base.built):.3g}",
            )
        )
    return table


def page(options: argparse.Namespace, table: list[tuple[str, ...]]) -> str:
    """Return the report as Markdown: the setup and the table."""
    facts = (
        f"{options.layers} layers of width {options.hidden_size}, sequences of "
        f"{options.seq_length}, 2 micro-batches of 2 per step, {options.dtype}; "
        f"{options.rounds} rounds, {options.threads} threads, "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch "
        f"{version('torch')}, megatron-core {version('megatron-core')}."
    )
    command = results_page.quoted("training.py")
    parts = ["# Training step", f"`{command}`", facts, READING, results_page.table(HEAD, table)]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    workers = measure(options)
    text = page(options, rows(workers))
    results_page.publish(text, options.output)
    unquantized = [w.losses for w in workers.values() if w.name in (BASE, "wheel")]
    for name, worker in workers.items():
        if name not in (BASE, "wheel") and worker.losses in unquantized:
            print(
                f"[ERROR] the losses of {name} equal those of {BASE}, so {name} was not applied",
                file=sys.stderr,
            )
            return 1
    if len({tuple(losses) for losses in unquantized}) > 1:
        print(f"[ERROR] the losses of {BASE} and of plain megatron-core differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
