#!/usr/bin/env python3
"""Train in bf16 and in other formats, and test whether offline errors predict the loss gap.

    python script/study.py --formats mxfp8 mxfp6_e2m3 mxfp4 nvfp4 nvfp4:sr --seeds 5 \\
        --continue-iterations 100 --output-dir study_runs
    python script/study.py --formats mxfp8 mxfp6_e2m3 mxfp4 nvfp4 --bits 4.5 6.25 \\
        --recipes study/recipe.yaml --text wiki.txt --held-out-text held_out.txt
    python script/study.py --model llama32-1b --preset full --load checkpoints/llama32_1b_bf16 \\
        --data-path dataset/wiki_text_document --nproc-per-node 8 --formats mxfp8 mxfp4
    python script/study.py --formats mxfp4 --from-scratch 500 -- --num-layers 2 --hidden-size 128
    python script/study.py --preset tiny --formats mxfp8 mxfp4 --jobs 6  # on one GPU

Trains one model in bf16. Every configuration and bf16 then continue from this checkpoint, with the
same order of the data for each seed. The gap is the loss on a held-out text minus that of bf16 with
the same seed. Training from scratch needs many more tokens, because seeds differ more than formats
at first.

One iteration in bf16 is also collected, and `python -m megatron.analysis study` computes from it
the errors of all matmuls under each configuration. The page states whether these errors predict the
gaps. With --bits, the study also proposes recipes from these errors, and trains each of them and
the uniform format with the same number of bits.

The same command continues after Ctrl-C: a run whose log is complete is not repeated, unless its
checkpoint, recipe or data, or the versions of packages have changed since. A run that diverges
counts as a result. Runs that fail are listed, and repeated by the next call. Flags after -- are
passed to all runs of pretrain_gpt.py.

Files in the output folder:
  study.md, study.png  the answer, the offline errors against the gaps, and all tables
  gaps.csv             one row per configuration: gap, standard error, interval, offline errors
  runs.csv             one row per configuration and seed: losses and gradient norms
  curves.csv           one row per run and iteration
  runs/                the logs; recipes/, offline/, operands/, start/: recipes, the offline study,
                       its operands, and the checkpoint

Exit status: 0 all runs are complete or diverged; 1 the bf16 model could not be trained or studied;
2 wrong option; 3 some runs failed.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from configs import launch, resolve
from configs.lookup import ConfigError, pick
from configs.models import MODELS, PRESETS
from configs.options import add_parallel_sizes, positive, rate, split_flags, training_parser
from megatron.console import run_main

SOME_FAILED = 3  #: exit status if some runs failed
START_ITERATIONS, CONTINUE_ITERATIONS = 500, 100  #: defaults of the options with these names
#: For each option, the options that have no effect together with it.
IGNORED = {
    "from_scratch": ("load", "start_iterations", "continue_iterations", "continue_lr"),
    "load": ("start_iterations",),
    "text": ("data_path",),
    "held_out_text": ("valid_data_path",),
}
#: Flags that the study sets itself, or that would make the runs differ in more than the formats.
OWN = (
    *("--seed", "--train-iters", "--train-samples", "--load", "--finetune", "--save"),
    *("--load-hf", "--save-hf"),
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--split"),
    *("--eval-iters", "--eval-interval", "--log-interval", "--tensorboard-dir", "--save-tensors"),
    *("--custom-quant-type", "--linear-quant", "--qk-quant", "--pv-quant", "--quant-recipe"),
    *("--seq-length", "--micro-batch-size", "--global-batch-size", "--lr", "--mock-data"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = training_parser(__doc__, "study.py [options] [-- flags of pretrain_gpt.py]")
    add = parser.add_argument_group("what to compare").add_argument
    add(
        "--formats",
        nargs="+",
        default=[],
        metavar="TYPE",
        help="quantization types, such as mxfp4, nvfp4:sr or linear_mxfp4",
    )
    add("--recipes", nargs="+", type=Path, default=[], metavar="FILE", help="recipes")
    add(
        "--bits",
        nargs="+",
        type=rate,
        default=[],
        metavar="X",
        help="also train the recipe with the smallest offline error at this mean number of bits "
        "per value, and the uniform format with the same bits; choose among --formats",
    )
    add("--seeds", type=positive, default=5, metavar="N", help="paired runs (%(default)s)")
    add(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="runs to train at a time; several small models can share one GPU (%(default)s)",
    )
    add = parser.add_argument_group("how long to train").add_argument
    add(
        "--start-iterations",
        type=positive,
        metavar="N",
        help=f"iterations of the bf16 model, at a constant learning rate ({START_ITERATIONS})",
    )
    add("--load", type=Path, metavar="DIR", help="continue from this checkpoint instead")
    add(
        "--continue-iterations",
        type=positive,
        metavar="N",
        help=f"iterations of each run; the learning rate decays to a tenth ({CONTINUE_ITERATIONS})",
    )
    add(
        "--continue-lr",
        type=rate,
        metavar="X",
        help="highest learning rate of these runs (that of --lr)",
    )
    add(
        "--from-scratch",
        type=positive,
        metavar="N",
        help="do not continue: train each configuration for N iterations from random weights",
    )
    add(
        "--eval-iters",
        type=positive,
        default=20,
        metavar="N",
        help="held-out text, in iterations (%(default)s)",
    )
    _add_model(parser)
    _add_files(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add train_config.py's options for the model and its processes."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default="llama32-1b", metavar="M", help=f"{', '.join(MODELS)} (%(default)s)")
    add("--preset", metavar="P", help="full or tiny (full with a CUDA device, otherwise tiny)")
    for name, kind, text in (
        ("micro-batch-size", positive, "sequences that a replica processes at a time"),
        ("global-batch-size", positive, "sequences per iteration"),
        ("seq-length", positive, "tokens per sequence"),
        ("lr", rate, "highest learning rate"),
    ):
        add(f"--{name}", type=kind, metavar="X" if kind is rate else "N", help=text)
    add("--nproc-per-node", type=positive, metavar="N", help="processes of each run, by torchrun")
    add_parallel_sizes(group)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--data-path", metavar="P", help="prefix of the training data (the default corpus)")
    add(
        "--valid-data-path",
        metavar="P",
        help="prefix of data that begin with the held-out text (the end of the training data)",
    )
    add("--tokenizer-path", metavar="P", help="SentencePiece .model file or a tokenizer's folder")
    add("--text", type=Path, metavar="FILE", help="text to tokenize, instead of --data-path")
    add("--held-out-text", type=Path, metavar="FILE", help="instead of --valid-data-path")
    add(
        "--dump",
        type=Path,
        metavar="DIR",
        help="operands for the offline study, collected earlier in bf16",
    )
    add("--output-dir", type=Path, default=Path("study_runs"), metavar="DIR", help="%(default)s")
    add(
        "--report-only",
        action="store_true",
        help="train nothing; write the tables of the runs that are complete",
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if the command line is invalid.
    """
    words, flags = split_flags(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(words)
    options.flags = flags
    pick("model", options.model, MODELS)
    if options.preset is not None:
        pick("preset", options.preset, dict.fromkeys(PRESETS))
    if not (options.formats or options.recipes):
        raise ConfigError("nothing to compare; give --formats, --recipes or both")
    if options.bits and not options.formats:
        raise ConfigError("--bits chooses among --formats, and none is given")
    _check_contradictions(options)
    for name in ("text", "held_out_text"):
        path = getattr(options, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"{_flag(name)} {path} is not a file; name a text file")
    for name, what in (("load", "a checkpoint"), ("dump", "operands collected in bf16")):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            raise ConfigError(f"{_flag(name)} {path} is not a folder; name a folder with {what}")
    if options.start_iterations is None:
        options.start_iterations = START_ITERATIONS
    if options.continue_iterations is None:
        options.continue_iterations = CONTINUE_ITERATIONS
    for word in flags:
        if (name := word.partition("=")[0]) in OWN:
            raise ConfigError(f"{name} is given after --, but the study sets it; see --help")
        if name == "--min-lr" and options.continue_lr is not None:
            raise ConfigError(
                "--continue-lr contradicts the --min-lr given after `--`, because the learning "
                "rate decays to a tenth of --continue-lr; give one of them"
            )
    return options


def _check_contradictions(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option is given that another given option makes ineffective."""
    for first, others in IGNORED.items():
        for second in others:
            if getattr(options, first) is not None and getattr(options, second) is not None:
                raise ConfigError(
                    f"{_flag(first)} and {_flag(second)} contradict each other; give one of them"
                )


def _flag(name: str) -> str:
    """Return an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def study(options: argparse.Namespace) -> int:
    """Run the study, write all files, and return the exit status."""
    from loss_gaps.configurations import BASELINE, Configuration, configurations_of
    from loss_gaps.gaps import curve_table, gap_table, run_table, verdict
    from loss_gaps.offline import check_names, errors_of, pairs_of, study_dump
    from loss_gaps.page import PICTURE, Setting, page, picture
    from loss_gaps.run_log import COMPLETE, FAILED
    from loss_gaps.trainings import Trainings
    from megatron.analysis.outputs.atomic_write import write

    folder = options.output_dir.resolve()
    configurations = configurations_of(options.formats, options.recipes, folder / "recipes")
    check_names(configurations, options.bits, whole=options.dump is None)
    trainings = Trainings(options)
    dump = trainings.collect()
    offline = folder / "offline"
    table = study_dump(trainings.launcher, dump, configurations, offline)
    pairs = pairs_of(
        table, options.bits, folder / "recipes", dump=dump.name, whole=options.dump is None
    )
    new = [pair.proposed for pair in pairs if not pair.same] + [pair.uniform for pair in pairs]
    known = {each.name for each in configurations}
    if new := [each for each in dict.fromkeys(new) if each.name not in known]:
        configurations += new
        table = study_dump(trainings.launcher, dump, configurations, offline)
    start = trainings.train_start()
    runs = trainings.compare([Configuration(BASELINE), *configurations])
    gaps = gap_table(
        runs, errors_of(table, [each.name for each in configurations if not each.is_type])
    )
    baseline = [
        log for (name, _), log in runs.items() if name == BASELINE and log.status == COMPLETE
    ]
    losses = [log.held_out_loss for log in baseline]
    setting = Setting(
        command=shlex.join(["python", "script/study.py", *sys.argv[1:]]),
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")),
        parameters=baseline[0].parameters if baseline else None,
        tokens=trainings.tokens,
        start_iterations=None if start is None else options.start_iterations,
        iterations=trainings.iterations,
        from_scratch=options.from_scratch is not None,
        held_out_tokens=trainings.held_out_tokens,
        seeds=options.seeds,
        baseline_loss=sum(losses) / len(losses) if losses else math.nan,
        start_loss=math.nan if start is None else start.held_out_loss,
    )
    write(folder / "runs.csv", run_table(runs).to_csv(index=False).encode())
    write(folder / "curves.csv", curve_table(runs).to_csv(index=False).encode())
    write(folder / "gaps.csv", gaps.to_csv(index=False).encode())
    write(folder / PICTURE, picture(gaps))
    text = page(gaps, runs, pairs, setting)
    write(folder / "study.md", text.encode())
    print("\n".join(verdict(gaps, runs, pairs)))
    print(f"The page is {folder / 'study.md'}, the picture {folder / PICTURE}")
    failed = [f"{name}, seed {seed}" for (name, seed), log in runs.items() if log.status == FAILED]
    if failed:
        print(
            f"[ERROR] {len(failed)} runs failed: {'; '.join(failed)}; their logs are in "
            f"{folder / 'runs'}, and the next call repeats them",
            file=sys.stderr,
        )
    return SOME_FAILED if failed else 0


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse(argv)
        resolve.enter_environment()
        for name, text in launch.training_environment().items():
            if not name.startswith("PYTHON"):  # libraries read the other variables when imported
                os.environ[name] = text
        from loss_gaps.launcher import locked

        with locked(options.output_dir.resolve()):
            return study(options)
    except ConfigError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return error.status
    except (ValueError, RuntimeError, OSError) as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    run_main(main)
