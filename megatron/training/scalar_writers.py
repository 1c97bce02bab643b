"""Write the scalars of a run to TensorBoard, Weights & Biases and MLflow, as requested.

The names are those of Megatron-LM. Only the last rank, which also prints the losses, writes them.
If a service fails during the run, training continues without it, and the run ends with an error.

Weights & Biases and MLflow are imported only if they are requested. TensorBoard also receives most
values as functions of the number of consumed samples, under `NAME vs samples`. The other services
have a single step counter, the iteration; their plots can use `consumed-samples` as the horizontal
axis.
"""

import argparse
import itertools
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from megatron.training.collective_errors import all_succeed
from megatron.training.printing import is_last_rank

#: values whose step is always the iteration, as in Megatron-LM, and never the number of samples
BY_ITERATION_ONLY = (
    "iteration-time",
    "throughput",
    "consumed-samples",
    "max_attention_logit",
    "mem-reserved-bytes",
    "mem-allocated-bytes",
    "mem-max-allocated-bytes",
    "mem-allocated-count",
)


class ScalarWriter(ABC):
    """Connection to one service that stores scalars."""

    name: ClassVar[str]  #: name of the service in messages
    incomplete: ClassVar[str]  #: message at the end of a run that failed to write some scalars
    remedy: ClassVar[str]
    #: exceptions after which the service is no longer used
    errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    by_samples: ClassVar[bool] = (
        False  #: True if a value may have the number of samples as its step
    )
    #: True if the run must not start without the service
    essential: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def requested(args: argparse.Namespace) -> bool:
        """Return whether the flags request this service."""

    @abstractmethod
    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write values that belong to one step."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write pending values, and end the connection."""

    @staticmethod
    @abstractmethod
    def failure(args: argparse.Namespace, where: str, reason: str) -> str:
        """Return a message about a failure of the service at the point `where` of the run."""


class TensorBoard(ScalarWriter):
    """TensorBoard's event files in the folder `--tensorboard-dir`."""

    name = "TensorBoard"
    incomplete = "TensorBoard's event files are not"
    remedy = "free disk space or choose another --tensorboard-dir"
    errors = (OSError,)
    by_samples = True
    essential = False  # `event_folder_problem` has checked the folder

    def __init__(self, args: argparse.Namespace):
        from torch.utils.tensorboard import SummaryWriter  # this import takes a second

        _silence_event_threads()
        Path(args.tensorboard_dir).mkdir(parents=True, exist_ok=True)
        self._writer: Any = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=1000)

    @staticmethod
    def requested(args: argparse.Namespace) -> bool:
        return args.tensorboard_dir is not None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.flush()  # also raises an error that occurred in the writing thread
        self._writer.close()

    @staticmethod
    def failure(args: argparse.Namespace, where: str, reason: str) -> str:
        return f"cannot write event files to {args.tensorboard_dir} at {where} ({reason})"


class WeightsAndBiases(ScalarWriter):
    """A run of the project `--wandb-project` in Weights & Biases."""

    name = "Weights & Biases"
    incomplete = "its scalars in Weights & Biases are not"
    remedy = (
        "check the network and `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later"
    )

    def __init__(self, args: argparse.Namespace):
        import wandb

        folder = Path(args.wandb_save_dir or Path(args.save) / "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            entity=args.wandb_entity,
            dir=str(folder),
            config=configuration(args),
            settings=wandb.Settings(console="off"),  # stdout stays as it is
        )

    @staticmethod
    def requested(args: argparse.Namespace) -> bool:
        return args.wandb_project is not None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    @staticmethod
    def failure(args: argparse.Namespace, where: str, reason: str) -> str:
        return f"cannot log to project {args.wandb_project} at {where} ({reason})"


class MLflow(ScalarWriter):
    """A run of the experiment `--mlflow-experiment` in MLflow."""

    name = "MLflow"
    incomplete = "its scalars in MLflow are not"
    remedy = "check --mlflow-tracking-uri or the environment variable MLFLOW_TRACKING_URI"
    MOST_METRICS, MOST_PARAMETERS = 1000, 100  #: limits of one request
    LONGEST = 500  #: maximum number of characters of a parameter's value in all releases

    def __init__(self, args: argparse.Namespace):
        import mlflow

        self._mlflow: Any = mlflow
        if args.mlflow_tracking_uri is not None:
            mlflow.set_tracking_uri(args.mlflow_tracking_uri)
        mlflow.set_experiment(args.mlflow_experiment)
        mlflow.start_run(run_name=args.mlflow_run_name)
        texts = ((name, str(value)[: self.LONGEST]) for name, value in configuration(args).items())
        while part := dict(itertools.islice(texts, self.MOST_PARAMETERS)):
            mlflow.log_params(part)

    @staticmethod
    def requested(args: argparse.Namespace) -> bool:
        return args.mlflow_experiment is not None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        values = iter(scalars.items())
        while part := dict(itertools.islice(values, self.MOST_METRICS)):
            self._mlflow.log_metrics(part, step=step)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")

    @staticmethod
    def failure(args: argparse.Namespace, where: str, reason: str) -> str:
        return f"cannot log to experiment {args.mlflow_experiment} at {where} ({reason})"


