"""Run the trainings of a study: the bf16 model, the collection, and the compared runs."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from configs import launch, resolve
from configs.lookup import ConfigError, last_value, number
from configs.resolve import REPO, say
from configs.run_names import Formats
from configs.trained_model import PACKAGES, VERSION, continue_flags, start_flags, without
from loss_gaps.configurations import BASELINE, Configuration
from loss_gaps.held_out import cut
from loss_gaps.launcher import Launcher, Run
from loss_gaps.offline import check_dump
from loss_gaps.run_heads import changed, checkpoint_files, files_in, head_of, state_of
from loss_gaps.run_log import COMPLETE, RunLog, has_ended, parse_log, read_log
from megatron.training import device

#: Evaluation interval with which a run is evaluated only at its end.
NEVER = 1 << 30
#: Flags of the matrix's training command that the study replaces.
REPLACED = (
    *("--data-path", "--split", "--tensorboard-dir", "--eval-iters", "--eval-interval"),
    "--train-iters",  # each run has its own
)


class Trainings:
    """All training runs of a study, with their sizes and files."""

    def __init__(self, options: argparse.Namespace):
        """Find or make the data, and build the command that all runs share.

        Args:
            options: options of script/study.py.

        Raises:
            ConfigError: if an option does not fit, or a file is missing.
        """
        device.prepare()  # before the first import of megatron-core
        self.options, self.folder = options, options.output_dir.resolve()
        matrix, python = self._matrix(), sys.executable
        if options.text or options.held_out_text:
            tokenizer = options.tokenizer_path or resolve.make_corpus(python).tokenizer
            matrix.tokenizer_path = tokenizer
            if options.text:
                matrix.data_path = tokenized(options.text, tokenizer, self.folder / "data")
            if options.held_out_text:
                text = options.held_out_text
                matrix.valid_data_path = tokenized(text, tokenizer, self.folder / "data")
        selection = launch.select(matrix, python)
        plain = launch.experiment(selection, "study", Formats(name="", flags=()), (), python)
        experiment = dataclasses.replace(plain.settled(), flags=options.flags)
        sizes = experiment.sizes
        self.tokens = sizes.global_batch_size * sizes.seq_length  #: tokens per iteration
        self.held_out_tokens = options.eval_iters * self.tokens
        files = launch.files_of(selection, python)
        # The last token is only a prediction target, not an input.
        length = self.held_out_tokens + 1
        parts = cut(files.data, matrix.valid_data_path, length, self.folder / "data")
        words = experiment.command(python, files)
        at = words.index(str(REPO / "pretrain_gpt.py")) + 1
        self.flags = [
            *without(words[at:], REPLACED),
            *("--train-data-path", parts.train, "--valid-data-path", parts.held_out),
            *("--eval-interval", str(NEVER), "--eval-iters", str(options.eval_iters)),
        ]
        world, devices = experiment.parallelism.world, resolve.cuda_devices(python)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # CUDA ignores what follows an entry that is no device.
        gpus = visible.split(",")[:devices] if visible else map(str, range(devices))
        self.launcher = Launcher(
            words[:at],
            forks=sys.platform == "linux" and world == 1 and devices == 0,
            gpus=list(gpus) if world == 1 and devices > 1 else (),
        )
        packages = [f"{name} {version(name)}" for name in PACKAGES]
        #: values that determine the results of all runs, for the first lines of their logs
        self.causes = {
            "files": state_of(files_in(self.flags)),
            "processes": f"{world} on {'cuda' if devices else 'cpu'}",
            "versions": ", ".join([*packages, f"training code {VERSION}"]),
        }
        if options.load:
            self.causes["start"] = state_of(checkpoint_files(options.load, options.flags))

    def _matrix(self) -> argparse.Namespace:
        """Return the options with which train_config.py would start one of the compared runs."""
        matrix = argparse.Namespace(**vars(self.options))
        matrix.training_config, matrix.dataset, matrix.dtype = "default", None, "bf16"
        matrix.checkpoint_path, matrix.tensorboard_path = launch.NOTHING, "none"
        matrix.train_iters, matrix.dry_run = self.iterations, False
        matrix.nnodes = matrix.node_rank = matrix.master_addr = matrix.master_port = None
        return matrix

    @property
    def iterations(self) -> int:
        """Number of iterations of each compared run."""
        return int(self.options.from_scratch or self.options.continue_iterations)

    @property
    def start(self) -> Path:
        """Folder of the checkpoint from which all configurations continue."""
        return (self.options.load or self.folder / "start" / "checkpoint").resolve()

    def train_start(self) -> RunLog | None:
        """Train the bf16 model from which all configurations continue, and return the result.

        The result is None if the runs start from scratch or from a given checkpoint. Otherwise, the
        losses of the run identify the weights in the logs of the runs that start from them.

        Raises:
            RuntimeError: if the run fails.
        """
        if self.options.load or self.options.from_scratch:
            return None
        iterations = self.options.start_iterations
        flags = [*start_flags(iterations), "--save", str(self.start)]
        self.causes.pop("start", None)
        result = self._needed("start", flags, iterations, self.start)
        weights = [flags, self.causes, result.losses, result.gradient_norms, result.held_out_loss]
        self.causes["start"] = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
        return result

    def collect(self) -> Path:
        """Collect the operands for the offline study, and return the folder of the dump.

        If the runs continue from a checkpoint, it is trained first, and the operands are those of
        the first iteration after it. From scratch, they are those of the last iteration.

        Raises:
            RuntimeError: if the run fails.
            ValueError: if the given dump does not fit; see `check_dump`.
        """
        if self.options.dump is not None:
            check_dump(self.options.dump, self.flags)
            return Path(self.options.dump)
        self.train_start()
        iterations = self.iterations if self.options.from_scratch else 1
        dump = self.folder / "operands"
        # A run that collects ends with the collection, before any evaluation.
        flags = [*self._run_flags(1, iterations), "--eval-iters", "0", "--save-tensors"]
        flags += ["--tensor-save-dir", str(dump), "--collect-iterations", str(iterations)]
        self._needed("operands", flags, iterations, dump, evaluated=False)
        return dump

    def _needed(
        self,
        name: str,
        flags: Sequence[str],
        iterations: int,
        output: Path,
        *,
        evaluated: bool = True,
    ) -> RunLog:
        """Return the result of a bf16 run that others need; run it first unless it is complete.

        Args:
            name: name of the run and its log.
            flags: flags of the run besides those of all runs.
            iterations: number of iterations.
            output: folder that the run writes, and that is removed before it.
            evaluated: whether the run ends with an evaluation.

        Raises:
            RuntimeError: if the run fails.
        """
        log = self.folder / f"{name}.log"
        arguments = [*self.flags, "--custom-quant-type", BASELINE, *flags]
        head = head_of(arguments, self.causes)
        result = None
        if output.is_dir():
            result = read_log(log, head, iterations, evaluated=evaluated)
        why = _why_repeated([(log, head)])
        if result is None and self.options.report_only:
            raise RuntimeError(
                f"the bf16 run {name!r} is not complete{why}, so there is nothing to report; leave "
                "out --report-only"
            )
        if result is None:
            say(f"bf16 run {name!r}{why}, {iterations} iterations; log in {log}")
            shutil.rmtree(output, ignore_errors=True)
            self.launcher.train(arguments, log, head)
            result = _result(log, head, iterations, evaluated=evaluated)
        if result.status != COMPLETE:
            raise RuntimeError(f"the run {name!r} {result.status}: {result.message}; see {log}")
        return result

    def _run_flags(self, seed: int, iterations: int) -> list[str]:
        """Return the flags of a run that is compared with others, except for its formats."""
        flags = ["--seed", str(seed), "--train-iters", str(iterations)]
        if not self.options.from_scratch:
            flags += continue_flags(self.start)
            if (rate := self.options.continue_lr) is not None:
                flags += ["--lr", number(rate), "--min-lr", number(rate / 10)]
        return flags

    def _cache(self, log: Path) -> list[str]:
        """Return flags that give a run its own cache of sample indices.

        Several runs at a time must not share a cache, because megatron-core does not lock it. The
        caches are in the folder of the flag `--data-cache-path`, if it is given.
        """
        if self.options.jobs == 1:
            return []
        given = last_value("--data-cache-path", self.options.flags)
        return ["--data-cache-path", str(Path(given or self.folder / "data" / "cache", log.stem))]

    def compare(self, configurations: Sequence[Configuration]) -> dict[tuple[str, int], RunLog]:
        """Train all configurations with all seeds, and return the results.

        With `--report-only`, only return those of runs that have ended.
        """
        runs: dict[tuple[str, int], RunLog] = {}
        missing: list[tuple[Configuration, int, list[str], Path, str]] = []
        for seed in range(1, self.options.seeds + 1):
            for each in configurations:
                log = self.folder / "runs" / f"{each.file_name}_seed{seed}.log"
                arguments = [*self.flags, *each.flags, *self._run_flags(seed, self.iterations)]
                head = head_of(arguments, {**self.causes, "recipe": each.digest})
                result = read_log(log, head, self.iterations, failed=self.options.report_only)
                if result is not None:
                    runs[each.name, seed] = result
                else:
                    missing.append((each, seed, arguments, log, head))
        total = len(runs) + len(missing)
        why = _why_repeated([(log, head) for *_, log, head in missing])
        say(
            f"{len(runs)} of {total} runs were trained earlier{why}; logs in {self.folder / 'runs'}"
        )
        started = [
            Run([*arguments, *self._cache(log)], log, head)
            for _, _, arguments, log, head in missing
        ]
        left = [each.name for each, *_ in missing]
        jobs = self.options.jobs
        for index in () if self.options.report_only else self.launcher.train_all(started, jobs):
            each, seed, _, log, head = missing[index]
            result = _result(log, head, self.iterations)
            runs[each.name, seed] = result
            left.remove(each.name)
            say(
                f"[{len(runs)}/{total}] {each.name}, seed {seed}: {outcome(result)} "
                f"({result.seconds:.1f} s){remaining(runs, left, jobs)}"
            )
        order = {each.name: at for at, each in enumerate(configurations)}
        return dict(sorted(runs.items(), key=lambda item: (order[item[0][0]], item[0][1])))


def _result(log: Path, head: str, iterations: int, *, evaluated: bool = True) -> RunLog:
    """Return the result of a run that has ended."""
    text = log.read_text(encoding="utf-8", errors="replace")
    result = parse_log(text, head, iterations, evaluated=evaluated)
    assert result is not None, "the launcher has written both ends of the log"
    return result


def _why_repeated(missing: Sequence[tuple[Path, str]]) -> str:
    """Return text that states why runs that have ended cannot be used, or an empty string.

    Args:
        missing: logs of the runs that are missing, and the first lines that they should have.
    """
    differences: dict[str, None] = {}
    count = 0
    for log, head in missing:
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        if has_ended(text) and not text.startswith(head):
            count += 1
            differences |= dict.fromkeys(changed(text, head))
    if not count:
        return ""
    logs = "their logs have" if count > 1 else "its log has"
    return (
        f" ({count} ended earlier and cannot be used, because {logs} different values, or none, "
        f"for {', '.join(differences)})"
    )


def outcome(result: RunLog) -> str:
    """Return the held-out loss of a run, or why it has none."""
    if result.status == COMPLETE:
        return f"held-out loss {result.held_out_loss:.4f}"
    return f"{result.status}: {result.message}"


def remaining(runs: dict[tuple[str, int], RunLog], left: Sequence[str], jobs: int = 1) -> str:
    """Return text such as `; about 5 min remain`, or an empty string if no runs remain.

    Args:
        runs: results of earlier runs.
        left: names of the configurations of the runs that have not ended.
        jobs: number of runs at a time.
    """
    seconds: dict[str, list[float]] = {}
    for (name, _), result in runs.items():
        seconds.setdefault(name, []).append(result.seconds)
    everything = [value for values in seconds.values() for value in values]
    total = 0.0
    for name in left:
        values = seconds.get(name, everything)
        total += sum(values) / len(values)
    if not left:
        return ""
    total /= min(jobs, len(left))
    return (
        f"; about {total / 60:.0f} min remain" if total >= 90 else f"; about {total:.0f} s remain"
    )


def tokenized(text: Path, tokenizer: str, folder: Path) -> str:
    """Tokenize a text, unless this was done before, and return the prefix of the token files.

    Raises:
        ConfigError: if the text cannot be tokenized; the reason was printed.
    """
    digest = hashlib.sha256()
    for path in (text, Path(tokenizer)):
        if path.is_dir():
            state = state_of(each for each in path.iterdir() if each.is_file())
            digest.update(state.encode())
        else:
            digest.update(path.read_bytes())
    prefix = folder / f"{text.stem}_{digest.hexdigest()[:12]}"
    data = f"{prefix}_text_document"
    if not resolve.has_data(data):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, REPO / "script" / "data" / "preprocess.py", "--append-eod"]
        command += ["--input", text, "--tokenizer-model", tokenizer, "--output-prefix", prefix]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise ConfigError(f"{text} cannot be tokenized; the reason is above")
    return data
