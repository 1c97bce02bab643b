"""Define the bf16 model from which the default collection continues, and name its checkpoint.

The tensors of a model with random weights differ from those of a trained model. The default job of
the drivers therefore collects from a run that continues from a trained model. Every quantization
type starts from the same weights, as in `script/study.py`. The model is trained once, by
`script/collect/train_model.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.command import Experiment, Sizes
from configs.models import MODELS
from configs.resolve import REPO, Files, at_home, default_corpus
from configs.trainings import TRAININGS

ITERATIONS = 300  #: default number of iterations; they take about 30 s of CPU time
START_SEED = 1234  #: seed of a bf16 model from which other runs continue
#: Version of the training code. Increase it when a change of the code changes the trained weights.
VERSION = 1
PACKAGES = ("torch", "megatron-core")  #: packages whose versions can change the trained weights
#: Flags after `--` with which a driver's job is still the default one, because they change neither
#: the model nor the data nor the checkpoint. A name that ends with a hyphen stands for all flags
#: that begin with it.
HARMLESS = (
    *("--collect-", "--control-iter", "--save-tensors", "--tensor-statistics", "--quant-audit"),
    *("--custom-quant-type", "--linear-quant", "--qk-quant", "--pv-quant", "--quant-recipe"),
    *("--quant-accumulate",),
    *("--seed", "--lr", "--min-lr", "--weight-decay", "--clip-grad", "--adam-", "--train-iters"),
    *("--micro-batch-size", "--global-batch-size", "--seq-length", "--log-", "--tensorboard-"),
)
DTYPES = ("bf16", "fp8")  #: values of a driver's `--dtype` with which runs have bf16 weights


def start_flags(iterations: int) -> list[str]:
    """Return the flags that train a model from which other runs continue."""
    return [
        *("--seed", str(START_SEED), "--train-iters", str(iterations)),
        *("--lr-decay-style", "constant"),
    ]


def continue_flags(checkpoint: Path | str) -> list[str]:
    """Return the flags of a run that continues from the weights of a checkpoint.

    The optimizer, the order of the data and the iteration count start anew.
    """
    return ["--load", str(checkpoint), "--finetune"]


@dataclass(frozen=True)
class TrainedModel:
    """The tiny model after `iterations` iterations of training in bf16."""

    iterations: int
    files: Files  #: tokenizer and data to train on

    def words(self, python: str) -> tuple[list[str], list[str]]:
        """Return the command that starts `pretrain_gpt.py`, and its arguments except `--save`."""
        experiment = Experiment(
            preset=MODELS["llama32-1b"].tiny,
            schedule=TRAININGS["collect"].tiny,
            tensorboard="none",
            checkpoint=None,
            resume=False,
            formats=("--custom-quant-type", "bf16"),
            # Half the preset's batch halves the time, but needs a lower learning rate.
            sizes=Sizes(global_batch_size=2, lr=1e-3),
            is_tiny=True,
            flags=(*start_flags(self.iterations), "--no-save-optim", "--no-save-rng"),
        )
        words = without(experiment.settled().command(python, self.files), ("--tensorboard-dir",))
        at = words.index(str(REPO / "pretrain_gpt.py")) + 1
        return words[:at], words[at:]

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint, whose name changes with everything that determines the weights.

        Paths are replaced by the contents of the files, so that a copy of the repository has the
        same name for the same weights.
        """
        _, arguments = self.words("python")
        tokenizer, data = self.files.tokenizer, self.files.data
        contents = {
            tokenizer: _digest(Path(tokenizer)),
            data: [_digest(Path(f"{data}{suffix}")) for suffix in (".bin", ".idx")],
        }
        causes = [
            [contents.get(word, word) for word in arguments],
            {name: _version(name) for name in PACKAGES},
            VERSION,
        ]
        key = hashlib.sha256(json.dumps(causes).encode()).hexdigest()[:12]
        return Path(at_home(f"model/default/llama32_tiny_bf16_{self.iterations}_{key}"))

    @property
    def log(self) -> Path:
        """Log of the training; `loss_gaps.run_log` reads it."""
        return self.folder / "training.log"

    def exists(self) -> bool:
        """Return whether the model is trained; its folder gets this name only at the end."""
        return (self.folder / "latest_checkpointed_iteration.txt").is_file()


def why_random(files: Files, flags: Sequence[str], dtype: str) -> str | None:
    """Return why a job with the tiny preset is not the default one, or None if it is.

    Args:
        files: tokenizer and data of the job.
        flags: the user's flags for `pretrain_gpt.py`.
        dtype: the driver's `--dtype`.
    """
    if dtype not in DTYPES:
        return f"--dtype is {dtype}"
    if files != default_corpus():
        return f"the data are {files.data}"
    for word in flags:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(
            name == known or (known.endswith("-") and name.startswith(known)) for known in HARMLESS
        ):
            return f"{name} is given"
    return None


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return `words` without the flags in `names` and the values of these flags."""
    rest: list[str] = []
    before = ""
    for word in words:
        if word not in names and before not in names:
            rest.append(word)
        before = word
    return rest


def _digest(path: Path) -> str | None:
    """Return a hash of the content of a file, or None if a dry run has not made it."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    # The import takes 20 ms, and most calls of the drivers need no version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
