"""The options that `train_config.py` and `flash_attention_config.py` share, and what they start."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from configs.command import PRECISIONS, Experiment, Sizes
from configs.datasets import DATASETS, Dataset
from configs.layout import Launch, Layout
from configs.models import MODELS, PRESETS, Model
from configs.names import ConfigError, pick
from configs.resolve import (
    REPO,
    DataRequest,
    Files,
    at_home,
    cuda_devices,
    interpreter,
    resolve_data,
    say,
)
from configs.trainings import TRAININGS

NOTHING = "none"  #: in place of a checkpoint's folder


class Parser(argparse.ArgumentParser):
    """argparse whose errors look like all others here."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help (flags of pretrain_gpt.py go after --)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """What to train, but for the formats, and how."""
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
        help="full: the published model; tiny: the same architecture, small (full with a CUDA "
        "device and in a dry run, else tiny)",
    )
    add("--dtype", choices=PRECISIONS, default="bf16", help="of what is not quantized (bf16)")
    for name, kind, text in (
        ("train-iters", positive, "iterations"),
        ("micro-batch-size", positive, "sequences at a time, of each copy of the model"),
        ("global-batch-size", positive, "sequences an iteration"),
        ("seq-length", positive, "tokens a sequence"),
        ("lr", float, "highest learning rate; the lowest is a tenth of it"),
    ):
        add(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    group = parser.add_argument_group("files; a default is below the tree's root")
    add = group.add_argument
    add("--tokenizer-path", metavar="P", help="SentencePiece .model file or a tokenizer's folder")
    add("--data-path", metavar="P", help="prefix of a .bin and an .idx file")
    add(
        "--checkpoint-path",
        metavar="DIR",
        help="save there, and resume from what is there; none: save nothing (checkpoints/RUN; "
        "none with --preset tiny)",
    )
    add("--tensorboard-path", metavar="DIR", help="event files (tensorboard_logs/RUN)")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Processes and machines."""
    group = parser.add_argument_group(
        "processes; NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment do too"
    )
    add = group.add_argument
    add("--nproc-per-node", type=positive, metavar="N", help="processes of a machine, one a GPU")
    add("--nnodes", type=positive, metavar="N", help="machines (1)")
    add("--node-rank", type=whole, metavar="N", help="which of them this is, from 0 (0)")
    add("--master-addr", metavar="HOST", help="name of the first")
    add("--master-port", type=positive, metavar="N", help="a free port of the first (6000)")
    for short, flag, text in (
        ("tp", "tensor", "ranks that share each layer"),
        ("pp", "pipeline", "ranks that share the layers"),
        ("cp", "context", "ranks that share each sequence"),
        ("ep", "expert", "ranks that share the experts"),
    ):
        long = f"--{flag}-model-parallel-size" if short != "cp" else "--context-parallel-size"
        add(f"--{short}", long, dest=short, type=positive, metavar="N", help=text)


def add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print what can be named, and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and run nothing (DRY_RUN=1)"
    )


@dataclass(frozen=True, kw_only=True)
class Formats:
    """What is quantized."""

    name: str  #: in the run's name
    flags: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the options name, looked up in the tables."""

    options: argparse.Namespace
    model: Model
    dataset: Dataset | None
    preset: str

    @property
    def is_tiny(self) -> bool:
        return self.preset == "tiny"


def require(options: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name}" for name in names if getattr(options, name.replace("-", "_")) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing; --list prints what can be named")


def run_name(selection: Selection, formats: Formats) -> str:
    options = selection.options
    parts = [options.model, options.dataset, formats.name]
    if options.training_config != "default":
        parts.append(options.training_config)
    if selection.is_tiny:
        parts.append("tiny")
    return "_".join(part for part in parts if part).replace(":", "-").replace(",", "_")


def check_names(options: argparse.Namespace) -> None:
    """Refuse unknown names before an environment is made for them.

    Raises:
        ConfigError: an unknown name, or a missing one.
    """
    files = options.tokenizer_path is not None and options.data_path is not None
    require(options, "model", *(() if files else ("dataset",)))
    pick("model", options.model, MODELS)
    if options.dataset is not None:
        pick("dataset", options.dataset, DATASETS)
    pick("training configuration", options.training_config, TRAININGS)
    if options.preset is not None:
        pick("preset", options.preset, dict.fromkeys(PRESETS))


def select(options: argparse.Namespace, python: str) -> Selection:
    """Look up the names, which are right, and choose the preset where the user did not."""
    preset = options.preset
    if preset is None:
        there = cuda_devices(python, dry_run=options.dry_run) > 0
        preset = "full" if there or options.dry_run else "tiny"
        if not there and options.dry_run:
            say("Without a CUDA device a run takes --preset tiny unless told --preset full.")
        elif not there:
            say("No CUDA device: the model is the tiny preset (--preset full for the real one).")
    dataset = None if options.dataset is None else DATASETS[options.dataset]
    return Selection(options=options, model=MODELS[options.model], dataset=dataset, preset=preset)


def _setting(given: int | None, variable: str, kind: Callable[[str], int]) -> int | None:
    """An option, else the environment's variable, else None."""
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"environment variable {variable}: {error}") from None


