"""Measure the step time and memory of training in each quantization type, relative to bf16.

    python benchmarks/training.py                       # the tiny Llama at hidden size 1024
    python benchmarks/training.py --types mxfp8 hifp8 recipe:examples/recipes/ocp_mxfp8.yaml
    python benchmarks/training.py --quick               # only check that it runs (seconds)

Llama 3.2 1B on one GPU, with one model at a time in its memory:

    python benchmarks/training.py --model llama32-1b --seq-length 2048 --sequences 1 \\
        --micro-batches 1 --one-at-a-time --types wheel bf16 mxfp8 mxfp4 nvfp4 hifp8 \\
        --output /tmp/gpu_2048.md

Each quantization type has its own process. The processes take turns, one step each per round, so
that other load on the machine affects all of them alike. A ratio compares two times of the same
round; the table shows its median and quartiles over the rounds. `wheel` is the megatron-core wheel
without this repository: bf16 with the repository's overlay should take as long.

With `--one-at-a-time`, a process builds its model after the previous one has ended, and a ratio
compares a step with the median step of bf16. If a model does not fit into the memory of the GPU,
its row says so, and the other types are still measured.

Memory is the peak of the process (on CUDA: of the allocated memory). A second column shows how much
training adds to the peak that is reached when libraries are loaded and the model is built. Prints a
Markdown table and writes it to `docs/results/training.md`, with the command.
"""

