"""Train the tiny Llama in several formats on the same text and compare the loss curves.

    python benchmarks/loss_curves.py     # bf16 mxfp8 mxfp4 hifp8, 200 iterations, three seeds
    python benchmarks/loss_curves.py --types bf16 linear_mxfp4 --seeds 1 --iterations 100
    python benchmarks/loss_curves.py --text wikitext-2/valid.txt --seeds 1234 --iterations 500 \\
        --types bf16 mxfp8 mxfp4 recipe:examples/recipes/mxfp4_stochastic.yaml -- --lr 1e-3

The text is the default corpus, or the file given by --text. In both cases, the tokenizer of the
default corpus is used. Flags after -- are passed to pretrain_gpt.py.

Runs with the same seed start from the same weights and see the same data; they differ only in the
format. A single seed proves little, because small changes grow during training. The difference from
the first type is therefore computed for each seed, and its spread is shown. A run is not repeated
if --output-dir has a complete log of the same command. An interrupted benchmark can therefore be
continued, and seeds can be added.

Prints a Markdown table and writes it as `loss_curves.md`, with the command and the versions. Writes
the numbers as `loss_curves.csv` and the figure as `loss_curves.png`. Exits with status 1 if a loss
did not fall or if two types gave the same curve (then one of them was not applied).
"""

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import matplotlib

import results_page

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.analysis.plots.style import color_of  # noqa: E402
from megatron.console import ArgumentParser  # noqa: E402

TRAIN = REPO / "examples" / "llama" / "train_llama32_1b_h100_fp8.sh"
LINE = re.compile(r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+|nan|inf)", re.IGNORECASE)
TOKENIZER = REPO / "model" / "default" / "tokenizer.model"
RECIPE = "recipe:"
WINDOWS = 20  #: number of windows per run; each loss in the table is the mean over one window


def shown(quant_type: str) -> str:
    """Return the name that the table shows for a quantization type or a recipe file."""
    if quant_type.startswith(RECIPE):
        return f"recipe_{Path(quant_type).stem}"
    return quant_type


def tokenized(options: argparse.Namespace) -> list[str]:
    """Tokenize the text and return the arguments TOKENIZER and DATA of the training script.

    Both arguments are empty if no text is given; training then uses the default corpus.
    """
    if options.text is None:
        return ["", ""]
    prefix = options.output_dir / "text"
    subprocess.run([sys.executable, REPO / "script" / "data" / "default_corpus.py"], check=True)
    command = [sys.executable, REPO / "script" / "data" / "preprocess.py", "--append-eod"]
    command += ["--overwrite"]  # A resumed benchmark tokenizes the text again.
    command += ["--input", options.text, "--tokenizer-model", TOKENIZER]
    subprocess.run([*command, "--output-prefix", prefix], check=True)
    return [str(TOKENIZER), f"{prefix}_text_document"]


def train(quant_type: str, seed: int, options: argparse.Namespace) -> pd.Series:
    """Return the losses of one run; train first unless a complete log of the run exists."""
    name = f"{shown(quant_type)}_seed{seed}"
    log = options.output_dir / f"{name}.log"
    command = ["bash", str(TRAIN), "none", str(options.output_dir / "tensorboard" / name)]
    command += [*options.data, "bf16", "--preset", "tiny", "--train-iters", str(options.iterations)]
    command += ["--lr-decay-iters", str(options.iterations), "--seed", str(seed), *options.flags]
    environment = {name: value for name, value in os.environ.items() if "QUANT" not in name}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    if quant_type.startswith(RECIPE):
        command += ["--quant-recipe", str(REPO / quant_type.removeprefix(RECIPE))]
    else:
        environment["CUSTOM_QUANT_TYPE"] = quant_type
    head = f"CUSTOM_QUANT_TYPE={environment.get('CUSTOM_QUANT_TYPE', '')} {shlex.join(command)}\n"
    if (done := read_log(log, head, options.iterations)) is not None:
        print(f"{quant_type}, seed {seed} was already trained: {log}", file=sys.stderr)
        return done
    print(f"training {quant_type}, seed {seed}, log in {log}", file=sys.stderr)
    with log.open("w") as out:
        out.write(head)
        out.flush()
        status = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if status.returncode != 0:
        raise SystemExit(f"[ERROR] {name} ended with status {status.returncode}; see {log}")
    if (done := read_log(log, head, options.iterations)) is None:
        raise SystemExit(f"[ERROR] {log} lacks some of the {options.iterations} iterations")
    return done


def read_log(log: Path, head: str, iterations: int) -> pd.Series | None:
    """Return the losses in a run's log by iteration, or None if the log cannot be used.

    A log can be used if it is complete and begins with `head`, which contains the command.
    """
    text = log.read_text() if log.is_file() else ""
    losses = {int(i): float(loss) for i, loss in LINE.findall(text)}
    return pd.Series(losses) if text.startswith(head) and len(losses) == iterations else None


