"""Train small models that diverge, and check that the ring saves each jump of the loss.

    python benchmarks/divergence.py                   # 40 runs, about 4 minutes on one core
    python benchmarks/divergence.py --runs planted/lr_2_x3 ordinary/mxfp4     # only these

In 20 runs, a divergence is planted in an iteration between 2 and 200: from then on, the learning
rate is far too large (lr); a weight is damaged (norm, embedding, nan); or the tokens of one batch
are random (random) or never occur in the text (absent). Each of these runs has a twin without the
fault, with the same weights and data. The jump is the first iteration whose loss is not finite or
exceeds the twin's by 20%. The other 20 runs are ordinary: they differ in seed, learning rate,
schedule, number format, batch size and model, and one is resumed. Five of them are the twins.

All runs train on the default corpus with `--collect-ring 5`. The benchmark exits with status 1 if
the ring lacks a jump or the iteration before it, or if it is written in an ordinary run.

A run that is complete in --output-dir is not repeated. Writes the page `divergence.md` and, in a
complete benchmark, the losses and gradient norms of all runs as `divergence.npz`, which
tests/collection/test_divergence.py replays.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser, run_main  # noqa: E402
from megatron.forks import run_in_fork  # noqa: E402
from megatron.tensor_record import read_events  # noqa: E402

RING = 5  #: iterations in the ring
JUMP = 1.2  #: a loss above this multiple of the twin's loss is a jump
AFTER = 12  #: number of iterations that a run trains after its planted fault
SEEDS = (1, 2, 3, 4, 5)
#: last part of the name of the weight that a fault changes, by the kind of the fault
WEIGHTS = {
    "norm": "final_layernorm.weight",
    "embedding": "word_embeddings.weight",
    "nan": "linear_fc2.weight",
}
ABSENT = 3  #: id of the padding token, which the text does not contain
#: default flags of the runs: 128 tokens per iteration, a constant learning rate and no warm-up make
#: the loss noisy at the start
BASE = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "2"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--eval-iters", "0", "--split", "99,1,0"),
    *("--tokenizer-type", "SentencePieceTokenizer", "--log-interval", "10", "--bf16"),
    *("--tokenizer-model", str(REPO / "model" / "default" / "tokenizer.model")),
    *("--data-path", str(REPO / "dataset" / "default" / "corpus_text_document")),
    *("--no-check-for-nan-in-loss-and-grad", "--save-tensors", "--collect-ring", str(RING)),
    *("--collect-layers", "first", "--collect-modules", "linear_fc2"),
)


@dataclass(frozen=True)
class Plant:
    """A fault that makes a run diverge."""

    kind: str  #: lr, norm, embedding, nan, random or absent
    iteration: int  #: first iteration that the fault affects
    seed: int  #: seed of the run and of its twin
    strength: float = 0.0  #: learning rate, or factor of the weights

    @property
    def name(self) -> str:
        """Name of the run."""
        strength = f"_x{self.strength:g}" if self.strength else ""
        return f"planted/{self.kind}_{self.iteration}{strength}"

    @property
    def twin(self) -> str:
        """Name of the run without the fault."""
        return f"ordinary/seed{self.seed}"


PLANTS = (
    Plant("lr", 2, 1, 3.0),
    Plant("lr", 2, 2, 0.3),
    Plant("lr", 4, 3, 0.1),
    Plant("lr", 8, 4, 0.1),
    Plant("lr", 20, 5, 1.0),
    Plant("lr", 60, 1, 3.0),
    Plant("lr", 199, 2, 0.3),
    Plant("norm", 2, 3, 30.0),
    Plant("nan", 3, 4),
    Plant("embedding", 7, 5, 30.0),
    Plant("norm", 25, 1, 30.0),
    Plant("embedding", 90, 2, 10.0),
    Plant("norm", 150, 3, 10.0),
    Plant("nan", 200, 4),
    Plant("absent", 50, 5),
    Plant("random", 100, 1),
    Plant("random", 70, 2),
    Plant("absent", 110, 3),
    Plant("random", 150, 4),
    Plant("random", 200, 5),
)
TWIN_ITERATIONS = max(plant.iteration for plant in PLANTS) + AFTER
#: additional flags of the ordinary runs, which override those in BASE
ORDINARY: dict[str, tuple[str, ...]] = {
    **{f"seed{seed}": () for seed in SEEDS},
    "lr_3e-3": ("--lr", "3e-3"),
    "lr_1e-2": ("--lr", "1e-2"),
    "warmup_cosine": (
        *("--lr", "6e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "20"),
        *("--min-lr", "1e-5"),
    ),
    "wsd": (
        *("--lr", "6e-3", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "30"),
        *("--min-lr", "1e-5"),
    ),
    "mxfp8": ("--custom-quant-type", "mxfp8"),
    "mxfp4": ("--custom-quant-type", "mxfp4"),
    "nvfp4": ("--custom-quant-type", "nvfp4"),
    "hifp8": ("--custom-quant-type", "hifp8"),
    "fp16_loss_scale": ("--fp16", "--initial-loss-scale", "1e9", "--hysteresis", "1"),
    "one_short_sequence": ("--micro-batch-size", "1", "--global-batch-size", "1"),
    "large_batch": ("--global-batch-size", "16"),
    "experts": ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2"),
    "dropout": ("--hidden-dropout", "0.2", "--attention-dropout", "0.2"),
    "learned_positions": ("--position-embedding-type", "learned_absolute", "--clip-grad", "0"),
    "resumed": (),
}
RESUMED_AT = 60  #: iteration after which the run `ordinary/resumed` ends and is resumed


@dataclass(frozen=True)
class Run:
    """A training run, in one process or, if it is resumed, in two."""

    name: str
    iterations: int
    seed: int
    flags: tuple[str, ...]
    plant: Plant | None = None

    def commands(self, folder: Path) -> list[list[str]]:
        """Return the `pretrain_gpt.py` arguments of each process; the run writes to `folder`."""
        common = [*BASE, "--tensor-save-dir", str(folder / "dump"), "--seed", str(self.seed)]
        common += ["--train-iters", str(self.iterations), *self.flags]
        if "--fp16" in self.flags:
            common.remove("--bf16")
        if self.name != "ordinary/resumed":
            return [common]
        save = ["--save", str(folder / "checkpoints"), "--save-interval", str(RESUMED_AT)]
        return [
            [*common, *save, "--exit-interval", str(RESUMED_AT)],
            [*common, "--load", str(folder / "checkpoints")],
        ]


def all_runs() -> dict[str, Run]:
    """Return all runs by name."""
    runs = []
    for number, (name, flags) in enumerate(ORDINARY.items(), 1):
        seed = SEEDS[(number - 1) % len(SEEDS)] if flags else number
        iterations = TWIN_ITERATIONS if name.startswith("seed") else 150
        runs.append(Run(f"ordinary/{name}", iterations, seed, flags))
    for plant in PLANTS:
        runs.append(Run(plant.name, plant.iteration + AFTER, plant.seed, (), plant))
    return {run.name: run for run in runs}


def poison(model: Any, kind: str, factor: float) -> None:
    """Multiply a weight by `factor`; if `kind` is "nan", set one of its elements to NaN instead."""
    import torch

    named = {name: weight for chunk in model for name, weight in chunk.named_parameters()}
    weight = [weight for name, weight in named.items() if name.endswith(WEIGHTS[kind])][-1]
    with torch.no_grad():
        if kind == "nan":
            weight.view(-1)[0] = math.nan
        else:
            weight.mul_(factor)


def install(plant: Plant | None, curve: Path) -> None:
    """Make the training loop record each iteration in `curve`, and inject the fault `plant`."""
    import torch

    from megatron.training import loop
    from megatron.training.data import batch as batches

    train_step, get_batch = loop.train_step, batches.get_batch
    done = len(curve.read_text().splitlines()) if curve.exists() else 0

    def planted_step(forward_step: Any, data: Any, state: Any, run: Any) -> Any:
        nonlocal done
        done += 1
        if plant and plant.kind in WEIGHTS and done == plant.iteration:
            poison(state.model, plant.kind, plant.strength)
            state.optimizer.reload_model_params()
        if plant and plant.kind == "lr" and done >= plant.iteration:
            for group in state.optimizer.param_groups:
                group["lr"] = plant.strength
        result = train_step(forward_step, data, state, run)
        norm = None if result.skipped else result.grad_norm
        with curve.open("a") as file:
            file.write(json.dumps([result.losses["lm loss"], norm]) + "\n")
        return result

    def planted_batch(data: Any, args: Any) -> Any:
        fields = get_batch(data, args)
        if plant and plant.kind in ("random", "absent") and done == plant.iteration:
            tokens = torch.full_like(fields["tokens"], ABSENT)
            if plant.kind == "random":
                tokens.random_(args.padded_vocab_size, generator=torch.Generator())
            fields |= {"tokens": tokens, "labels": tokens.roll(-1, dims=1)}
        return fields

    loop.train_step, batches.get_batch = planted_step, planted_batch


def train_planted(arguments: list[str], plant: Plant | None, folder: Path) -> int:
    """Train in this forked process, write to `folder`, and return the training's status."""
    from megatron.training.main import main as train

    install(plant, folder / "curve.jsonl")
    return train(arguments)


