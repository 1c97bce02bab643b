"""The runs of test_golden.py, and the program that records their losses.

`python -m tests.training.golden DIR` trains in the empty folder DIR and rewrites
tests/data/golden_losses.txt.
"""

import functools
import sys
from pathlib import Path

from tests.subprocesses import REPO
from tests.training.corpus import make_corpus
from tests.training.runs import COMMON, MODEL, NO_DROPOUT, exact_steps, succeeded, train

FILE = REPO / "tests" / "data" / "golden_losses.txt"
#: relative bounds of losses and gradient norms for layouts in which roundings may flip
CLOSE = {"loss": 2e-4, "norm": 5e-3}
TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LAYOUTS = {
    "tensor": TENSOR,
    "tensor-sequence": (*TENSOR, "--sequence-parallel"),
    "pipeline": PIPELINE,
    "interleaved": (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1"),
    "context": ("--context-parallel-size", "2"),
    "data": (),
    "distributed-optimizer": DISTRIBUTED,
    "experts": ("--expert-model-parallel-size", "2"),
    "data-of-experts": (),
}
DENSE = ("mxfp4", "mxfp8", "hifp8")
STOCHASTIC = ("mxfp4:sr",)
EXPERTS = ("mxfp4-experts",)
MODELS = (*DENSE, *STOCHASTIC, *EXPERTS)
SEQUENCES = ("--seq-length", "128")  # two chunks of 32 tokens for each context-parallel rank
#: small steps, so that a rounding rarely flips and a flipped one hardly changes the weights
TRAINING = (*SEQUENCES, "--train-iters", "10", "--lr", "1e-5", "--lr-decay-style", "constant")
MIXTURE = (
    *(*COMMON, "--num-query-groups", "2"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
#: a recipe without wgrad, because it sums over an expert's tokens, which depend on the layout
RECIPE = """
configs:
  no_tokens:
    linear: {fprop: mxfp4, dgrad: mxfp4}
    qk: mxfp4
    pv: mxfp4
matchers:
  lm_head: {config: bf16, type: glob, pattern: "output_layer", enabled: true}
  layers: {config: no_tokens, type: glob, pattern: "*", enabled: true}
"""


def layouts_of(name: str) -> list[str]:
    """Return the layouts in which a model must have the same losses as on one rank."""
    if name in EXPERTS:
        return ["experts", "data-of-experts"]
    if name in STOCHASTIC:
        return ["pipeline", "interleaved"]
    return [layout for layout in LAYOUTS if "experts" not in layout]


def size_of(name: str) -> tuple[str, ...]:
    """Return the flags that set the size of a model."""
    return MIXTURE if name in EXPERTS else MODEL


Steps = list[dict[str, float]]  #: loss and gradient norm of each iteration


class GoldenRuns:
    """Runs of ten iterations from a checkpoint of one rank; each is trained only once."""

    def __init__(self, corpus: Path, folder: Path):
        self.corpus, self.folder = corpus, folder
        self.recipe = folder / "no_tokens.yaml"
        self.recipe.write_text(RECIPE)

    @functools.cache  # noqa: B019  the object lives as long as the tests
    def weights(self, model: tuple[str, ...]) -> Path:
        """Return a checkpoint after two iterations with larger steps."""
        folder = self.folder / f"weights-{len(model)}"
        flags = ("--data-path", self.corpus, "--save", folder, "--exit-interval", "2")
        succeeded(train(*flags, *NO_DROPOUT, *SEQUENCES, model=model))
        return folder

    def flags(self, name: str) -> tuple[str | Path, ...]:
        """Return the flags of a model on one rank, except those that set its size."""
        formats: tuple[str | Path, ...] = ("--custom-quant-type", name)
        if name in EXPERTS:
            formats = ("--quant-recipe", self.recipe)
        start = ("--data-path", self.corpus, "--load", self.weights(size_of(name)), "--finetune")
        return (*start, *TRAINING, *formats)

    @functools.cache  # noqa: B019
    def __call__(self, name: str, layout: str | None = None) -> Steps:
        """Return the loss and gradient norm of each iteration in a layout, or on one rank."""
        out = self.folder / f"{name}-{layout}.json"
        flags = self.flags(name) if layout is None else (*self.flags(name), *LAYOUTS[layout])
        return exact_steps(out, *flags, ranks=1 if layout is None else 2, model=size_of(name))


def read_golden() -> dict[str, Steps]:
    """Return the recorded losses and gradient norms, by the name of the model."""
    golden: dict[str, Steps] = {}
    for line in FILE.read_text().splitlines():
        if not line.startswith("#"):
            name, iteration, loss, norm = line.split()
            golden.setdefault(name, []).append({"loss": float(loss), "norm": float(norm)})
            assert len(golden[name]) == int(iteration), line
    return golden


def main() -> None:
    folder = Path(sys.argv[1])
    runs = GoldenRuns(make_corpus(folder), folder)
    lines = ["# type, iteration, loss, gradient norm; see tests/training/golden.py"]
    for name in MODELS:
        for iteration, step in enumerate(runs(name), start=1):
            lines.append(f"{name} {iteration} {step['loss']:.9g} {step['norm']:.9g}")
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
