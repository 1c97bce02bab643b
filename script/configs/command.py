"""From a choice of the tables to the command that trains it."""

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
    """What the user says in place of the tables; None: the tables' values."""

    train_iters: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training, complete but for its files and the words of its command."""

    preset: Preset
    schedule: Schedule
    tensorboard: str
    checkpoint: str | None  #: folder to save to; None: nothing is saved
    resume: bool  #: whether that folder holds a checkpoint
    formats: Sequence[str]  #: flags that say what is quantized
    dtype: str = "bf16"
    layout: Parallelism = field(default_factory=Parallelism)
    launch: Launch = field(default_factory=Launch)
    sizes: Sizes = field(default_factory=Sizes)
    is_tiny: bool = False
    flags: Sequence[str] = ()  #: of the user, for `pretrain_gpt.py`: these win

    def settled(self) -> Experiment:
        """With no size left open. What does not fit is refused here: files are looked for, and
        made, only after that.

        Raises:
            ConfigError: says what would do.
        """
        sizes = self._sizes()
        uneven = any(word.split("=")[0] in UNEVEN_STAGES for word in self.flags)
        check_model(self.layout, self.preset.architecture, uneven_stages=uneven)
        check_ranks(self.layout, sizes.seq_length)
        self.launch.check(self.layout)
        return dataclasses.replace(self, sizes=self._batch(sizes))

    def command(self, python: str, files: Files) -> list[str]:
        """The words, of a settled experiment.

        Raises:
            MissingFile: there is no telling which tokenizer is meant.
        """
        sizes = self.sizes
        return [
            *self.launch.words(python, self.layout),
            str(REPO / "pretrain_gpt.py"),
            *self.preset.architecture.flags(),
            *(("--recompute-activations",) if self.preset.recompute else ()),
            *self.layout.flags(),
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
        """The tables' values where the user gave none; the global batch may still be None."""
        preset, schedule, given = self.preset, self.schedule, self.sizes
        seq_length = given.seq_length or min(
            preset.seq_length, schedule.longest_sequence or preset.seq_length
        )
        collected = self._collected()
        if given.train_iters is not None and given.train_iters < collected:
            raise ConfigError(
                f"--train-iters {given.train_iters} is fewer than --control-iter {collected}, the "
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
        """Iterations that the user's flags ask to collect; what is no number training refuses."""
        text = last_value("--control-iter", self.flags) or ""
        return int(text) if text.isdecimal() else 0

    def _batch(self, sizes: Sizes) -> Sizes:
        """With the global batch: what was given must fit the ranks, a default is made to."""
        step = sizes.micro_batch_size * self.layout.data
        batch = sizes.global_batch_size
        if batch is None:
            wanted = self.schedule.global_batch_size or step * self.schedule.micro_batches
            batch = -(-wanted // step) * step
            if batch != wanted:
                say(
                    f"The global batch is {batch} sequences, not {wanted}: {self.layout.data} "
                    f"copies of the model take {sizes.micro_batch_size} at a time."
                )
        elif batch % step:
            raise ConfigError(
                f"--global-batch-size {batch} is no multiple of --micro-batch-size "
                f"{sizes.micro_batch_size} x {self.layout.data} copies of the model; "
                f"{batch // step * step or step} or {(batch // step + 1) * step} would do"
            )
        return dataclasses.replace(sizes, global_batch_size=batch)

    def _sharing(self) -> list[str]:
        """Optimizer states spread over the ranks; not worth it for a model that fits anywhere."""
        if self.is_tiny or self.layout.world == 1:
            return []
        return ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]

    def _saving(self) -> list[str]:
        if self.checkpoint is None:
            return []
        words = ["--save", self.checkpoint]
        if self.schedule.save_interval is not None:
            words += ["--save-interval", str(self.schedule.save_interval)]
        return [*words, "--load", self.checkpoint] if self.resume else words