def prepare() -> None:
    """Make the default corpus, and import the modules that every run needs.

    None of these modules may start a thread, because the runs are forks of this process.
    """
    subprocess.run([sys.executable, REPO / "script" / "data" / "default_corpus.py"], check=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron.training import device

    device.prepare()
    import megatron.training.checkpointing.save_load
    import megatron.training.training  # noqa: F401


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train one run, and return its curve and the iterations of each written ring."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for arguments in run.commands(folder):
        with (folder / "log.txt").open("ab") as log:
            status = run_in_fork(partial(train_planted, arguments, run.plant, folder), log)
        if status != 0:
            raise SystemExit(
                f"[ERROR] {run.name} ended with status {status}; see {folder / 'log.txt'}"
            )
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    if len(curve) != run.iterations:
        raise SystemExit(f"[ERROR] {run.name} lacks iterations; see {folder / 'log.txt'}")
    events = [
        event["iterations"]
        for index in sorted((folder / "dump").glob("index_*.jsonl"))
        for event in read_events(index)
        if event["event"] == "kept"
    ]
    shutil.rmtree(folder / "dump")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {"curve": curve, "kept": events}


def train_all(runs: list[Run], output: Path) -> dict[str, dict[str, Any]]:
    """Return the results of all runs; train a run unless the same command already has a result."""
    results, prepared = {}, False
    for run in runs:
        folder = output / "runs" / run.name
        path, command = folder / "result.json", repr(run.commands(folder))
        result = json.loads(path.read_text()) if path.exists() else {}
        if result.get("command") != command:
            if not prepared:
                prepare()
                prepared = True
            print(f"training {run.name}", file=sys.stderr)
            result = train(run, folder) | {"command": command}
            path.write_text(json.dumps(result))
        results[run.name] = result
    return results


def jump_of(curve: list[Any], twin: list[Any]) -> int | None:
    """Return the first iteration whose loss is not finite or exceeds the twin's by a fifth."""
    for iteration, ((loss, _), (expected, _)) in enumerate(zip(curve, twin, strict=False), 1):
        if not math.isfinite(loss) or loss > JUMP * expected:
            return iteration
    return None


def planted_rows(results: dict[str, dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """Return one table row per run with a planted fault, and messages about unexpected results."""
    rows, complaints = [], []
    for plant in PLANTS:
        if plant.name not in results:
            continue
        curve, kept = results[plant.name]["curve"], results[plant.name]["kept"]
        twin = results[plant.twin]["curve"]
        jump = jump_of(curve, twin)
        if jump is None:
            complaints.append(f"{plant.name} did not diverge")
            continue
        first = kept[0] if kept else []
        if not {jump - 1, jump} <= set(first):
            complaints.append(f"{plant.name}: the ring lacks the jump at {jump}: {kept}")
        losses = f"{curve[jump - 2][0]:.2f}, {curve[jump - 1][0]:.4g} ({twin[jump - 1][0]:.2f})"
        found = str(first[-1]) if first else "not found"
        ring = f"{first[0]} to {first[-1]}" if first else "nothing"
        rows.append([plant.name, str(plant.iteration), str(jump), losses, found, ring])
    return rows, complaints


def ordinary_rows(results: dict[str, dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """Return one table row per run without a fault, and messages about unexpected results."""
    rows, complaints = [], []
    for name, flags in ORDINARY.items():
        if f"ordinary/{name}" not in results:
            continue
        result = results[f"ordinary/{name}"]
        losses = [loss for loss, _ in result["curve"]]
        rises = max(after / before for before, after in pairwise(losses))
        end = sum(losses[-10:]) / 10
        cells = [f"{losses[0]:.2f}", f"{end:.2f}", f"{100 * (rises - 1):.0f}%"]
        shown = " ".join(flags) or f"resumed after {RESUMED_AT}" * (name == "resumed")
        rows.append([name, f"`{shown}`" if flags else shown, str(len(losses)), *cells])
        if result["kept"]:
            complaints.append(f"ordinary/{name}: the ring was written: {result['kept']}")
    return rows, complaints


def page(results: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the page on runs with and without faults, and messages about unexpected results."""
    planted, missed = planted_rows(results)
    ordinary, alarms = ordinary_rows(results)
    at_once = sum(row[2] == row[4] for row in planted)
    heads = (
        ("run", "planted at", "jump at", "loss before, at the jump (twin)", "found at", "kept"),
        ("run", "flags", "iterations", "first loss", "last 10", "largest rise in one iteration"),
    )
    text = [
        "# What the ring of iterations keeps of a divergence",
        f"`{results_page.quoted('divergence.py')}` with "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")),
        "Small models train on the default corpus with `--collect-ring 5` and the default limits. "
        "A run's twin has the same weights and data, but no fault. The jump is the first iteration "
        "whose loss is not finite or exceeds the twin's by 20%. It counts as kept if the first "
        "ring that is written contains this iteration and the one before it. The faults, the 20% "
        "and one margin of the detector were adjusted once, after a first trial: weaker faults, "
        "such as an fc2 of the last layer scaled by 300 to 1000, did not make the loss jump and "
        "were replaced, and the detector had missed one gradual rise.",
        "## Planted divergences",
        f"The jump is kept in {len(planted) - len(missed)} of {len(planted)} runs. It is found in "
        f"its own iteration in {at_once} of them, so `--collect-ring 2` would keep it, too.",
        "The name of a run states its fault. From the given iteration on, the learning rate is set "
        "to the number in the name (lr), or the weight of the last norm (norm) or of the "
        "embedding, which is also the output layer (embedding), is multiplied by this number, or "
        "one element of the last layer's fc2 is NaN (nan). In other runs, the tokens of one batch "
        "are random (random) or never occur in the text (absent). A bad batch raises the "
        "loss only after the model has learned which tokens are frequent: in iteration 12 it "
        "changes nothing, and in iteration 30 it raises the loss from 6.9 to 8.3, which the "
        "default limit of 25% does not count as a jump.",
        results_page.table(heads[0], planted),
        "## Ordinary runs",
        f"The ring is written in {len(alarms)} of {len(ordinary)} runs.",
        results_page.table(heads[1], ordinary),
    ]
    return "\n\n".join(text) + "\n", [*missed, *alarms]


def curves(results: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return, by run name, each iteration's loss and gradient norm in an array [iterations, 2].

    The gradient norm of an iteration that the loss scaler skips is unknown and stored as -1.
    """
    return {
        name: np.array(
            [[loss, -1 if norm is None else norm] for loss, norm in result["curve"]], np.float32
        )
        for name, result in results.items()
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(all_runs())
    parser.add_argument(
        "--runs", nargs="+", default=names, choices=names, metavar="RUN", help="default: all"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=REPO / "draw" / "divergence", metavar="DIR"
    )
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    runs = all_runs()
    twins = {run.plant.twin for name in options.runs if (run := runs[name]).plant}
    chosen = [run for name, run in runs.items() if name in {*options.runs, *twins}]
    results = train_all(chosen, options.output_dir)
    text, complaints = page(results)
    results_page.publish(text, options.output_dir / "divergence.md")
    if len(results) == len(runs):
        np.savez_compressed(options.output_dir / "divergence.npz", **curves(results))
    for complaint in complaints:
        print(f"[ERROR] {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    run_main(main)
