"""Helpers that run `pretrain_gpt.py` on a tiny model and read its log lines, and the command lines
that tests share.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests import forks
from tests.subprocesses import REPO, environment

ENTRY = REPO / "pretrain_gpt.py"
EXACT = Path(__file__).with_name("exact_worker.py")

#: the flags that `parse_args` requires
MINIMAL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "10"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
)
#: a model of 4 layers, so that two interleaved stages fit on two pipeline ranks
COMMON = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--make-vocab-size-divisible-by", "64"),
    *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--lr", "3e-3", "--train-iters", "6", "--eval-iters", "0", "--split", "80,10,10"),
)
#: a tiny Llama
MODEL = (*COMMON, "--num-query-groups", "2", "--use-cpu-initialization")
#: no dropout, so that equal weights and data give the same loss in every parallel layout
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
#: dense layers with the attention of DeepSeek-V2-Lite
MLA = (
    *COMMON,
    *NO_DROPOUT,
    *("--ffn-hidden-size", "128", "--multi-latent-attention", "--qk-layernorm"),
    *("--kv-lora-rank", "48", "--qk-head-dim", "32", "--qk-pos-emb-head-dim", "16"),
    *("--v-head-dim", "16", "--rope-type", "yarn", "--rotary-scaling-factor", "40"),
    *("--mscale", "0.707", "--mscale-all-dim", "0.707"),
)
#: a tiny DeepSeek-V2-Lite
DEEPSEEK = (
    *MLA,
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-shared-expert-intermediate-size", "64", "--moe-layer-freq", "[0]+[1]*3"),
    *("--moe-router-pre-softmax", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
MXFP8 = ("--custom-quant-type", "mxfp8")


def without_split(flags: Iterable[str | Path]) -> tuple[str | Path, ...]:
    """Return the flags without `--split` and its value in COMMON."""
    return tuple(flag for flag in flags if flag not in ("--split", "80,10,10"))


#: the tiny Llama with generated data
MOCK_DATA = (*without_split(MODEL), "--mock-data")

_NUMBER = r"[-+0-9.E]+|NAN|INF"
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {1,8}(?P<iteration>\d+)/ {1,7}\d+ \|"
    r" consumed samples: {1,12}(?P<consumed>\d+) \|"
    r" elapsed time per iteration \(ms\): \d+\.\d \|"
    rf" learning rate: (?P<lr>{_NUMBER}) \|"
    r" global batch size: {1,5}\d+ \|"
    rf" lm loss: (?P<loss>{_NUMBER}) \|"
    rf"( (?:seq )?load balancing loss: (?P<balance>{_NUMBER}) \|)?"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r" grad norm: (?P<norm>\d+\.\d{3}|nan|inf) \|"
    r"( params norm: (?P<params>\d+\.\d{3}) \|)?"
    rf"( max_attention_logit: (?P<logit>{_NUMBER}) \|)?"
    r" number of skipped iterations: {1,3}(?P<skipped>\d+) \|"
    r" number of nan iterations: {1,3}(?P<nan>\d+) \|"
)


@dataclass
class Training:
    """The exit status and the output of a run."""

    status: int
    output: str
    errors: str
    steps: list[dict[str, float]] | None = None  #: loss and gradient norm per iteration, unrounded

    @property
    def lines(self) -> dict[int, dict[str, str]]:
        """The values of each log line, by iteration and name."""
        matches = [LINE.fullmatch(line) for line in self.output.splitlines()]
        return {int(m["iteration"]): m.groupdict() for m in matches if m}

    @property
    def parameters(self) -> int:
        """The number of parameters of the model, which does not depend on the layout."""
        (count,) = re.findall(r"^ > number of parameters of the model: (\d+)$", self.output, re.M)
        return int(count)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each iteration."""
        return {iteration: float(line["loss"]) for iteration, line in self.lines.items()}


def succeeded(training: Training) -> Training:
    """Return the run, after asserting that its exit status is zero."""
    assert training.status == 0, training.errors[-3000:]
    return training


def refused(training: Training, *, status: int = 2) -> str:
    """Return the error of a run, after asserting that it is a single line."""
    assert training.status == status, training.errors[-3000:]
    (line,) = [line for line in training.errors.splitlines() if line.strip()]
    assert line.startswith("[ERROR] ")
    return line


def train(
    *options: str | Path,
    ranks: int = 1,
    model: tuple[str, ...] = MODEL,
    steps: Path | None = None,
) -> Training:
    """Train on one rank, as plain Python starts it, or on several ranks, as torchrun starts them.

    steps: file for the unrounded loss and gradient norm of each iteration.
    """
    if "--mock-data" in (*model, *options):
        model = without_split(model)
    entry, env = ENTRY, None
    if steps is not None:
        steps.unlink(missing_ok=True)
        entry, env = EXACT, environment(PYTHONPATH=REPO, STEPS_FILE=steps)
    done = forks.run(entry, *model, *options, ranks=ranks if ranks > 1 else None, env=env)
    exact = json.loads(steps.read_text()) if steps is not None and steps.exists() else None
    return Training(done.returncode, done.stdout, done.stderr, exact)


def exact_steps(
    out: Path, *options: str | Path, ranks: int, model: tuple[str, ...] = MODEL
) -> list[dict[str, float]]:
    """Train, and return the unrounded loss and gradient norm of each iteration.

    out: file that the run writes them to.
    """
    done = train(*NO_DROPOUT, *options, ranks=ranks, model=model, steps=out)
    assert done.status == 0, done.errors[-3000:]
    return done.steps


def scalars(folder) -> dict[str, dict[int, float]]:
    """Return all scalars of the event files in a folder, by tag and iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
