"""Train on eight ranks of two nodes, with tensor, pipeline and data parallelism at the same time.

Two launchers with four processes each stand for the nodes. The model is quantized, and each node
collects its tensors in a folder of its own. The losses, and the tensors joined from both folders,
must agree with those of one rank.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.analysis.store import TensorStore
from tests.analysis.verification.verifying import count, verify
from tests.subprocesses import REPO, environment, free_port, run
from tests.training.golden import CLOSE, PIPELINE, TENSOR, TRAINING, GoldenRuns
from tests.training.runs import EXACT, MODEL, NO_DROPOUT, exact_steps

pytestmark = pytest.mark.slow

LAYOUT = (*TENSOR, "--sequence-parallel", *PIPELINE)  #: 2 x 2 x 2 ranks, with data parallelism
COLLECTED = (1, 3)  #: the collected iterations
COLLECT = (
    *("--save-tensors", "--control-iter", "0"),
    *("--collect-iterations", "1,3", "--collect-micro-batches", "0"),
)
LAYERS, MICRO_BATCHES = 4, 4  #: micro-batches of one rank; a data-parallel rank has half of them
#: bounds of losses and gradient norms, and of the error of a tensor relative to its norm
BOUNDS = {"none": ({"loss": 1e-5, "norm": 1e-5}, 1e-4), "mxfp8": (CLOSE, 0.05)}
PER_PASS, WEIGHTS = 28, 4  #: tensors of a layer per micro-batch, and its weights per iteration


def train_on_two_nodes(out: Path, dump: Path, *flags: str | Path) -> None:
    """Start torchrun twice, as on two nodes with four ranks each; a node has a folder of its own.

    Args:
        out: file for the loss and gradient norm of each iteration.
        dump: parent of the nodes' folders.
        flags: flags of the training on both nodes.
    """
    port, env = str(free_port()), environment(PYTHONPATH=REPO, STEPS_FILE=out)

    def start(node: str):
        words = ["--nnodes", "2", "--nproc-per-node", "4", "--node-rank", node]
        words += ["--master-addr", "127.0.0.1", "--master-port", port]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
        training = [EXACT, *MODEL, *NO_DROPOUT, *flags, "--tensor-save-dir", dump / f"node{node}"]
        return run([*torchrun, *training], env=env)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(start, "01"):
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=BOUNDS)
def runs(request, corpus, tmp_path_factory):
    """Return the steps and the dump of each layout, by the number of ranks."""
    folder = tmp_path_factory.mktemp("eight")
    weights = GoldenRuns(corpus, folder).weights(MODEL)
    flags = ("--data-path", corpus, "--load", weights, "--finetune", *TRAINING, *COLLECT)
    flags += ("--custom-quant-type", request.param)
    steps = exact_steps(folder / "1.json", *flags, "--tensor-save-dir", folder / "1", ranks=1)
    results = {1: (steps, TensorStore(folder / "1"))}
    train_on_two_nodes(folder / "8.json", folder / "8", *flags, *LAYOUT)
    results[8] = json.loads((folder / "8.json").read_text()), TensorStore(folder / "8")
    return results | {"bounds": BOUNDS[request.param]}


def test_the_losses_are_those_of_one_rank(runs):
    (expected, _), (steps, _) = runs[1], runs[8]
    assert len(steps) == len(expected) == 10
    for name, bound in runs["bounds"][0].items():
        numbers = [step[name] for step in expected]
        assert [step[name] for step in steps] == pytest.approx(numbers, rel=bound), name


def test_every_record_is_there_once_per_shard(runs):
    (_, one), (_, eight) = runs[1], runs[8]
    assert len(one) == len(COLLECTED) * LAYERS * (PER_PASS * MICRO_BATCHES + WEIGHTS)
    table = eight.records
    # Four of the eight ranks hold a layer: two tensor-parallel pairs, with half the data each.
    shards = 2 * PER_PASS * MICRO_BATCHES + 4 * WEIGHTS
    assert len(table) == len(COLLECTED) * LAYERS * shards
    assert sorted(table["rank"].unique()) == list(range(8))
    assert table["rank"].value_counts().nunique() == 1
    keys = ["iteration", "micro_batch", "module", "tensor_name"]
    for key, group in table.groupby(keys):
        places = set(zip(group["tp"], group["dp"], strict=True))
        assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}, key
        assert len(group) == 4, key
    assert set(table["module"]) == set(one.records["module"])
    stages = table.groupby("layer_idx")["pp"].unique()
    assert [list(stages[layer]) for layer in range(LAYERS)] == [[0], [0], [1], [1]]


def test_verify_finds_no_error(runs):
    for ranks in (1, 8):
        _, store = runs[ranks]
        verdict = verify(store.folder)
        assert verdict.errors == []
        assert not verdict.unchecked
        assert count(verdict.checked, "files") == len(store)


def cut_as_on_two_ranks(module: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one rank, with both halves of a gated fc1 sharded separately."""
    if not module.endswith("linear_fc1") or name in ("input", "grad_input"):
        return tensor
    axis = 0 if "weight" in name else tensor.dim() - 1
    parts = tensor.chunk(4, axis)
    return torch.cat([*parts[::2], *parts[1::2]], axis)


def test_reassembled_tensors_are_those_of_one_rank(runs):
    """The weights of the first iteration are the same, and so are its tensors.

    Micro-batch m of data-parallel rank d is micro-batch 2 m + d of one rank. One rank divides its
    gradients by four micro-batches and each of eight ranks by two, which makes them twice as large.
    The sums over two tensor-parallel ranks differ in their last bits, which flips roundings.
    """
    (_, one), (_, eight) = runs[1], runs[8]
    first = eight.select(iteration=1).drop_duplicates(["micro_batch", "module", "tensor_name"])
    compared = 0
    for row in first.itertuples():
        for dp, tensor in enumerate(eight.load_global_all(row)):
            batch = 0 if row.tensor_name == "weight" else 2 * row.micro_batch + dp
            expected = one.load_global(
                iteration=1, micro_batch=batch, module=row.module, tensor_name=row.tensor_name
            )
            expected = cut_as_on_two_ranks(row.module, row.tensor_name, expected)
            expected = expected * (2 if row.tensor_name.startswith("grad") else 1)
            where = (row.module, row.tensor_name, batch)
            assert tensor.shape == expected.shape, where
            error = (tensor - expected).norm() / expected.norm()
            assert error < runs["bounds"][1], (*where, error)
            compared += 1
    assert compared == LAYERS * (PER_PASS * MICRO_BATCHES + WEIGHTS)
