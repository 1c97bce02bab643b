"""Build the command that trains one experiment of the matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.lookup import ConfigError, last_value, number
from configs.models import Preset
from configs.parallelism import UNEVEN_STAGES, Launch, Parallelism, check_model, check_ranks
from configs.resolve import REPO, Files, say, tokenizer_type
from configs.trainings import OPTIMIZER, Schedule

PRECISIONS = {"bf16": ("--bf16",), "fp16": ("--fp16", "--initial-loss-scale", "65536"), "fp32": ()}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that the user sets; None keeps the default of the preset or training configuration."""

    train_iters: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that determines a training command, except the tokenizer and the data."""

    preset: Preset
    schedule: Schedule
    tensorboard: str
    checkpoint: str | None  #: folder for checkpoints; None if none are saved
    resume: bool  #: True if the folder `checkpoint` already holds a checkpoint
    formats: Sequence[str]  #: flags that set the number formats
    dtype: str = "bf16"
    parallelism: Parallelism = field(default_factory=Parallelism)
    launch: Launch = field(default_factory=Launch)
    sizes: Sizes = field(default_factory=Sizes)
    is_tiny: bool = False
    flags: Sequence[str] = ()  #: the user's flags for `pretrain_gpt.py`, which take precedence

    def settled(self) -> Experiment:
        """Return a copy of this experiment in which every size is set and all sizes fit together.

        A size that does not fit is reported here, before any file is searched for or made.

        Raises:
            ConfigError: if a size does not fit; the message names values that do.
        """
        sizes = self._sizes()
        uneven = any(word.split("=")[0] in UNEVEN_STAGES for word in self.flags)
        check_model(self.parallelism, self.preset.architecture, uneven_stages=uneven)
        check_ranks(self.parallelism, sizes.seq_length)
        self.launch.check(self.parallelism)
        return dataclasses.replace(self, sizes=self._batch(sizes))

    def command(self, python: str, files: Files) -> list[str]:
        """Return the training command as a list of words. Every size of the experiment must be set.

        Raises:
            MissingFile: if the type of the tokenizer cannot be determined.
        """
        sizes = self.sizes
        return [
            *self.launch.words(python, self.parallelism),
            str(REPO / "pretrain_gpt.py"),
            *self.preset.architecture.flags(),
            *(("--recompute-activations",) if self.preset.recompute else ()),
            *self.parallelism.flags(),
            *self._sharing(),
            *OPTIMIZER,
            *self.schedule.flags(),
            *("--seq-length", str(sizes.seq_length)),
            *("--micro-batch-size", str(sizes.micro_batch_size)),
            *("--global-batch-size", str(sizes.global_batch_size)),
            *("--train-iters", str(sizes.train_iters)),
            *("--lr", number(sizes.lr), "--min-lr", number(sizes.lr / 10)),
            *PRECISIONS[self.dtype],
            *("--log-interval", "1"),
            *("--tokenizer-type", tokenizer_type(files.tokenizer)),
            *("--tokenizer-model", files.tokenizer, "--data-path", files.data),
            *("--tensorboard-dir", self.tensorboard),
            *self._saving(),
            *self.formats,
            *self.flags,
        ]

    def _sizes(self) -> Sizes:
        """Return the sizes that the user sets, completed from the preset and the schedule.

        The global batch size may still be None.
        """
        preset, schedule, given = self.preset, self.schedule, self.sizes
        seq_length = given.seq_length or min(
            preset.seq_length, schedule.longest_sequence or preset.seq_length
        )
        collected = self._collected()
        if given.train_iters is not None and given.train_iters < collected:
            raise ConfigError(
                f"--train-iters {given.train_iters} is less than --control-iter {collected}, the "
                f"iterations to collect; give --train-iters {collected}, or collect fewer"
            )
        return Sizes(
            train_iters=given.train_iters or max(schedule.train_iters, collected),
            micro_batch_size=given.micro_batch_size or preset.micro_batch_size,
            global_batch_size=given.global_batch_size,
            seq_length=seq_length,
            lr=given.lr or preset.lr,
        )

    def _collected(self) -> int:
        """Return the number of iterations that `--control-iter` requests, or 0 without this flag.

        A value that is not a number counts as 0 here; training refuses it.
        """
        text = last_value("--control-iter", self.flags) or ""
        return int(text) if text.isdecimal() else 0

    def _batch(self, sizes: Sizes) -> Sizes:
        """Return `sizes` with a global batch size that the replicas can share equally.

        A global batch size that the user gives must fit; a default is rounded up.
        """
        step = sizes.micro_batch_size * self.parallelism.data
        batch = sizes.global_batch_size
        if batch is None:
            wanted = self.schedule.global_batch_size or step * self.schedule.micro_batches
            batch = -(-wanted // step) * step
            if batch != wanted:
                say(
                    f"The global batch is {batch} sequences, not {wanted}: {self.parallelism.data} "
                    f"copies of the model take {sizes.micro_batch_size} at a time."
                )
        elif batch % step:
            raise ConfigError(
                f"--global-batch-size {batch} is not a multiple of --micro-batch-size "
                f"{sizes.micro_batch_size} x {self.parallelism.data} copies of the model; "
                f"{batch // step * step or step} or {(batch // step + 1) * step} would fit"
            )
        return dataclasses.replace(sizes, global_batch_size=batch)

    def _sharing(self) -> list[str]:
        """Return flags that shard the optimizer state, or [] for a tiny model or one process."""
        if self.is_tiny or self.parallelism.world == 1:
            return []
        return ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]

    def _saving(self) -> list[str]:
        if self.checkpoint is None:
            return []
        words = ["--save", self.checkpoint]
        if self.schedule.save_interval is not None:
            words += ["--save-interval", str(self.schedule.save_interval)]
        return [*words, "--load", self.checkpoint] if self.resume else words