WRITERS: tuple[type[ScalarWriter], ...] = (TensorBoard, WeightsAndBiases, MLflow)


class Scalars:
    """The scalars of a run, and the services that receive them."""

    def __init__(self, args: argparse.Namespace):
        """Connect to the requested services. Must be called on all ranks.

        Raises:
            UserError: on all ranks, if a connection cannot be made.
        """
        #: services that the flags request, even on ranks that do not write
        self.requested = [kind for kind in WRITERS if kind.requested(args)]
        self._args = args
        self._interval = args.tensorboard_log_interval
        self._writers: list[ScalarWriter] = []
        self._failures: dict[type[ScalarWriter], str] = {}
        if not self.requested:
            return
        problem = None
        for kind in self.requested if is_last_rank() else ():
            with self._catching(kind, "the start"):
                self._writers.append(kind(args))
            if kind.essential and kind in self._failures and problem is None:
                problem = f"{self._failures[kind]}; {kind.remedy}"
        all_succeed(problem)

    def due(self, iteration: int) -> bool:
        """Return whether the values of an iteration are written; all ranks get the same result."""
        return bool(self.requested) and iteration % self._interval == 0

    def write(self, iteration: int, scalars: Mapping[str, float | None]) -> None:
        """Write the values that are not None, once per `--tensorboard-log-interval` iterations."""
        if not self.due(iteration):
            return
        values = {name: value for name, value in scalars.items() if value is not None}
        self._add(iteration, values)
        by_samples = {
            name: value for name, value in values.items() if name not in BY_ITERATION_ONLY
        }
        self._add_by_samples(int(values["consumed-samples"]), by_samples)

    def write_operands(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Write the statistics of the matmul operands, regardless of the log interval."""
        self._add(iteration, scalars)

    def write_evaluation(self, iteration: int, losses: Mapping[str, float], samples: int) -> None:
        """Write the validation losses, regardless of `--tensorboard-log-interval`."""
        values = {f"{name} validation": loss for name, loss in losses.items()}
        self._add(iteration, values)
        self._add_by_samples(samples, values)

    def close(self, *, failed: bool) -> None:
        """End all connections.

        Args:
            failed: whether an error ends the run.
        """
        for writer in list(self._writers):
            with self._catching(type(writer), "the end"):
                writer.close(failed=failed)

    def failure(self, kind: type[ScalarWriter]) -> str | None:
        """Return why a service did not receive all scalars, or None."""
        return self._failures.get(kind)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        for writer in list(self._writers) if values else ():
            with self._catching(type(writer), f"iteration {step}"):
                writer.add(values, step)

    def _add_by_samples(self, samples: int, values: Mapping[str, float]) -> None:
        named = {f"{name} vs samples": value for name, value in values.items()}
        for writer in list(self._writers):
            if writer.by_samples:
                with self._catching(type(writer), f"sample {samples}"):
                    writer.add(named, samples)

    @contextmanager
    def _catching(self, kind: type[ScalarWriter], where: str) -> Iterator[None]:
        """Stop using a service that fails in the `with` block; warn unless the run must end."""
        try:
            yield
        except kind.errors as error:
            self._writers = [writer for writer in self._writers if type(writer) is not kind]
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            line = str(reason).strip().partition("\n")[0]
            self._failures[kind] = kind.failure(self._args, where, line)
            if where != "the start" or not kind.essential:
                sys.stderr.write(
                    f"[WARNING] {self._failures[kind]}: training continues without {kind.name}\n"
                )
                sys.stderr.flush()


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags as values that every service can store: numbers, text, bools or None."""
    plain = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in sorted(vars(args).items())
    }


def event_folder_problem(args: argparse.Namespace) -> str | None:
    """Return why this rank cannot write to `--tensorboard-dir`, or None if there is no problem.

    The result is also None if this rank writes no event files.
    """
    if args.tensorboard_dir is None or not is_last_rank():
        return None
    folder = Path(args.tensorboard_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        return (
            f"--tensorboard-dir {folder} cannot be written ({error.strerror}); free disk space, "
            "choose another folder, or remove the flag"
        )
    return None


def _silence_event_threads() -> None:
    """Suppress the traceback of a TensorBoard thread that fails to write event files.

    The thread keeps its exception, and the next call to the writer raises it.
    """
    previous = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        from_tensorboard = type(failed.thread).__module__.startswith("tensorboard.")
        if not (from_tensorboard and issubclass(failed.exc_type, OSError)):
            previous(failed)

    threading.excepthook = hook
