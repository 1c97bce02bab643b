"""The log line of an iteration, in the shape that Megatron-LM gives it, and the same numbers for
TensorBoard.
"""

import argparse
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.collection.loss_spikes import Levels
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training.flops import flops_per_token
from megatron.training.printing import is_last_rank, stamp
from megatron.training.train_step import Step


@dataclass
class TrainingProgress:
    """Where a run stands. All of it is in the checkpoint."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0  #: since the beginning, as in Megatron-LM's checkpoints
    #: Recent usual losses and gradient norms, from which a loss spike is told from noise.
    levels: Levels = field(default_factory=dict)


@dataclass
class Interval:
    """What is summed up between two log lines."""

    started: float = field(default_factory=time.perf_counter)
    iterations: int = 0
    skipped: int = 0
    nan: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """Count one iteration. A loss that is not finite goes into the mean like any other: it
        shows.
        """
        self.iterations += 1
        self.skipped += step.skipped
        self.nan += any(not math.isfinite(loss) for loss in step.losses.values())
        for name, loss in step.losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss

    def mean_losses(self) -> dict[str, float]:
        """The losses, averaged over the iterations."""
        return {name: loss / self.iterations for name, loss in self.losses.items()}


@dataclass(frozen=True)
class Numbers:
    """One log line's numbers beside those of `Interval`."""

    learning_rate: float
    loss_scale: float
    params_norm: float | None
    seconds: float  #: an iteration


def log_line(
    args: argparse.Namespace,
    progress: TrainingProgress,
    interval: Interval,
    step: Step,
    numbers: Numbers,
) -> str:
    """The line. People and tools parse it: each part is spelled as Megatron-LM spells it."""
    parts = [
        f" [{stamp()}] iteration {progress.iteration:8d}/{args.train_iters:8d}",
        f" consumed samples: {progress.consumed_train_samples:12d}",
        f" elapsed time per iteration (ms): {numbers.seconds * 1000:.1f}",
    ]
    if args.log_throughput:
        iteration = flops_per_token(args) * args.seq_length * get_current_global_batch_size()
        flops = iteration / numbers.seconds / args.world_size / 1e12
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {flops:.1f}")
    parts += [
        f" learning rate: {numbers.learning_rate:.6E}",
        f" global batch size: {get_current_global_batch_size():5d}",
        *(f" {name}: {loss:.6E}" for name, loss in interval.mean_losses().items()),
        f" loss scale: {numbers.loss_scale:.1f}",
    ]
    if step.grad_norm is not None:
        parts.append(f" grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f" num zeros: {step.num_zeros}")
    if numbers.params_norm is not None:
        parts.append(f" params norm: {numbers.params_norm:.3f}")
    if step.max_attention_logit is not None:
        parts.append(f" max_attention_logit: {step.max_attention_logit:.3f}")
    parts += [
        f" number of skipped iterations: {interval.skipped:3d}",
        f" number of nan iterations: {interval.nan:3d}",
    ]
    return " |".join(parts) + " |"


def event_folder_problem(args: argparse.Namespace) -> str | None:
    """Return why this rank cannot write to `--tensorboard-dir`; None if it can or need not."""
    if args.tensorboard_dir is None or not is_last_rank():
        return None
    folder = Path(args.tensorboard_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        return (
            f"--tensorboard-dir {folder} cannot be written ({error.strerror}); make room, choose "
            "another folder, or remove the flag"
        )
    return None


class TensorBoard:
    """Writer of scalars per iteration, under Megatron-LM's names, on the rank that prints the log.

    If writing fails, training continues and the run ends with an error.
    """

    def __init__(self, args: argparse.Namespace):
        self.failure: str | None = None  #: why the event files are incomplete
        self._writer: Any = None
        self._folder = args.tensorboard_dir
        self._interval = args.tensorboard_log_interval
        if args.tensorboard_dir is not None and is_last_rank():
            from torch.utils.tensorboard import SummaryWriter  # costs a second

            _silence_event_threads()
            with self._failures("the start"):
                Path(args.tensorboard_dir).mkdir(parents=True, exist_ok=True)
                self._writer = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=1000)

    def write(self, iteration: int, scalars: dict[str, float | None]) -> None:
        """Add the scalars that have a value, on the iterations of `--tensorboard-log-interval`."""
        if iteration % self._interval:
            return
        self._add(iteration, {name: value for name, value in scalars.items() if value is not None})

    def write_evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        """Add the validation losses, whatever the interval."""
        self._add(iteration, {f"{name} validation": loss for name, loss in losses.items()})

    def close(self) -> None:
        """Write out what is queued."""
        if self._writer is not None:
            with self._failures("the end"):
                self._writer.flush()  # also raises the errors of the writing thread
                self._writer.close()

    def _add(self, iteration: int, scalars: dict[str, float]) -> None:
        if self._writer is not None:
            with self._failures(f"iteration {iteration}"):
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, iteration)

    @contextmanager
    def _failures(self, where: str) -> Iterator[None]:
        """Stop writing at the first error of the file system, and print a warning."""
        try:
            yield
        except OSError as error:
            self._writer = None
            why = error.strerror or str(error)
            self.failure = f"cannot write event files to {self._folder} at {where} ({why})"
            sys.stderr.write(f"[WARNING] {self.failure}: training continues without TensorBoard\n")
            sys.stderr.flush()


def _silence_event_threads() -> None:
    """Suppress the traceback of a thread that fails to write event files.

    The thread keeps its exception, and the next call of the writer raises it.
    """
    previous = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        ours = type(failed.thread).__module__.startswith("tensorboard.")
        if not (ours and issubclass(failed.exc_type, OSError)):
            previous(failed)

    threading.excepthook = hook


def scalars(progress: TrainingProgress, step: Step, numbers: Numbers) -> dict[str, Any]:
    """What TensorBoard shows of one iteration."""
    return {
        "learning-rate": numbers.learning_rate,
        "batch-size": get_current_global_batch_size(),
        **step.losses,
        "loss-scale": numbers.loss_scale,
        "grad-norm": step.grad_norm,
        "num-zeros": step.num_zeros,
        "params-norm": numbers.params_norm,
        "max_attention_logit": step.max_attention_logit,
        "iteration-time": numbers.seconds,
        "consumed-samples": progress.consumed_train_samples,
    }
