"""Start training runs and offline studies, in forks of this process or as new processes.

The imports of torch and megatron-core take several seconds. On a CPU, with one process per run
and one run at a time, this process therefore imports them once, and each run is a fork of it. A
fork cannot use a CUDA device that its parent has initialized, so runs on GPUs, of several ranks, or
several at a time are new processes.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from collect.process_tree import ProcessTree
from configs.launch import training_environment
from loss_gaps.run_log import ending
from megatron.forks import GRACE, run_in_fork

#: Module of the analysis program; the only other program that runs is `pretrain_gpt.py`.
ANALYSIS = "megatron.analysis"


class Run(NamedTuple):
    """Run of `pretrain_gpt.py`: its arguments, its log, and the first line of the log."""

    arguments: Sequence[str]
    log: Path
    head: str


class Launcher:
    """Runner that starts one or several programs at a time, each with its own log."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        forks: bool,
        drivers: Iterable[int] = (),
        watch: Callable[[], None] | None = None,
        gpus: Sequence[str] = (),
    ):
        """Create a launcher.

        Args:
            words: command that starts `pretrain_gpt.py`, up to and including this file.
            forks: whether to fork this process instead.
            drivers: process IDs of driver scripts; a new process is stopped when one has ended.
            watch: function that is called every second while a new process runs.
            gpus: GPUs, as in CUDA_VISIBLE_DEVICES, among which `train_all` distributes runs of
                one process each; by default, every run sees all GPUs.
        """
        self._words, self._forks = list(words), forks
        self._drivers, self._watch, self._gpus = tuple(drivers), watch, list(gpus)
        self._imported = False

    def train_all(self, runs: Sequence[Run], jobs: int) -> Iterator[int]:
        """Train `jobs` runs at a time, and yield the index of each run that has ended.

        Several runs at a time are new processes, never forks. If the caller stops early, the runs
        in progress are stopped, too.

        Raises:
            RuntimeError: if a process that watches a run has failed.
        """
        if jobs == 1:
            for index, run in enumerate(runs):
                self.train(*run)
                yield index
            return
        spawn = multiprocessing.get_context("spawn")
        waiting, running, places = list(enumerate(runs)), {}, {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, run = waiting.pop(0)
                    places[index] = min(set(range(jobs)) - {places[i] for i in running})
                    gpu = self._gpus[places[index] % len(self._gpus)] if self._gpus else None
                    watcher = spawn.Process(
                        target=_train_watched,
                        args=(self._words, run, os.getpid(), gpu),
                        daemon=True,
                    )
                    watcher.start()
                    running[index] = watcher
                multiprocessing.connection.wait([each.sentinel for each in running.values()])
                for index in [i for i, each in running.items() if not each.is_alive()]:
                    if status := running.pop(index).exitcode:
                        raise RuntimeError(
                            f"the process that watched a run ended with status {status}; see "
                            f"{runs[index].log}"
                        )
                    yield index
        finally:
            for watcher in running.values():
                watcher.terminate()  # The watcher then stops its run.
            for watcher in running.values():
                watcher.join()

    def train(self, arguments: Sequence[str], log: Path, head: str) -> int:
        """Run `pretrain_gpt.py` and return its exit status; the log begins with the line `head`.

        Raises:
            RuntimeError: if one of the driver scripts has ended before the run.
        """
        return self._run([*self._words, *arguments], arguments, log, head)

    def analyze(self, arguments: Sequence[str], log: Path, head: str) -> int:
        """Run `python -m megatron.analysis`; the log and the return value are as in `train`."""
        return self._run([sys.executable, "-m", ANALYSIS, *arguments], arguments, log, head)

    def _run(self, command: list[str], arguments: Sequence[str], log: Path, head: str) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with log.open("wb") as out:
            out.write(head.encode())
            out.flush()
            run = self._fork if self._forks else self._start
            status = run(command, arguments, out)
            out.write(ending(status, time.monotonic() - started).encode())
        return status

    def _start(self, command: list[str], arguments: Sequence[str], out: IO[bytes]) -> int:
        tree = ProcessTree(command, output=out, environment=environment(), drivers=self._drivers)
        try:
            while (status := tree.wait(1.0)) is None:
                if (driver := tree.lost_driver()) is not None:
                    raise RuntimeError(f"the driver script (process {driver}) has ended")
                if self._watch is not None:
                    self._watch()
            return status
        finally:
            tree.stop(GRACE)

    def _fork(self, command: list[str], arguments: Sequence[str], out: IO[bytes]) -> int:
        if not self._imported:
            _import()
            self._imported = True
        return run_in_fork(lambda: _program(command, arguments), out)


def _train_watched(words: Sequence[str], run: Run, parent: int, gpu: str | None) -> None:
    """Train one run in a new process, and stop it if the process `parent` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process decides what to do.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        Launcher(words, forks=False, drivers=[parent]).train(*run)
    except (RuntimeError, OSError) as error:
        sys.exit(f"[ERROR] {error}")


def environment() -> dict[str, str]:
    """Return the environment of a run, without variables that set formats or collect tensors."""
    variables = training_environment().items()
    return {
        name: text
        for name, text in variables
        if "QUANT" not in name and not name.startswith("TENSOR_SAVE")
    }


def _import() -> None:
    """Import what every run needs. No import may start a thread, which forks would lack."""
    import megatron.analysis.__main__
    import megatron.analysis.store
    import megatron.analysis.study
    import megatron.core.tokenizers.text.libraries
    import megatron.training.checkpointing.save_load
    import megatron.training.training  # noqa: F401


def _program(command: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the program in this forked process, and return its status."""
    kept = environment()
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(kept)
    if ANALYSIS in command:
        from megatron.analysis.__main__ import main
    else:
        from megatron.training.main import main
    return main(list(arguments))


@contextmanager
def locked(folder: Path):
    """Lock an output folder in a `with` block; forks that outlive this process keep the lock.

    Other runs end within seconds after this process, because their watchers notice its end.

    Raises:
        ValueError: if another study, or a run that has outlived it, holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another study writes to {folder}; wait for it, or give another --output-dir"
            ) from None
        yield
