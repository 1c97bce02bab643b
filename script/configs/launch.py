"""From the options to the training: names looked up, files found, the command printed or run."""

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

NOTHING = "none"  #: in place of a checkpoint's folder


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


def run_name(selection: Selection, formats: Formats, flags: Sequence[str], python: str) -> str:
    """Of the folders, and for the user."""
    options = selection.options
    return run_names.join(
        options.model,
        options.dataset or run_names.data_name(options.data_path),
        formats.effective_name(flags, python),
        None if options.training_config == "default" else options.training_config,
        "tiny" if selection.is_tiny else None,
    )


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


def _refuse_one_of_several(options: argparse.Namespace, *, said: bool) -> None:
    """Refuse a command line that speaks of other machines where this is the only one: each would
    train alone, and all into the same folders.
    """
    if said and not options.node_rank:
        return  # as a job script has it that was given one machine
    for name in ("node_rank", "master_addr"):
        if (given := getattr(options, name)) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {given} is of a run on several machines, but "
                f"{'--nnodes is 1' if said else 'nothing says how many'}; give their number in "
                "--nnodes (or NNODES)"
            )


def layout_of(selection: Selection, python: str) -> Parallelism:
    """The model's own layout, with what the user says.

    Raises:
        ConfigError: this machine has fewer GPUs than processes, or it is one of several and
            nothing says of how many.
    """
    options = selection.options
    given = {
        "nproc_per_node": _setting(options.nproc_per_node, "NPROC", positive),
        "nnodes": _setting(options.nnodes, "NNODES", positive),
        **{name: getattr(options, name) for name in ("tp", "pp", "cp", "ep")},
    }
    given = {name: value for name, value in given.items() if value is not None}
    layout = dataclasses.replace(selection.model.preset(selection.preset).layout, **given)
    if layout.nnodes == 1:
        _refuse_one_of_several(options, said="nnodes" in given)
    looks = layout.world > 1 and not options.dry_run
    devices = cuda_devices(python, dry_run=False) if looks else 0
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
    """All that the command of the run called `name` says, but the files."""
    options = selection.options
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


def start(options: argparse.Namespace, formats: Formats, flags: Sequence[str]) -> int:
    """Print the command of a dry run; or become the training.

    Raises:
        ConfigError: see what is refused above.
    """
    options.dry_run = options.dry_run or is_set("DRY_RUN")
    check_names(options)
    python = interpreter(dry_run=options.dry_run)
    selection = select(options, python)
    name = run_name(selection, formats, flags, python)
    settled = experiment(selection, name, formats, flags, python).settled()
    command = settled.command(python, files_of(selection, python))
    if options.dry_run:
        print(shlex.join(command))
        return 0
    say(f"Training {name}:\n  {shlex.join(command)}")
    sys.stdout.flush()
    os.execvpe(command[0], command, training_environment())


def training_environment() -> dict[str, str]:
    """This process's, with what training needs where the user has not said it."""
    variables = dict(os.environ)
    path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{REPO}{os.pathsep}{path}" if path else str(REPO)
    # torchrun is started with `python -m`, which would import anyone's torch.py from the current
    # folder. Python 3.10 does not know this variable.
    variables.setdefault("PYTHONSAFEPATH", "1")
    # By default OpenMP's threads spin while they wait for each other. Where anything else runs on
    # the same processors that is fatal: on 2 cores beside one busy process an iteration of the
    # tiny preset took 25 to 49 s; with a short spin it takes 1.5 s there, and 0.66 s instead of
    # 0.47 s on an idle machine.
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")
    variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return variables
