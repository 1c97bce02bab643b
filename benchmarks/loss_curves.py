"""Train the tiny Llama on the default corpus in several formats and compare the loss curves.

    python benchmarks/loss_curves.py                      # bf16 mxfp8 mxfp4 hifp8, 200 iterations
    python benchmarks/loss_curves.py --types bf16 linear_mxfp4 --iterations 100

Same model, seed and data order in every run: what differs is the format. Prints a Markdown table,
writes it with the command and the versions as `loss_curves.md`, the numbers as `loss_curves.csv`
and the picture as `loss_curves.png`. Exits 1 if a loss did not fall or if two formats gave the same
curve (then one of them was not applied).
"""

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.analysis.plots.style import colour_of  # noqa: E402

TRAIN = REPO / "examples" / "llama" / "train_llama32_1b_h100_fp8.sh"
LINE = re.compile(r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+|nan|inf)", re.IGNORECASE)
WINDOW = 10  #: iterations that a figure of the table is the mean of


def train(quant_type: str, options: argparse.Namespace) -> pd.Series:
    """Loss by iteration of one run."""
    log = options.output_dir / f"loss_curves_{quant_type}.log"
    command = ["bash", str(TRAIN), "none", str(options.output_dir / "tensorboard" / quant_type)]
    command += ["", "", "bf16", "--preset", "tiny", "--train-iters", str(options.iterations)]
    command += ["--lr-decay-iters", str(options.iterations), "--seed", str(options.seed)]
    environment = os.environ | {"CUSTOM_QUANT_TYPE": quant_type}
    print(f"training {quant_type}, log in {log}", file=sys.stderr)
    with log.open("w") as out:
        status = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if status.returncode != 0:
        raise SystemExit(f"[ERROR] {quant_type} ended with status {status.returncode}; see {log}")
    found = {int(i): float(loss) for i, loss in LINE.findall(log.read_text())}
    if len(found) != options.iterations:
        raise SystemExit(f"[ERROR] {log} has {len(found)} of {options.iterations} iterations")
    return pd.Series(found, name=quant_type)


def table(losses: pd.DataFrame) -> str:
    """Means over a few windows and the difference to the first type, as Markdown."""
    last = len(losses)
    ends = sorted({WINDOW, *(round(last * part / 4) for part in (1, 2, 3)), last})
    rows = [["iterations", *losses.columns]]
    for end in ends:
        means = losses.loc[max(1, end - WINDOW + 1) : end].mean()
        rows.append([f"{max(1, end - WINDOW + 1)} to {end}", *(f"{x:.4f}" for x in means)])
    final = losses.loc[last - WINDOW + 1 :].mean()
    reference = losses.columns[0]
    rows.append(
        [f"last {WINDOW}, minus {reference}", *(f"{x - final.iloc[0]:+.4f}" for x in final)]
    )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def complaints(losses: pd.DataFrame) -> list[str]:
    """What must not be: a loss that does not fall, or a format that changes nothing."""
    found = []
    start, end = losses.iloc[:WINDOW].mean(), losses.iloc[-WINDOW:].mean()
    found += [f"{name}: the loss did not fall" for name in losses if not end[name] < start[name]]
    for i, a in enumerate(losses):
        same = [b for b in losses.columns[i + 1 :] if losses[a].equals(losses[b])]
        found += [f"{a} and {b} have the same curve: one was not applied" for b in same]
    return found


def draw(losses: pd.DataFrame, path: Path) -> None:
    """One line a type, and below it the difference to the first."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    smooth = losses.rolling(WINDOW, min_periods=1).mean()
    for name in losses:
        colour = colour_of(name)
        top.plot(losses.index, losses[name], color=colour, alpha=0.25, linewidth=0.8)
        top.plot(smooth.index, smooth[name], color=colour, label=name)
        bottom.plot(smooth.index, smooth[name] - smooth.iloc[:, 0], color=colour)
    top.set(ylabel="Language-model loss (nats a token)")
    top.legend(frameon=False, title=f"Thick: mean of {WINDOW} iterations")
    bottom.set(xlabel="Iteration", ylabel=f"Difference to {losses.columns[0]}")
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=["bf16", "mxfp8", "mxfp4", "hifp8"])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--output-dir", type=Path, default=REPO / "draw" / "loss_curves")
    return parser.parse_args()


def main() -> int:
    options = parse()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    losses = pd.concat([train(name, options) for name in options.types], axis=1)
    losses.index.name = "iteration"
    losses.to_csv(options.output_dir / "loss_curves.csv")
    draw(losses, options.output_dir / "loss_curves.png")
    text = table(losses)
    print(text)
    command = " ".join(["python", "benchmarks/loss_curves.py", *sys.argv[1:]])
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    made = f"Made by `{command}` with {versions}."
    (options.output_dir / "loss_curves.md").write_text(f"{text}\n\n{made}\n")
    found = complaints(losses)
    for complaint in found:
        print(f"[ERROR] {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
