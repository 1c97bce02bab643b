"""Define the training configurations: numbers of iterations, batch sizes and schedules.

A configuration is the same for every quantization type, so that two runs differ only in their
formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.lookup import number


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Number of iterations, batch size, and intervals of evaluation and checkpoints."""

    train_iters: int
    #: fraction of the iterations in which the learning rate warms up, before its cosine decay
    warmup_fraction: float
    #: number of sequences per iteration; if None, it depends on `micro_batches`
    global_batch_size: int | None
    micro_batches: int = 1  #: number of micro-batches per replica if `global_batch_size` is None
    longest_sequence: int | None = None
    eval_interval: int = 500
    eval_iters: int = 0
    save_interval: int | None = None

    def flags(self) -> list[str]:
        """Return those flags of `pretrain_gpt.py` that follow from the schedule alone."""
        words = [
            *("--lr-decay-style", "cosine", "--lr-warmup-fraction", number(self.warmup_fraction)),
            *("--eval-iters", str(self.eval_iters)),
        ]
        if self.eval_iters:
            words += ["--eval-interval", str(self.eval_interval)]
        return words


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training configuration with one schedule per preset."""

    about: str
    full: Schedule
    tiny: Schedule

    def preset(self, name: str) -> Schedule:
        return {"full": self.full, "tiny": self.tiny}[name]


#: Optimizer flags that all models and schedules share.
OPTIMIZER = (
    *("--optimizer", "adam", "--adam-beta1", "0.9", "--adam-beta2", "0.95"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--split", "99,1,0"),
)

_TINY = Schedule(train_iters=50, warmup_fraction=0.1, global_batch_size=4)

TRAININGS: Mapping[str, Training] = {
    "default": Training(
        about="10,000 iterations of 128 sequences, with evaluations and checkpoints",
        full=Schedule(
            train_iters=10_000,
            warmup_fraction=0.02,
            global_batch_size=128,
            eval_iters=10,
            save_interval=1000,
        ),
        tiny=_TINY,
    ),
    "fast": Training(
        about="100 iterations of 16 short sequences, to see whether it runs and the loss falls",
        full=Schedule(
            train_iters=100, warmup_fraction=0.1, global_batch_size=16, longest_sequence=2048
        ),
        tiny=Schedule(
            train_iters=10, warmup_fraction=0.1, global_batch_size=4, longest_sequence=128
        ),
    ),
    "long": Training(
        about="100,000 iterations of 512 sequences",
        full=Schedule(
            train_iters=100_000,
            warmup_fraction=0.01,
            global_batch_size=512,
            eval_interval=2000,
            eval_iters=20,
            save_interval=5000,
        ),
        tiny=Schedule(train_iters=500, warmup_fraction=0.1, global_batch_size=8),
    ),
    "collect": Training(
        about="default with 8 micro-batches per process; the drivers of a collection use it",
        full=Schedule(
            train_iters=10_000,
            warmup_fraction=0.02,
            global_batch_size=None,
            micro_batches=8,
            eval_iters=10,
            save_interval=1000,
        ),
        tiny=_TINY,
    ),
}
