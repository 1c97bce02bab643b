"""Measure how accumulators affect the matmul results and the loss of a small model.

    python benchmarks/accumulator_study.py            # 17 runs
    python benchmarks/accumulator_study.py --quick    # 4 short runs and few accumulators
    python benchmarks/accumulator_study.py --seeds 1 2 --iterations 200 --output-dir /tmp/study

Trains a Llama with 2 layers in bf16, and collects its operands. They are quantized to fp8_e4m3 and
multiplied with sums of 10 to 23 bits, and with sums of 13 bits that are promoted after 32 to 4096
products. Then trains the same model in fp8_e4m3, on smaller batches, with several accumulators.
Runs with the same seed have the same weights and data.

A run with a complete log of the same command in --output-dir is not repeated. Writes the page
`accumulators.md`, the figure `accumulators.png` and the numbers `accumulators.csv`.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

import results_page

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.analysis.stats.paired import mean_interval  # noqa: E402
from megatron.analysis.store import TensorStore  # noqa: E402
from megatron.analysis.study import candidates_of  # noqa: E402
from megatron.analysis.study.accumulator_errors import study_accumulators  # noqa: E402
from megatron.console import ArgumentParser  # noqa: E402

LINE = re.compile(r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+|nan|inf)", re.IGNORECASE)
FORMAT = "fp8_e4m3"
RUNS = ("fp32", "hopper_fp8_promote128", "hopper_fp8", "fda:l32:f10:m10:rz")
BITS = tuple(range(10, 24))
INTERVALS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LAST = 50  #: number of iterations at the end whose mean loss is the final loss
MODEL = (
    *("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--hidden-dropout", "0", "--attention-dropout", "0"),
)
DATA = (
    *("--eval-iters", "0", "--split", "99,1,0", "--tokenizer-type", "SentencePieceTokenizer"),
    *("--tokenizer-model", "model/default/tokenizer.model"),
    *("--data-path", "dataset/default/corpus_text_document", "--log-interval", "1", "--bf16"),
    *("--lr-decay-style", "cosine", "--lr", "3e-3", "--min-lr", "3e-4", "--lr-warmup-iters"),
)


def flags(sequence: int, batch: int, warmup: int) -> list[str]:
    """Return the training flags that do not depend on the accumulator."""
    sizes = ["--micro-batch-size", str(batch), "--global-batch-size", str(batch)]
    return [*MODEL, "--seq-length", str(sequence), *DATA, str(warmup), *sizes]


def losses_of(log: Path, head: str, iterations: int) -> pd.Series | None:
    """Return a log's losses by iteration, or None if the log is incomplete or from other flags."""
    text = log.read_text() if log.is_file() else ""
    losses = {int(i): float(loss) for i, loss in LINE.findall(text)}
    return pd.Series(losses) if text.startswith(head) and len(losses) == iterations else None


def train(name: str, arguments: list[str], iterations: int, folder: Path) -> pd.Series:
    """Return the losses of a run; train first unless a complete log exists."""
    arguments = [*arguments, "--train-iters", str(iterations), "--seed", name.rpartition("seed")[2]]
    log, head = folder / f"{name.replace(':', '_')}.log", f"pretrain_gpt.py {' '.join(arguments)}\n"
    if (losses := losses_of(log, head, iterations)) is None:
        print(f"training {name}, log in {log}", file=sys.stderr)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            out.write(head)
            out.flush()
            command = [sys.executable, "pretrain_gpt.py", *arguments]
            done = subprocess.run(command, cwd=REPO, stdout=out, stderr=out, check=False)
        losses = losses_of(log, head, iterations)
        if done.returncode != 0 or losses is None:
            raise SystemExit(f"[ERROR] the run {name} failed; see {log}")
    return losses


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Return the errors of the last layer's linear_fc2 and attention, by accumulator.

    If accumulators.csv exists, its content is returned. Otherwise, a model is trained, and its
    operands are collected.
    """
    path, dump = options.output_dir / "accumulators.csv", options.output_dir / "dump"
    if path.is_file():
        return pd.read_csv(path)
    count = options.trained
    save = ["--save-tensors", "--tensor-save-dir", str(dump), "--collect-iterations", str(count)]
    size = (*options.batch, 2 if options.quick else 20)
    train("trained_seed1", [*flags(*size), *save], count, options.output_dir / "runs")
    names = [f"fda:l32:f{bits}:m{bits}:rz" for bits in options.bits]
    names += [f"fda:l32:f13:m13:rz:p{interval}" for interval in options.intervals]
    store = TensorStore(dump)
    records = store.records
    chosen = records["module"].str.contains("linear_fc2") | (records["layer_type"] == "attention")
    rows = study_accumulators(
        store,
        candidates_of([FORMAT], []),
        names,
        select=records[chosen & (records["layer_idx"] == 1)],
        progress=True,
    ).rows
    rows.to_csv(path, index=False)
    return rows


def error_table(rows: pd.DataFrame) -> str:
    """Return the relative error and gain of each GEMM and accumulator as a Markdown table."""
    rows = rows.assign(place=rows["operation"] + " " + rows["gemm"])
    parts = list(rows.groupby("place", sort=False))
    head = ["accumulator", *(f"{place}, K = {part['terms'].iloc[0]}" for place, part in parts)]
    lines = [[f"error of {FORMAT}", *(f"{p['format_error'].iloc[0]:.1e}" for _, p in parts)]]
    for name in rows["accumulator"].unique():
        cells = [part[part["accumulator"] == name].iloc[0] for _, part in parts]
        texts = [f"{cell['relative_error']:.1e} ({cell['gain']:+.0e})" for cell in cells]
        lines.append([f"`{name}`", *texts])
    return results_page.table(head, lines)


def loss_table(losses: dict[str, dict[int, pd.Series]]) -> str:
    """Return the final losses and their differences from fp32 as a Markdown table."""
    head = ["accumulator", "final loss", "minus fp32, mean", "95 % interval", "by seed"]
    lines = []
    finals = {
        name: {seed: run.iloc[-LAST:].mean() for seed, run in runs.items()}
        for name, runs in losses.items()
    }
    for name, by_seed in finals.items():
        apart = [value - finals["fp32"][seed] for seed, value in by_seed.items()]
        mean, interval = statistics.mean(apart), "-"
        if len(apart) > 1 and name != "fp32":
            ends = mean_interval(apart)
            interval = f"{ends.low:+.3f} to {ends.high:+.3f}"
        seeds = ", ".join(f"{value:+.3f}" for value in apart)
        final = statistics.mean(by_seed.values())
        lines.append([f"`{name}`", f"{final:.3f}", f"{mean:+.3f}", interval, seeds])
    return results_page.table(head, lines)


def draw(rows: pd.DataFrame, losses: dict[str, dict[int, pd.Series]], path: Path) -> None:
    """Draw the errors by kept bits and promotion interval, and the loss differences from fp32."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    promoted = rows["accumulator"].str.contains(":p")
    for ax, part, pattern, label_of_x in (
        (axes[0], rows[~promoted], r":m(\d+)", "Kept bits of the sum"),
        (axes[1], rows[promoted], r":p(\d+)", "Products between promotions (13 bits)"),
    ):
        xs = part["accumulator"].str.extract(pattern)[0].astype(int)
        for place, of_gemm in part.groupby(part["operation"] + " " + part["gemm"], sort=False):
            label = f"{place}, K = {of_gemm['terms'].iloc[0]}"
            ax.plot(xs[of_gemm.index], of_gemm["relative_error"], ".-", label=label)
        ax.set(yscale="log", xlabel=label_of_x, ylabel="Relative error of the sums")
    axes[1].set_xscale("log", base=2)
    axes[0].legend(frameon=False, fontsize="x-small")
    for number, name in enumerate(list(losses)[1:]):
        color = f"C{number}"
        runs = [run - losses["fp32"][seed] for seed, run in losses[name].items()]
        apart = pd.concat(runs, axis=1).rolling(LAST, min_periods=1).mean()
        axes[2].plot(apart.index, apart.mean(axis=1), color=color, label=name)
        band = apart.min(axis=1), apart.max(axis=1)
        axes[2].fill_between(apart.index, *band, color=color, alpha=0.15, linewidth=0)
    axes[2].set(xlabel="Iteration", ylabel="Loss minus that of fp32 (nats per token)")
    axes[2].legend(frameon=False, fontsize="x-small", title="Mean and range over the seeds")
    figure.savefig(path, dpi=110)