import argparse
import contextlib
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
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
    "The columns over bf16 give the value to their left divided by that of bf16. {ratio} The "
    "column added is the peak of training minus the peak that had been reached when the model was "
    "built, in MiB."
)
#: Explanation of the ratio of step times, without and with `--one-at-a-time`.
IN_ROUNDS = (
    "The types took turns, one step each per round. The ratio of step times is a median over the "
    "rounds, followed by its quartiles."
)
ONE_AT_A_TIME = (
    "The types ran one after the other. The ratio of step times compares each step with the median "
    "step of bf16; it is a median over the steps, followed by its quartiles."
)
WARM_UP = 2  #: number of steps of each worker that are not counted
SIZES = {"hidden_size": 1024, "layers": 4}  #: default sizes of the small model
#: Messages of torch, Triton and cuBLAS when the memory of the GPU is full.
OUT_OF_MEMORY = re.compile(r"CUDA[^\n]*out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


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
    add(
        "--model",
        choices=("small", "llama32-1b"),
        default="small",
        help="a small Llama of the given sizes, or Llama 3.2 1B (default: %(default)s)",
    )
    for name, size in SIZES.items():
        text = f"of the small model (default: {size})"
        add(f"--{name.replace('_', '-')}", type=int, default=None, metavar="N", help=text)
    add("--seq-length", type=int, default=256, metavar="N")
    count = {"type": int, "default": 2, "metavar": "N"}
    add("--sequences", help="sequences per micro-batch (default: %(default)s)", **count)
    add("--micro-batches", help="micro-batches per step (default: %(default)s)", **count)
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add(
        "--recompute-attention",
        action="store_true",
        help="compute attention again in the backward pass instead of storing its matrices",
    )
    add("--rounds", type=int, default=15, metavar="N", help="rounds after 2 of warm-up")
    add(
        "--one-at-a-time",
        action="store_true",
        help="measure one type after the other, so that only one model is in memory",
    )
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
    resolve_model(parser, options)
    if options.quick:
        options.hidden_size, options.layers, options.seq_length, options.rounds = 128, 1, 64, 3
    elif options.output is None:
        options.output = REPO / "docs" / "results" / "training.md"
    if options.rounds < 3:
        parser.error(f"--rounds is {options.rounds}, but quartiles need at least 3 rounds")
    options.types = list(dict.fromkeys(options.types))
    if BASE not in options.types:
        options.types.insert(0, BASE)
    return options


def resolve_model(parser: ArgumentParser, options: argparse.Namespace) -> None:
    """Set the default sizes of the small model, or refuse sizes for a model that has its own."""
    if options.model == "small":
        for name, size in SIZES.items():
            if getattr(options, name) is None:
                setattr(options, name, size)
        return
    named = {f"--{name.replace('_', '-')}": getattr(options, name) for name in SIZES}
    given = [option for option, size in named.items() if size is not None]
    if options.quick:
        given.append("--quick")
    if given:
        parser.error(
            f"{' and '.join(given)} cannot be combined with --model {options.model}, whose sizes "
            f"are fixed: remove {given[0] if len(given) == 1 else 'them'} or use --model small"
        )


class OutOfMemoryError(Exception):
    """Exception raised if a worker has ended because the memory of the GPU was full."""


class Worker:
    """Worker process that trains step by step with one quantization type."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name = name
        command = [sys.executable, str(WORKER), "--model", options.model]
        if options.model == "small":
            command += ["--hidden-size", str(options.hidden_size), "--layers", str(options.layers)]
        command += ["--seq-length", str(options.seq_length), "--dtype", options.dtype]
        command += ["--sequences", str(options.sequences)]
        command += ["--micro-batches", str(options.micro_batches)]
        command += ["--recompute-attention"] if options.recompute_attention else []
        command += ["--plain"] if name == "wheel" else []
        command += ["--wait"] if options.one_at_a_time else []
        environment = {k: v for k, v in os.environ.items() if "QUANT" not in k}
        environment |= {"OMP_NUM_THREADS": str(options.threads), "GOMP_SPINCOUNT": "1000"}
        environment.pop("PYTHONPATH", None)
        if name.startswith("recipe:"):
            environment["QUANT_RECIPE"] = str(REPO / name.removeprefix("recipe:"))
        elif name != "wheel":
            environment["CUSTOM_QUANT_TYPE"] = name
        #: Error output of the worker. It is a file, because a full pipe would block the worker.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=REPO.parent,
        )
        self.seconds: list[float] = []
        self.losses: list[float] = []
        #: Peak memory of the worker in MiB: after it built the model, and over all steps so far.
        self.built = self.peak = 0.0
        self.gpu = ""  #: name of the GPU that the worker uses, or empty
        self.out_of_memory = False

    def answer(self) -> str:
        """Return the worker's next result line, skipping lines that libraries print."""
        while line := self.process.stdout.readline():
            if line.startswith("ready") or line[0].isdigit():
                return line
        self.process.wait()
        self.errors.seek(0)
        text = self.errors.read().strip()
        lines = text.splitlines() or ["no message"]
        message = f"[ERROR] {self.name} ended: {lines[-1]}"
        if OUT_OF_MEMORY.search(text):
            raise OutOfMemoryError(f"{message} (--one-at-a-time measures one model at a time)")
        raise SystemExit(message)

    def begin(self) -> None:
        """Tell the waiting worker process to build its model."""
        self._send()

    def start(self) -> None:
        """Wait until the worker process has built its model."""
        _, built, *gpu = self.answer().strip().split(maxsplit=2)
        self.built, self.gpu = float(built), "".join(gpu)

    def step(self) -> None:
        """Make the worker process train one step, and record the step's duration and loss."""
        self._send()
        seconds, self.peak, loss = map(float, self.answer().split())
        self.seconds.append(seconds)
        self.losses.append(loss)

    def _send(self) -> None:
        # If the process has ended, the next call of `answer` reports why.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the worker process, which frees its memory."""
        with contextlib.suppress(BrokenPipeError):  # the process may have ended already
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def measure(options: argparse.Namespace) -> dict[str, Worker]:
    """Start one worker per type, let each train one step per round, and return them by name.

    The first two rounds are a warm-up; their times are not counted.
    """
    workers = [Worker(name, options) for name in options.types]
    try:
        for worker in tqdm(workers, desc="starting"):
            worker.start()
        order = random.Random(0)
        for _ in tqdm(range(options.rounds + WARM_UP), desc="rounds"):
            # The order is random, because a step's speed depends on which process ran before it.
            for worker in order.sample(workers, len(workers)):
                worker.step()
    except OutOfMemoryError as error:
        raise SystemExit(str(error)) from None
    finally:
        for worker in workers:
            worker.close()
    for worker in workers:
        worker.seconds = worker.seconds[WARM_UP:]
    return {worker.name: worker for worker in workers}


def measure_one_at_a_time(options: argparse.Namespace) -> dict[str, Worker]:
    """Run the workers one at a time until each has trained all its steps; return them by name.

    A worker that runs out of memory is marked. The others are still measured.
    """
    # All workers import their libraries now, and each waits for its turn before it uses the GPU.
    workers = {name: Worker(name, options) for name in options.types}
    try:
        for name, worker in tqdm(workers.items(), desc="types"):
            try:
                worker.begin()
                worker.start()
                for _ in range(options.rounds + WARM_UP):
                    worker.step()
                worker.seconds = worker.seconds[WARM_UP:]
                result = f"{statistics.median(worker.seconds):.4g} s per step"
            except OutOfMemoryError:
                worker.out_of_memory = True
                result = "out of memory"
            worker.close()
            tqdm.write(f"{name}: {result}", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.close()
    return workers


def ratios_of_times(worker: Worker, base: Worker, *, paired: bool) -> list[float]:
    """Return each step time of a worker divided by that of bf16.

    Args:
        paired: whether to divide by the time of the same round instead of the median time.
    """
    if paired:
        return [a / b for a, b in zip(worker.seconds, base.seconds, strict=True)]
    median = statistics.median(base.seconds)
    return [seconds / median for seconds in worker.seconds]


def row(worker: Worker, base: Worker, *, paired: bool) -> tuple[str, ...]:
    """Return the cells of the table row for one quantization type.

    A hyphen stands for each number that cannot be given, because the type or bf16 ran out of
    memory.
    """
    name = worker.name.removeprefix("recipe:")
    if worker.out_of_memory:
        return (f"{name} (out of memory)", *["-"] * (len(HEAD) - 1))
    added = worker.peak - worker.built
    time, quartiles, peak, memory = "-", "-", "-", "-"
    if not base.out_of_memory:
        low, middle, high = statistics.quantiles(ratios_of_times(worker, base, paired=paired), n=4)
        time, quartiles = f"{middle:.4g}", f"{low:.4g} to {high:.4g}"
        peak = f"{worker.peak / base.peak:.3g}"
        memory = f"{added / (base.peak - base.built):.3g}"
    median = f"{statistics.median(worker.seconds):.4g}"
    return (name, median, time, quartiles, f"{worker.peak:.0f}", peak, f"{added:.0f}", memory)


def page(options: argparse.Namespace, workers: dict[str, Worker]) -> str:
    """Return the report as Markdown: the setup and the table."""
    model = f"{options.layers} layers of width {options.hidden_size}"
    if options.model == "llama32-1b":
        model = "Llama 3.2 1B"
    number = options.micro_batches
    batch = f"{number} micro-batch{'' if number == 1 else 'es'} of {options.sequences} per step"
    recompute = ", attention recomputed" if options.recompute_attention else ""
    gpu = next((f"{worker.gpu}, " for worker in workers.values() if worker.gpu), "")
    facts = (
        f"{model}, sequences of {options.seq_length}, {batch}, {options.dtype}{recompute}; "
        f"{options.rounds} rounds, {gpu}{options.threads} threads, "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch "
        f"{version('torch')}, megatron-core {version('megatron-core')}."
    )
    paired = not options.one_at_a_time
    reading = READING.format(ratio=IN_ROUNDS if paired else ONE_AT_A_TIME)
    rows = [row(worker, workers[BASE], paired=paired) for worker in workers.values()]
    command = f"`{results_page.quoted('training.py')}`"
    table = results_page.table(HEAD, rows)
    return "\n\n".join(["# Training step", command, facts, reading, table]) + "\n"


def wrong_losses(workers: dict[str, Worker]) -> str | None:
    """Return an error message if losses show that a type was not applied, or that bf16 is wrong.

    Some CUDA kernels of the backward pass are not deterministic. On a GPU, only losses of the first
    step are therefore compared, which depend only on the forward pass. All losses of a recipe are
    compared, because it may quantize only the backward pass.
    """
    measured = [worker for worker in workers.values() if not worker.out_of_memory]
    unquantized = [worker for worker in measured if worker.name in (BASE, "wheel")]
    for worker in measured:
        first = bool(worker.gpu) and not worker.name.startswith("recipe:")
        steps = 1 if first else None
        if worker not in unquantized and any(
            worker.losses[:steps] == other.losses[:steps] for other in unquantized
        ):
            which, where = ("first losses", " in the forward pass") if first else ("losses", "")
            equal = f"the {which} of {worker.name} equal those of {BASE}"
            return f"{equal}, so {worker.name} was not applied{where}"
    steps = 1 if any(worker.gpu for worker in unquantized) else None
    if any(worker.losses[:steps] != unquantized[0].losses[:steps] for worker in unquantized):
        which = "losses" if steps is None else "first losses"
        return f"the {which} of {BASE} and of plain megatron-core differ"
    return None


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    workers = measure_one_at_a_time(options) if options.one_at_a_time else measure(options)
    results_page.publish(page(options, workers), options.output)
    if error := wrong_losses(workers):
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
