"""Measure the peak memory of a training step by sequence length, with and without tiles.

    python benchmarks/attention_memory.py
    python benchmarks/attention_memory.py --tiled 256 512 --whole 256 --output ""

Attention in tiles never forms the matrix of all queries and keys, so its memory grows linearly with
the sequence length. Each row is measured in a separate process, which trains one step with one
sequence. The model has the shape of the tiny Llama (4 layers of width 256, 8 heads) in bf16, with
the attention in MXFP8. Memory is the peak of the process minus the peak after the model is built;
on a GPU, only allocated memory counts.
Prints a Markdown table and writes it to `docs/results/attention_memory.md`, with the command.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("training_worker.py")
RECIPE = """
configs:
  attention:
    qk: mxfp8
    pv: {{format: mxfp8{tiles}}}
matchers:
  attention: {{config: attention, type: glob, pattern: "*.core_attention", enabled: true}}
"""
KINDS = {"tiles of 128 keys": ", tile: 128", "whole matrices": ""}
HEAD = ("attention", "sequence", "memory, MiB", "over the shortest", "step, s")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = {"nargs": "+", "type": int, "metavar": "LENGTH"}
    add("--tiled", default=[2048, 4096, 8192], help="lengths measured with tiles", **default)
    add("--whole", default=[2048, 4096], help="lengths measured without tiles", **default)
    add("--threads", type=int, default=os.cpu_count(), metavar="N")
    page = str(REPO / "docs" / "results" / "attention_memory.md")
    add("--output", default=page, metavar="FILE", help='report; "" writes none')
    return parser.parse_args(arguments)


def measure(recipe: Path, length: int, threads: int) -> tuple[float, float]:
    """Run one step in a new process; return the step's added memory in MiB and time in seconds."""
    command = [sys.executable, str(WORKER), "--hidden-size", "256", "--layers", "4"]
    command += ["--seq-length", str(length), "--dtype", "bf16"]
    command += ["--sequences", "1", "--micro-batches", "1"]
    environment = {key: value for key, value in os.environ.items() if "QUANT" not in key}
    environment |= {"OMP_NUM_THREADS": str(threads), "QUANT_RECIPE": str(recipe)}
    done = subprocess.run(
        command, input="\n", env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a step of {length} tokens failed:\n{done.stderr[-2000:]}")
    ready, step = (line.split() for line in done.stdout.splitlines()[-2:])
    return float(step[1]) - float(ready[1]), float(step[0])


def rows(kind: str, lengths: list[int], threads: int) -> list[tuple[str, ...]]:
    """Measure one kind of attention; return the rows of the table."""
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(RECIPE.format(tiles=KINDS[kind]))
        for length in sorted(lengths):
            measured.append((length, *measure(recipe, length, threads)))
            print(f"{kind}, {length} tokens: {measured[-1][1]:.0f} MiB", file=sys.stderr)
    first = measured[0][1]
    return [
        (kind, str(length), f"{memory:.0f}", f"{memory / first:.2f}", f"{seconds:.1f}")
        for length, memory, seconds in measured
    ]


def main() -> None:
    options = parse()
    lines = []
    for kind, lengths in zip(KINDS, (options.tiled, options.whole), strict=True):
        lines += rows(kind, lengths, options.threads)
    text = (
        "# Memory of attention by sequence length\n\n"
        f"`{results_page.quoted('attention_memory.py')}`\n\n"
        "Each row measures one training step with one sequence, in bf16 with attention in MXFP8. "
        "The model has 4 layers of\nwidth 256 with 8 heads. Memory is the peak during the step, "
        "minus the memory of the model.\n\n"
        f"{results_page.table(HEAD, lines)}\n"
    )
    results_page.publish(text, Path(options.output) if options.output else None)


if __name__ == "__main__":
    main()
