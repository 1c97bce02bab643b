"""Tests that context-parallel ranks give the loss and gradient norm of one rank, up to the order of
float32 sums.

Chunks have 32 tokens, so that blocks of 32 along tokens and queries are the same as on one rank.
The format is MXFP4, because sums of its products are exact in float32. Other sums still run in a
different order and differ in the last bit. Occasionally a value then rounds to a different code,
as it does under tensor parallelism, and the quantized runs differ slightly from there on.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import forks
from tests.subprocesses import REPO
from tests.training.runs import MOCK_DATA, exact_steps

EOD = 127  #: end-of-document token of the NullTokenizer
SIZE = ("--num-layers", "2", "--seq-length", "128", "--global-batch-size", "4")
CONTEXT = ("--context-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "32"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12"),
    *("--num-query-groups", "4"),
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """A data set of short documents, so that each rank has a different number of document ends."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("documents") / "short"
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in rng.integers(20, 100, 300):
        start, step = rng.integers(0, 8), rng.integers(1, 4)
        document = (start + step * np.arange(length)) % 97
        document[-1] = EOD
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def steps(documents, tmp_path_factory):
    """A function that returns the loss and gradient norm of ten iterations; results are cached."""
    folder = tmp_path_factory.mktemp("steps")

    @functools.cache
    def train(options: tuple[str, ...], ranks: int) -> list[dict[str, float]]:
        out = folder / f"{len(list(folder.iterdir()))}.json"
        size = (*SIZE, "--train-iters", "10", "--data-path", documents)
        return exact_steps(out, *size, *options, ranks=ranks)

    return train


@pytest.mark.parametrize(
    ("options", "layout", "ranks"),
    [
        pytest.param((), (), 2, id="plain"),
        pytest.param((), TENSOR, 4, id="tensor-sequence"),
        pytest.param((), (*DISTRIBUTED, "--recompute-activations"), 2, id="distributed-recompute"),
        pytest.param(("--custom-quant-type", "mxfp4"), (), 2, id="mxfp4"),
        pytest.param(("--eod-mask-loss",), (), 2, id="masked-loss"),
        pytest.param(LATENT, (), 2, id="latent"),
        pytest.param(
            ("--reset-attention-mask",),
            (),
            2,
            id="document-mask",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--window-size", "16,0"), (), 2, id="window", marks=pytest.mark.slow),
        pytest.param(
            ("--custom-quant-type", "mxfp4"),
            TENSOR,
            4,
            id="mxfp4-tensor-sequence",
            marks=pytest.mark.slow,
        ),
        pytest.param(PIPELINE, (), 4, id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_norm_are_those_of_one_context_rank(steps, options, layout, ranks):
    """The reference has the same pipeline stages, because each draws its own initial weights."""
    expected = steps(options, 2 if options == PIPELINE else 1)
    actual = steps((*options, *CONTEXT, *layout), ranks)
    assert len(actual) == 10
    for step in range(10):
        roundings_flip = "mxfp4" in options and step >= 3
        for number, bound in (("loss", 1e-3), ("norm", 3e-2)):
            bound = bound if roundings_flip else 1e-5
            assert actual[step][number] == pytest.approx(expected[step][number], rel=bound), step


def test_the_reference_is_not_exact_by_accident(steps):
    """Runs with different options differ from each other by far more than the bounds allow."""
    plain, masked = steps((), 1), steps(("--eod-mask-loss",), 1)
    quantized = steps(("--custom-quant-type", "mxfp4"), 1)
    for other in (masked, quantized):
        assert abs(plain[0]["norm"] - other[0]["norm"]) > 1e-3 * plain[0]["norm"]


def test_a_sequence_that_cannot_be_cut_is_refused():
    done = forks.run(REPO / "pretrain_gpt.py", *MOCK_DATA, *CONTEXT, "--seq-length", "62", ranks=2)
    assert done.returncode != 0
    assert "[ERROR] --seq-length 62 cannot be cut into 4 equal parts" in done.stderr
