"""Measure how much time `--tensor-statistics` adds to a training step.

    python benchmarks/statistics_cost.py                  # bf16, mxfp8, mxfp4 and nvfp4
    python benchmarks/statistics_cost.py --types hifp8 --rounds 20

The model is that of `training.py`: a step has two micro-batches, of which the first is measured.
Each type has its own process. In this process, every second step is measured, so that other load on
the machine affects both kinds of steps alike. A ratio compares two consecutive steps; the table
shows its median and quartiles. The last column is the added time per step if every tenth step is
measured. Exits with status 1 if that is more than 5%.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import results_page
import training_worker

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

TYPES = ("bf16", "mxfp8", "mxfp4", "nvfp4")
EVERY = 10  #: interval in steps, assumed in the last column, at which statistics are measured
LIMIT = 0.05  #: largest accepted increase of the mean step time
WARM_UP = 2  #: number of pairs of steps at the start that do not count
HEAD = ("type", "step s", "measured step s", "ratio", "quartiles", "added at every tenth step")


def train(options: argparse.Namespace) -> None:
    """Train in pairs of steps, one without and one with statistics, and print their durations."""
    training_worker.load_cpu_backend()
    from megatron.core import tensor_saver
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, data = training_worker.build(options), training_worker.batches(options)
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        tensor_saver.configure({}, save_dir=folder, tensor_statistics=2)
        for _ in range(WARM_UP + options.rounds):
            seconds = []
            for _ in range(2):
                started = time.perf_counter()
                results = get_forward_backward_func()(
                    forward_step_func=training_worker.forward_step,
                    data_iterator=data,
                    model=model,
                    num_microbatches=options.micro_batches,
                    seq_length=options.seq_length,
                    micro_batch_size=options.sequences,
                )
                optimizer.step()
                optimizer.zero_grad()
                tensor_saver.observe(float(results[-1]["loss"]), None)
                seconds.append(time.perf_counter() - started)
            print("pair", *seconds, flush=True)
        operands = len(tensor_saver.statistics().latest)
        tensor_saver.close()
    print("operands", operands)


def measure(name: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the durations of each pair of steps after the warm-up, for one quantization type."""
    environment = {key: value for key, value in os.environ.items() if "QUANT" not in key}
    environment |= {"OMP_NUM_THREADS": str(options.threads), "CUSTOM_QUANT_TYPE": name}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, __file__, "--types", name, "--rounds", str(options.rounds)]
    command += ["--hidden-size", str(options.hidden_size), "--layers", str(options.layers)]
    command += ["--seq-length", str(options.seq_length), "--in-this-process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"[ERROR] {name} ended: {done.stderr.strip().splitlines()[-1:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    if ["operands", "0"] in lines:
        raise SystemExit(f"[ERROR] {name} measured no operands")
    pairs = [(float(words[1]), float(words[2])) for words in lines if words[:1] == ["pair"]]
    return pairs[WARM_UP:]


def row(name: str, pairs: list[tuple[float, float]]) -> tuple[list[str], float]:
    """Return a type's table row, and the share of time that statistics at every tenth step add."""
    plain, measured = zip(*pairs, strict=True)
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    added = (middle - 1) / EVERY
    cells = [name, *(f"{statistics.median(times):.4g}" for times in (plain, measured))]
    return [*cells, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{100 * added:.1f}%"], added


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--types", nargs="+", default=list(TYPES), metavar="TYPE")
    add("--hidden-size", type=int, default=1024, metavar="N")
    add("--layers", type=int, default=2, metavar="N")
    add("--seq-length", type=int, default=256, metavar="N")
    add("--rounds", type=int, default=12, metavar="N", help="pairs of steps after the warm-up")
    add("--threads", type=int, default=os.cpu_count(), metavar="N")
    add("--output", type=Path, metavar="FILE", help="file for the page (default: none)")
    add("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.in_this_process:
        options.dtype, options.sequences, options.micro_batches = "bf16", 2, 2
        train(options)
        return 0
    rows, added = zip(*(row(name, measure(name, options)) for name in options.types), strict=True)
    text = [
        "# What the statistics of operands cost",
        f"`{results_page.quoted('statistics_cost.py')}`",
        f"{options.layers} layers of width {options.hidden_size}, sequences of "
        f"{options.seq_length}, 2 micro-batches of 2 per step, bf16; {options.rounds} pairs of "
        f"steps, {options.threads} threads, torch {version('torch')}, megatron-core "
        f"{version('megatron-core')}. A measured step measures all operands of its first "
        "micro-batch.",
        results_page.table(HEAD, rows),
    ]
    results_page.publish("\n\n".join(text) + "\n", options.output)
    if max(added) > LIMIT:
        print(f"[ERROR] the statistics add more than {LIMIT:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