def train_all(options: argparse.Namespace) -> pd.DataFrame:
    """Train all runs; return their losses, one row per iteration and one column per run."""
    runs = list(itertools.product(options.types, options.seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        series = pool.map(lambda run: train(*run, options), runs)
        keys = [(shown(quant_type), seed) for quant_type, seed in runs]
        losses = pd.concat(dict(zip(keys, series, strict=True)), axis=1, names=["type", "seed"])
    return losses.rename_axis("iteration")


def differences(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the losses of each run minus those of the first type's run with the same seed."""
    first = losses[losses.columns[0][0]]
    return pd.concat({t: losses[t] - first for t in types_of(losses)}, axis=1)


def window_of(losses: pd.DataFrame) -> int:
    """Return the number of iterations over which the table averages the loss."""
    return max(1, len(losses) // WINDOWS)


def types_of(losses: pd.DataFrame) -> list[str]:
    """Return the quantization types in the order in which they were given."""
    return list(dict.fromkeys(losses.columns.get_level_values(0)))


def table(losses: pd.DataFrame) -> str:
    """Return a Markdown table of each type's mean loss and its difference from the first type's."""
    last, types = len(losses), types_of(losses)
    window = window_of(losses)
    rows = [["mean loss, iterations", *types]]
    for end in sorted({window, *(round(last * part / 4) for part in (1, 2, 3)), last}):
        start = max(1, end - window + 1)
        means = [losses.loc[start:end, t].to_numpy().mean() for t in types]
        rows.append([f"{start} to {end}", *(f"{mean:.4f}" for mean in means)])
    final = differences(losses).iloc[-window:].mean()
    percent = 100 * final.div(losses.iloc[-window:][types[0]].mean(), level=1)
    spread = [f"{x.mean():+.4f} ({x.min():+.4f} to {x.max():+.4f})" for x in map(final.get, types)]
    in_percent = [f"{x.mean():+.2f} %" for x in map(percent.get, types)]
    seeds = losses.columns.get_level_values(1).nunique()
    rows.append(
        [f"last {window}, minus {types[0]}: mean (least to most) of {seeds} seeds", *spread]
    )
    rows.append([f"the same, in % of {types[0]}", *in_percent])
    return results_page.table(rows[0], rows[1:])


def complaints(losses: pd.DataFrame) -> list[str]:
    """Return one error message per run whose loss did not fall and per pair of equal curves."""
    window = window_of(losses)
    start, end = losses.iloc[:window].mean(), losses.iloc[-window:].mean()
    errors = [f"{run}: the loss did not fall" for run in losses if not end[run] < start[run]]
    for a, b in itertools.combinations(losses.columns, 2):
        if a[1] == b[1] and losses[a].equals(losses[b]):
            errors.append(f"{a} and {b} have the same curve: one type was not applied")
    return errors


def draw(losses: pd.DataFrame, path: Path) -> None:
    """Plot each type's mean loss over the seeds and its difference from the first type's loss."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    window = window_of(losses)
    smooth = losses.rolling(window, min_periods=1).mean()
    apart = differences(smooth)
    for name in types_of(losses):
        color, index = color_of(name), losses.index
        top.plot(index, losses[name].mean(axis=1), color=color, alpha=0.25, linewidth=0.8)
        # A recipe may have the same color as a type, so recipes are drawn with dashed lines.
        dash = "--" if name.startswith("recipe_") else "-"
        top.plot(index, smooth[name].mean(axis=1), dash, color=color, label=name)
        bottom.plot(index, apart[name].mean(axis=1), dash, color=color)
        band = apart[name].min(axis=1), apart[name].max(axis=1)
        bottom.fill_between(index, *band, color=color, alpha=0.15, linewidth=0)
    seeds = losses.columns.get_level_values(1).nunique()
    top.set(ylabel="Language-model loss (nats per token)")
    of_seeds = "One seed" if seeds == 1 else f"Mean of {seeds} seeds"
    top.legend(frameon=False, title=f"{of_seeds}; thick: mean of {window} iterations")
    bottom.set(xlabel="Iteration", ylabel=f"Difference to {types_of(losses)[0]}")
    if seeds > 1:
        bottom.set_title("Mean and range over the seeds", fontsize="small", loc="left")
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--types",
        nargs="+",
        default=["bf16", "mxfp8", "mxfp4", "hifp8"],
        metavar="TYPE",
        help="quantization types, or recipe:FILE (default: %(default)s)",
    )
    add("--seeds", nargs="+", type=int, default=[1234, 1235, 1236], metavar="N")
    add("--iterations", type=int, default=200, metavar="N")
    add("--text", type=Path, metavar="FILE", help="text to train on (default: the default corpus)")
    add("--jobs", type=int, default=1, metavar="N", help="simultaneous runs")
    add("--output-dir", type=Path, default=REPO / "draw" / "loss_curves", metavar="DIR")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text {options.text} is not a file; give a text file, or omit --text")
    return options


def main() -> int:
    options = parse()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    options.data = tokenized(options)
    losses = train_all(options)
    losses.to_csv(options.output_dir / "loss_curves.csv")
    draw(losses, options.output_dir / "loss_curves.png")
    text = table(losses)
    print(text)
    command = results_page.quoted("loss_curves.py")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    source = f"Made by `{command}` with {versions}."
    (options.output_dir / "loss_curves.md").write_text(f"{text}\n\n{source}\n")
    errors = complaints(losses)
    for error in errors:
        print(f"[ERROR] {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
