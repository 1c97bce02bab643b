"""Turn command-line options into a training run, and print or start its command."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs import run_names
from configs.command import Experiment, Sizes
from configs.datasets import DATASETS, Dataset
from configs.lookup import ConfigError, pick
from configs.models import MODELS, PRESETS, Model
from configs.options import positive, require, whole
from configs.parallelism import Launch, Parallelism
from configs.resolve import (
    REPO,
    DataRequest,
    Files,
    at_home,
    cuda_devices,
    interpreter,
    is_set,
    resolve_data,
    say,
)
from configs.run_names import Formats
from configs.trainings import TRAININGS

COLLECTING = {"--save-tensors", "--collect-plan"}  #: flags with which the size is printed
#: Environment variable that a driver sets if it prints the size of the collection itself.
ANNOUNCED_VARIABLE = "LAB_SIZE_ANNOUNCED"
NOTHING = "none"  #: value of --checkpoint-path that disables checkpoints


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Model, dataset and preset that the command-line options select."""

    options: argparse.Namespace
    model: Model
    dataset: Dataset | None
    preset: str

    @property
    def is_tiny(self) -> bool:
        return self.preset == "tiny"


def run_name(selection: Selection, formats: Formats, flags: Sequence[str], python: str) -> str:
    """Return the name of a run, which appears in folder names and messages."""
    options = selection.options
    return run_names.join(
        options.model,
        options.dataset or run_names.data_name(options.data_path),
        formats.effective_name(flags, python),
        None if options.training_config == "default" else options.training_config,
        "tiny" if selection.is_tiny else None,
    )