def page(
    rows: pd.DataFrame,
    losses: dict[str, dict[int, pd.Series]],
    command: str,
    options: argparse.Namespace,
) -> str:
    """Return the results page, with the tables of errors and of final losses."""
    seeds = ", ".join(map(str, losses["fp32"]))
    text = [
        "# Accumulators in a small model",
        f"`{command}`",
        "![Errors of sums, and differences in loss](accumulators.png)",
        "## Errors of single matmuls",
        f"The model is a Llama with 2 layers of width 128, trained in bf16 for {options.trained} "
        f"iterations of {options.batch[0] * options.batch[1]} tokens. The operands of "
        f"`linear_fc2` and of attention in the second layer are quantized to {FORMAT}. "
        "Each cell contains the relative error of the sums and, in parentheses, their gain: if it "
        "is below zero, results are too small. The first row is the error of the format, for "
        "comparison.",
        error_table(rows),
        "## Loss",
        f"The same model is trained for {options.iterations} iterations of 256 tokens, with all "
        f"matmuls in {FORMAT} and the seeds {seeds}. Runs with the same seed differ only in the "
        f"accumulator. The final loss is the mean of the last {LAST} iterations. Intervals are "
        "Student's t intervals of the mean difference over the seeds.",
        loss_table(losses),
    ]
    return "\n\n".join(text) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, metavar="N", help="default: 1 2 3 4")
    add("--iterations", type=int, metavar="N", help="iterations of each run; default: 500")
    add("--accumulators", nargs="+", default=RUNS[1:], metavar="NAME", help="compared with fp32")
    add("--quick", action="store_true", help="8 iterations, one seed and 3 measured accumulators")
    add("--output-dir", type=Path, default=REPO / "draw" / "accumulators", metavar="DIR")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or ([1] if options.quick else [1, 2, 3, 4])
    options.iterations = options.iterations or (8 if options.quick else 500)
    options.trained = 8 if options.quick else 150
    options.batch = (64, 2) if options.quick else (256, 16)  # sequence length, sequences per batch
    options.bits = (10, 13) if options.quick else BITS
    options.intervals = (128,) if options.quick else INTERVALS
    return options


def main() -> int:
    options = parse()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, REPO / "script" / "data" / "default_corpus.py"], check=True)
    rows = measure(options)
    common = [*flags(128, 2, min(20, options.iterations // 4)), "--custom-quant-type", FORMAT]
    runs = options.output_dir / "runs"
    losses = {
        name: {
            seed: train(
                f"{name}_seed{seed}",
                [*common, "--quant-accumulate", name],
                options.iterations,
                runs,
            )
            for seed in options.seeds
        }
        for name in dict.fromkeys(["fp32", *options.accumulators])
    }
    draw(rows, losses, options.output_dir / "accumulators.png")
    command = results_page.quoted("accumulator_study.py")
    text = page(rows, losses, command, options)
    results_page.publish(text, options.output_dir / "accumulators.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
