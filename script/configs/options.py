"""Define the options that `train_config.py` and `flash_attention_config.py` share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from configs.command import PRECISIONS
from configs.datasets import DATASETS
from configs.lookup import ConfigError
from configs.models import MODELS
from configs.trainings import TRAININGS
from megatron.console import ArgumentParser, hyphenated


def training_parser(description: str | None, usage: str) -> ArgumentParser:
    """Return a parser for a program that also takes flags of `pretrain_gpt.py` after `--`."""
    return ArgumentParser(
        description=description,
        usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        advice="see --help (flags of pretrain_gpt.py go after --)",
        error_type=ConfigError,
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what to train and how, except for the formats."""
    group = parser.add_argument_group("what to train")
    add = group.add_argument
    add("--model", metavar="M", help=", ".join(MODELS))
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)}; not needed with both paths")
    add(
        "--training-config",
        metavar="T",
        default="default",
        help=f"{', '.join(TRAININGS)} (default)",
    )
    add(
        "--preset",
        metavar="P",
        help="full: the published model; tiny: a small model of the same architecture (full with "
        "a CUDA device and in a dry run, otherwise tiny)",
    )
    add(
        "--dtype",
        choices=PRECISIONS,
        default="bf16",
        help="precision of all that is not quantized (bf16)",
    )
    for name, kind, text in (
        ("train-iters", positive, "iterations"),
        ("micro-batch-size", positive, "sequences that a replica processes at a time"),
        ("global-batch-size", positive, "sequences per iteration"),
        ("seq-length", positive, "tokens per sequence"),
        ("lr", rate, "highest learning rate; the lowest is a tenth of it"),
    ):
        add(f"--{name}", type=kind, metavar="X" if kind is rate else "N", help=text)
    group = parser.add_argument_group("files; defaults are relative to the root of the repository")
    add = group.add_argument
    add("--tokenizer-path", metavar="P", help="SentencePiece .model file or a tokenizer's folder")
    add("--data-path", metavar="P", help="common prefix of a .bin and an .idx file")
    add(
        "--checkpoint-path",
        metavar="DIR",
        help="folder to save to, and to resume from if it holds a checkpoint; none: save nothing "
        "(checkpoints/RUN; none with --preset tiny)",
    )
    add("--tensorboard-path", metavar="DIR", help="folder of event files (tensorboard_logs/RUN)")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the number of processes and machines, and the parallel sizes."""
    group = parser.add_argument_group(
        "processes; also set by NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT"
    )
    add = group.add_argument
    add("--nproc-per-node", type=positive, metavar="N", help="processes per machine, one per GPU")
    add("--nnodes", type=positive, metavar="N", help="machines (1)")
    add("--node-rank", type=whole, metavar="N", help="number of this machine, from 0 (0)")
    add("--master-addr", metavar="HOST", help="host name of the first machine")
    add("--master-port", type=positive, metavar="N", help="free port of the first machine (6000)")
    add_parallel_sizes(group)


def add_parallel_sizes(group: argparse._ArgumentGroup) -> None:
    """Add the options that set the tensor, pipeline, context and expert parallel sizes."""
    for short, flag, text in (
        ("tp", "tensor", "ranks that share each layer"),
        ("pp", "pipeline", "ranks that share the layers"),
        ("cp", "context", "ranks that share each sequence"),
        ("ep", "expert", "ranks that share the experts"),
    ):
        long = f"--{flag}-model-parallel-size" if short != "cp" else "--context-parallel-size"
        group.add_argument(f"--{short}", long, dest=short, type=positive, metavar="N", help=text)


def add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print all accepted names, and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and run nothing (DRY_RUN=1)"
    )


def require(options: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if the command line lacks any of the options in `names`."""
    missing = [f"--{name}" for name in names if getattr(options, name.replace("-", "_")) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing; --list prints all accepted names")


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--` into this program's options and flags for `pretrain_gpt.py`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], [hyphenated(word) for word in words[cut + 1 :]]
