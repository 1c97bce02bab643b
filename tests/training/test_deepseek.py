"""Tests that a tiny DeepSeek-V2-Lite trains with `pretrain_gpt.py`.

The model has MLA with YaRN, a dense first layer, and routed and shared experts in the others. Sizes
are multiples of MX blocks on each of two ranks, so that tensor parallelism forms the same blocks as
one rank. Quantized runs still diverge slowly: sums in a different order differ in the last bit, a
value occasionally rounds to a different code, and the next weights differ more. With expert
parallelism, an expert receives the tokens of several ranks at once. Its weight gradient then has
different blocks along tokens from the first iteration on.
"""

import pytest

from tests.training.runs import DEEPSEEK, MLA, MXFP8, succeeded, train

TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
SPREAD = ("--expert-model-parallel-size", "2")
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules")


def finished(*options, ranks=1, model=DEEPSEEK):
    return succeeded(train(*options, ranks=ranks, model=model))


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A checkpoint of one rank after two iterations."""
    folder = tmp_path_factory.mktemp("deepseek") / "ck"
    # The learning rate follows the schedule of six iterations, and --exit-interval stops earlier.
    finished("--data-path", corpus, "--save", folder, "--exit-interval", "2")
    return folder


@pytest.fixture(scope="module")
def go_on(corpus, folder):
    """A function that continues to train the checkpoint's weights, with a new optimizer."""

    def start(*options, ranks=1):
        flags = ("--data-path", corpus, "--load", folder, "--no-load-optim", "--allow-changed-run")
        return finished(*flags, *options, ranks=ranks)

    return start


@pytest.fixture(scope="module")
def single(go_on):
    return go_on()


@pytest.fixture(scope="module")
def quantized(go_on):
    return go_on(*MXFP8)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(SEQUENCE, 2, id="tensor-sequence"),
        pytest.param(PIPELINE, 2, id="pipeline"),
        pytest.param(SPREAD, 2, id="experts"),
        pytest.param(("--use-distributed-optimizer",), 2, id="data-distributed-optimizer"),
        pytest.param((*RECOMPUTE, "core_attn", "moe", "mla_up_proj", "mlp"), 1, id="recompute"),
        pytest.param(
            (*SPREAD, "--use-distributed-optimizer"),
            2,
            id="experts-distributed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*SPREAD, "--moe-token-dispatcher-type", "allgather"),
            2,
            id="allgather",
            marks=pytest.mark.slow,
        ),
        pytest.param((*SEQUENCE, *SPREAD), 4, id="tensor-experts", marks=pytest.mark.slow),
        pytest.param((*PIPELINE, *SPREAD), 4, id="pipeline-experts", marks=pytest.mark.slow),
        pytest.param(
            ("--recompute-granularity", "full"), 1, id="recompute-full", marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_has_the_losses_of_one_rank(single, go_on, layout, ranks):
    moved = go_on(*layout, ranks=ranks)
    assert list(moved.losses) == [3, 4, 5, 6]
    assert moved.parameters == single.parameters
    for iteration, loss in moved.losses.items():
        assert loss == pytest.approx(single.losses[iteration], rel=2e-6)
        actual, expected = moved.lines[iteration], single.lines[iteration]
        assert float(actual["norm"]) == pytest.approx(float(expected["norm"]), abs=2e-3)
        assert float(actual["balance"]) == pytest.approx(float(expected["balance"]), rel=1e-4)


def test_mla_under_tensor_parallelism_alone(corpus, tmp_path):
    """The gradient of the positional key, which all heads share, is a sum over all ranks' heads."""
    save = ("--save", tmp_path, "--save-interval", "2")
    whole = finished("--data-path", corpus, *save, model=MLA)
    load = ("--load", tmp_path, "--ckpt-step", "2")
    halves = finished("--data-path", corpus, *load, *TENSOR, ranks=2, model=MLA)
    for iteration, loss in halves.losses.items():
        assert loss == pytest.approx(whole.losses[iteration], rel=1e-6)


def test_the_loss_falls_in_mxfp8(quantized, single):
    losses = quantized.losses
    assert losses[6] < losses[3] - 0.1
    assert all(losses[i] != single.losses[i] for i in losses)


@pytest.mark.parametrize(
    ("layout", "ranks", "last"),
    [
        pytest.param(SEQUENCE, 2, 3e-4, id="tensor-sequence"),
        pytest.param(PIPELINE, 2, 1e-4, id="pipeline"),
        pytest.param(SPREAD, 2, 1e-3, id="experts"),
        pytest.param((), 2, 1e-4, id="data", marks=pytest.mark.slow),
        pytest.param((*RECOMPUTE, "core_attn", "moe", "mla_up_proj", "mlp"), 1, 0, id="recompute"),
        pytest.param(
            ("--recompute-granularity", "full"), 1, 0, id="recompute-full", marks=pytest.mark.slow
        ),
    ],
)
def test_quantized_layouts_start_alike_and_stay_close(
    quantized, single, go_on, layout, ranks, last
):
    moved = go_on(*layout, *MXFP8, ranks=ranks)
    assert moved.losses[3] == pytest.approx(quantized.losses[3], rel=1e-6)
    assert quantized.losses[3] != pytest.approx(single.losses[3], rel=1e-5)
    for iteration, loss in moved.losses.items():
        assert loss == pytest.approx(quantized.losses[iteration], rel=last)


@pytest.mark.slow
def test_a_resumed_run_with_spread_experts_repeats_every_digit(corpus, tmp_path):
    options = ("--data-path", corpus, *SPREAD, "--bf16", "--use-distributed-optimizer")
    whole = finished(*options, "--save", tmp_path, "--save-interval", "3", ranks=2)
    resumed = finished(*options, "--load", tmp_path, "--ckpt-step", "3", ranks=2)
    assert list(resumed.lines) == [4, 5, 6]
    for iteration, line in resumed.lines.items():
        assert line == whole.lines[iteration]


def test_an_optimizer_of_all_experts_cannot_be_spread(corpus, folder):
    training = train("--data-path", corpus, "--load", folder, *SPREAD, ranks=2, model=DEEPSEEK)
    assert training.status != 0
    assert "--expert-model-parallel-size 1, but this run has 2" in training.errors
