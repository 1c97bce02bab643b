#!/usr/bin/env python3
"""Train the bf16 model from which the default collection continues, unless the model exists.

    python script/collect/train_model.py --iterations 300

The checkpoint is written to model/default/llama32_tiny_bf16_<iterations>_<key>/. The key depends on
everything that determines the weights: the model, the text and its tokenizer, the training flags,
the seed, and the versions of torch and megatron-core. The folder gets its name when the training is
complete, so that an interrupted training leaves no checkpoint. Several calls at a time are safe:
one trains, and the others wait for it.

Exit status: 0 the model exists; 1 it could not be trained; 2 wrong option; 128+n after signal n.
"""

from __future__ import annotations

import argparse
import fcntl
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from collect.run import drivers
from configs import trained_model
from configs.lookup import ConfigError
from configs.options import positive
from configs.resolve import default_corpus, make_corpus, say
from configs.trained_model import TrainedModel
from loss_gaps.launcher import Launcher
from loss_gaps.run_log import COMPLETE, losses_in, parse_log
from megatron.console import ArgumentParser, run_main

LAST = 32  #: number of iterations over which the final loss is averaged, as in run cards
EVERY = 5.0  #: seconds between two lines of progress


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations",
        type=positive,
        default=trained_model.ITERATIONS,
        metavar="N",
        help="iterations of two sequences each (%(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        files = default_corpus()
        if not files.there():
            files = make_corpus(sys.executable)
        model = TrainedModel(options.iterations, files)
        if not model.exists():
            with locked(model.folder.parent / ".training.lock"):
                if not model.exists():
                    train(model)
    except OSError as error:
        return fail(
            f"cannot save a trained model: {error}; make the folder writable, or {advice()}"
        )
    except (RuntimeError, ConfigError) as error:
        return fail(str(error))
    say(described(model))
    return 0


def fail(message: str) -> int:
    """Print an error message, and return the exit status 1."""
    say(f"[ERROR] {message}")
    return 1


def advice() -> str:
    return "give --start-iterations 0 to start from random weights"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock in the `with` block; wait until no other process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process, which trains the model to start from ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def train(model: TrainedModel) -> None:
    """Train the model in a temporary folder, and rename the folder. The lock must be held.

    Raises:
        RuntimeError: if the training fails, or if the driver script ends before the training.
    """
    folder = model.folder
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):  # a killed process left them, without a checkpoint
        shutil.rmtree(leftover, ignore_errors=True)
    program, arguments = model.words(sys.executable)
    arguments += ["--save", str(partial)]
    log, head = partial / model.log.name, f"pretrain_gpt.py {shlex.join(arguments)}\n"
    say(
        f"Training the model to start from, once: {model.iterations} iterations in bf16, saved in "
        f"{folder}"
    )
    progress = Progress(log, model.iterations)
    launcher = Launcher(program, forks=False, drivers=drivers(), watch=progress.show)
    launcher.train(arguments, log, head)
    result = parse_log(text_of(log), head, model.iterations, evaluated=False)
    if result is None or result.status != COMPLETE:
        why = "its log is incomplete" if result is None else result.message
        raise RuntimeError(f"the model was not trained: {why}; see {log}, or {advice()}")
    partial.rename(folder)


class Progress:
    """Lines that show the progress of the training."""

    def __init__(self, log: Path, iterations: int):
        self._log, self._iterations = log, iterations
        self._started = self._shown = time.monotonic()

    def show(self) -> None:
        """Print the last iteration and its loss, at most every `EVERY` seconds."""
        now = time.monotonic()
        if now - self._shown < EVERY:
            return
        self._shown = now
        losses = losses_in(text_of(self._log))
        done = f"iteration {len(losses)} of {self._iterations}"
        loss = f", loss {losses[max(losses)]:.2f}" if losses else ""
        say(f"[{now - self._started:4.0f} s] {done}{loss}")


def text_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def described(model: TrainedModel) -> str:
    """Return a sentence about a trained model, with its first and its final loss if known."""
    try:
        losses = list(losses_in(text_of(model.log)).values())
    except OSError:  # The weights can be used without the log.
        losses = []
    known = (
        f"loss {losses[0]:.2f} at first and {mean(losses[-LAST:]):.2f} at the end"
        if losses
        else f"the losses are unknown, because {model.log} is missing or has none"
    )
    return (
        f"Starting from the weights in {model.folder}: {model.iterations} iterations in bf16, "
        f"{known}; --start-iterations 0 starts from random weights"
    )


if __name__ == "__main__":
    run_main(main)