def layout_of(selection: Selection, python: str) -> Layout:
    """The model's own layout, with what the user says.

    Raises:
        ConfigError: this machine has fewer GPUs than processes.
    """
    options = selection.options
    given = {
        "nproc_per_node": _setting(options.nproc_per_node, "NPROC", positive),
        "nnodes": _setting(options.nnodes, "NNODES", positive),
        **{name: getattr(options, name) for name in ("tp", "pp", "cp", "ep")},
    }
    given = {name: value for name, value in given.items() if value is not None}
    layout = dataclasses.replace(selection.model.preset(selection.preset).layout, **given)
    devices = 0 if options.dry_run else cuda_devices(python) if layout.world > 1 else 0
    if 0 < devices < layout.nproc_per_node:
        raise ConfigError(
            f"{layout.nproc_per_node} processes, but this machine has {devices} GPU(s); give "
            f"--nproc-per-node {devices} and a --tp, --pp, --cp and --ep that fit it"
        )
    return layout


def launch_of(options: argparse.Namespace) -> Launch:
    return Launch(
        node_rank=_setting(options.node_rank, "NODE_RANK", whole) or 0,
        master_addr=options.master_addr or os.environ.get("MASTER_ADDR"),
        master_port=_setting(options.master_port, "MASTER_PORT", positive) or 6000,
    )


def files_of(selection: Selection, python: str) -> Files:
    """The tokenizer and the data; see `resolve_data`."""
    options, tokenizer = selection.options, selection.model.tokenizer
    dataset = selection.dataset or next(iter(DATASETS.values()))
    default = Files(tokenizer=at_home(tokenizer.path), data=at_home(dataset.prefix(tokenizer)))
    request = DataRequest(
        tokenizer=options.tokenizer_path,
        data=options.data_path,
        default=default,
        corpus=selection.is_tiny,
        prepare=f"bash {at_home(dataset.prepare)} --tokenizer-model "
        f"{options.tokenizer_path or default.tokenizer} --output-prefix "
        f"{default.data.removesuffix('_text_document')}",
    )
    return resolve_data(request, python, dry_run=options.dry_run)


def experiment(
    selection: Selection, formats: Formats, flags: Sequence[str], python: str
) -> Experiment:
    """Everything that the command says."""
    options, name = selection.options, run_name(selection, formats)
    checkpoint = options.checkpoint_path
    if checkpoint is None:
        checkpoint = NOTHING if selection.is_tiny else at_home(f"checkpoints/{name}")
    resume = (Path(checkpoint) / "latest_checkpointed_iteration.txt").is_file()
    if resume and checkpoint != NOTHING:
        say(f"Resuming from the checkpoint in {checkpoint}.")
    sizes = {each.name: getattr(options, each.name) for each in dataclasses.fields(Sizes)}
    return Experiment(
        preset=selection.model.preset(selection.preset),
        schedule=TRAININGS[options.training_config].preset(selection.preset),
        files=files_of(selection, python),
        tensorboard=options.tensorboard_path or at_home(f"tensorboard_logs/{name}"),
        checkpoint=None if checkpoint == NOTHING else checkpoint,
        resume=resume,
        formats=formats.flags,
        dtype=options.dtype,
        layout=layout_of(selection, python),
        launch=launch_of(options),
        sizes=Sizes(**sizes),
        is_tiny=selection.is_tiny,
        flags=flags,
    )


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what follows `--`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def start(options: argparse.Namespace, formats: Formats, flags: Sequence[str]) -> int:
    """Print the command of a dry run; or become the training.

    Raises:
        ConfigError: see what is refused above.
    """
    options.dry_run = options.dry_run or bool(os.environ.get("DRY_RUN"))
    check_names(options)
    python = interpreter(dry_run=options.dry_run)
    selection = select(options, python)
    command = experiment(selection, formats, flags, python).command(python)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    say(f"Training {run_name(selection, formats)}:\n  {shlex.join(command)}")
    sys.stdout.flush()
    os.execvpe(command[0], command, training_environment())


def training_environment() -> dict[str, str]:
    """This process's, with what training needs where the user has not said it."""
    variables = dict(os.environ)
    path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{REPO}{os.pathsep}{path}" if path else str(REPO)
    # By default OpenMP's threads spin while they wait for each other. Where anything else runs on
    # the same processors that is fatal: on 2 cores beside one busy process an iteration of the
    # tiny preset took 25 to 49 s; with a short spin it takes 1.5 s there, and 0.66 s instead of
    # 0.47 s on an idle machine.
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")
    variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return variables