def check_names(options: argparse.Namespace) -> None:
    """Check the names in the options, such as that of the model; this does not need torch.

    Raises:
        ConfigError: if a name is unknown or missing.
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
    """Return the selected model, dataset and preset; choose a preset if the user gives none.

    `check_names` must have accepted the options.
    """
    preset = options.preset
    if preset is None:
        has_gpu = cuda_devices(python, dry_run=options.dry_run) > 0
        preset = "full" if has_gpu or options.dry_run else "tiny"
        if not has_gpu and options.dry_run:
            say("Without a CUDA device a run takes --preset tiny unless --preset full is given.")
        elif not has_gpu:
            say("No CUDA device: the model is the tiny preset (--preset full for the real one).")
    dataset = None if options.dataset is None else DATASETS[options.dataset]
    return Selection(options=options, model=MODELS[options.model], dataset=dataset, preset=preset)


def setting(given: int | None, variable: str, kind: Callable[[str], int]) -> int | None:
    """Return the value of an option or else of an environment variable; None if neither is set."""
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"environment variable {variable}: {error}") from None


def _refuse_cluster_options(options: argparse.Namespace, *, nnodes_given: bool) -> None:
    """Raise ConfigError for options that are valid only in a run on several machines.

    Otherwise, each machine would train independently, and all would write to the same folders.
    """
    if nnodes_given and not options.node_rank:
        return  # A job script may pass these options even for a single machine.
    for name in ("node_rank", "master_addr"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} belongs to a run on several machines, but "
                f"{'--nnodes is 1' if nnodes_given else 'their number is not given'}; give the "
                "number of machines in --nnodes (or NNODES)"
            )


def parallelism_of(selection: Selection, python: str) -> Parallelism:
    """Return the parallelism of the run: the model's default, changed by the user's options.

    Raises:
        ConfigError: if this machine has fewer GPUs than processes, or if options for several
            machines are given but the run uses one machine.
    """
    options = selection.options
    given = {
        "nproc_per_node": setting(options.nproc_per_node, "NPROC", positive),
        "nnodes": setting(options.nnodes, "NNODES", positive),
        **{name: getattr(options, name) for name in ("tp", "pp", "cp", "ep")},
    }
    given = {name: value for name, value in given.items() if value is not None}
    parallelism = dataclasses.replace(selection.model.preset(selection.preset).parallelism, **given)
    if parallelism.nnodes == 1:
        _refuse_cluster_options(options, nnodes_given="nnodes" in given)
    needs_check = parallelism.world > 1 and not options.dry_run
    devices = cuda_devices(python, dry_run=False) if needs_check else 0
    if 0 < devices < parallelism.nproc_per_node:
        raise ConfigError(
            f"{parallelism.nproc_per_node} processes, but this machine has {devices} GPU(s); give "
            f"--nproc-per-node {devices} and a --tp, --pp, --cp and --ep that fit it"
        )
    return parallelism


def launch_of(options: argparse.Namespace) -> Launch:
    return Launch(
        node_rank=setting(options.node_rank, "NODE_RANK", whole) or 0,
        master_addr=options.master_addr or os.environ.get("MASTER_ADDR"),
        master_port=setting(options.master_port, "MASTER_PORT", positive) or 6000,
    )


def files_of(selection: Selection, python: str) -> Files:
    """Return the paths of the tokenizer and the data of a run; see `resolve_data`."""
    options, tokenizer = selection.options, selection.model.tokenizer
    dataset = selection.dataset or next(iter(DATASETS.values()))
    default = Files(tokenizer=at_home(tokenizer.path), data=at_home(dataset.prefix(tokenizer)))
    request = DataRequest(
        tokenizer=options.tokenizer_path,
        data=options.data_path,
        default=default,
        corpus=selection.is_tiny,
        prepare=(
            *("bash", at_home(dataset.prepare)),
            *("--tokenizer-model", options.tokenizer_path or default.tokenizer),
            *("--output-prefix", default.data.removesuffix("_text_document")),
        ),
    )
    return resolve_data(request, python, dry_run=options.dry_run)


def experiment(
    selection: Selection, name: str, formats: Formats, flags: Sequence[str], python: str
) -> Experiment:
    """Return the experiment of run `name`: all that determines its command, except the files."""
    options = selection.options
    checkpoint = options.checkpoint_path
    if checkpoint is None:
        checkpoint = NOTHING if selection.is_tiny else at_home(f"checkpoints/{name}")
    resume = (Path(checkpoint) / "latest_checkpointed_iteration.txt").is_file()
    if resume and checkpoint != NOTHING:
        say(f"Resuming from the checkpoint in {checkpoint}.")
    sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)}
    return Experiment(
        preset=selection.model.preset(selection.preset),
        schedule=TRAININGS[options.training_config].preset(selection.preset),
        tensorboard=options.tensorboard_path or at_home(f"tensorboard_logs/{name}"),
        checkpoint=None if checkpoint == NOTHING else checkpoint,
        resume=resume,
        formats=formats.flags,
        dtype=options.dtype,
        parallelism=parallelism_of(selection, python),
        launch=launch_of(options),
        sizes=Sizes(**sizes),
        is_tiny=selection.is_tiny,
        flags=flags,
    )


def start(options: argparse.Namespace, formats: Formats, flags: Sequence[str]) -> int:
    """Replace this process with the training run or, in a dry run, only print the command.

    Raises:
        ConfigError: if an option is refused.
    """
    options.dry_run = options.dry_run or is_set("DRY_RUN")
    check_names(options)
    python = interpreter(dry_run=options.dry_run)
    selection = select(options, python)
    name = run_name(selection, formats, flags, python)
    settled = experiment(selection, name, formats, flags, python).settled()
    command = settled.command(python, files_of(selection, python))
    if COLLECTING.intersection(command) and not is_set(ANNOUNCED_VARIABLE):
        from configs.announce import announce  # slow to import, and rarely needed here

        announce(command, types=1, yes=True, dry_run=options.dry_run)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    say(f"Training {name}:\n  {shlex.join(command)}")
    sys.stdout.flush()
    os.execvpe(command[0], command, training_environment())


def training_environment() -> dict[str, str]:
    """Return this process's environment variables, with the defaults that training needs added."""
    variables = dict(os.environ)
    path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{REPO}{os.pathsep}{path}" if path else str(REPO)
    # torchrun is started with `python -m`, which would import an unrelated module named torch from
    # the current folder. This variable prevents that, except in Python 3.10, which ignores it.
    variables.setdefault("PYTHONSAFEPATH", "1")
    # By default, OpenMP threads spin while they wait for each other, which is very slow if other
    # processes run on the same cores. On 2 cores shared with one busy process, an iteration of the
    # tiny preset took 25 to 49 s. With a short spin it takes 1.5 s; on an idle machine, it takes
    # 0.66 s instead of 0.47 s.
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")
    variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return variables
