"""Test context parallelism of the local attention: in float64, with formats and collected."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.collection.capture import global_shape, over_context
from tests import forks
from tests.core.gpt_runs import PER_LAYER, collect, pick
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("context_parallel_worker.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    env = environment(PYTHONPATH=REPO, REPORT_DIR=folder)
    done = forks.run(WORKER, ranks=4, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["causal", "window", "given", "no mask", "value dim"])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(report, case, size):
    """Grouped queries agree in float64; the ranks sum gradients in a different order."""
    errors = report[f"{case} cp{size}"]
    assert errors.keys() == {"o", "dq", "dk", "dv"}
    assert all(error < 1e-14 for error in errors.values()), errors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp4", "hifp8", "mxfp4 in tiles of 64 keys, reverse, P x 256"]
)
def test_quantized_attention_is_that_of_one_rank(report, name, size):
    """Blocks along keys always agree; blocks along queries do because 32 divides a chunk."""
    errors = report[f"{name} cp{size}"]
    assert all(error < 1e-6 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mask", r"the shape \[256, 256\], but this rank has 128 queries for 256 keys; cut it"),
        ("bias", "takes neither an attention bias nor packed sequences"),
        ("packed", "takes neither an attention bias nor packed sequences"),
        ("odd", "this rank has 5 tokens of each sequence.*a multiple of 4"),
        ("cache", "got 2 queries for 128 keys"),
        ("group", r"context_parallel_size is 1 in the configuration.*has 2 rank\(s\)"),
        ("comm type", "cp_comm_type is 'p2p', which is Transformer Engine's; .*--cp-comm-type all"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(report, what, said):
    assert re.search(said, report["refusals"][what]), report["refusals"][what]


def test_dims_say_how_the_sequence_is_cut():
    ranks = {"cp_size": 2, "tp_size": 4}
    assert over_context("s b h[tp]", ranks) == "s[cp:zigzag] b h[tp]"
    assert over_context("s b o | partial[tp]", ranks) == "s[cp:zigzag] b o | partial[tp]"
    assert over_context("o[tp] h | partial[cp]", ranks) == "o[tp] h | partial[cp]"
    assert over_context("s b h[tp]", ranks | {"cp_size": 1}) == "s b h[tp]"
    assert global_shape([3, 2, 5], "s[cp:zigzag] b h[tp]", ranks) == [6, 2, 20]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return collect(tmp_path_factory.mktemp("whole") / "dump", "--micro-batches", "1")


@pytest.mark.parametrize(
    ("options", "ranks"),
    [((), 2), (("--tp", "2", "--sequence-parallel"), 4)],
    ids=["cp2", "cp2-tp2-sequence-parallel"],
)
def test_shards_put_together_by_their_dims_are_the_tensors_of_one_rank(
    tmp_path, whole, options, ranks
):
    records = collect(tmp_path / "dump", "--cp", "2", *options, "--micro-batches", "1", ranks=ranks)
    assert len(records) == 2 * PER_LAYER * ranks
    for expected in whole:
        same = {key: expected[key] for key in ("layer_idx", "module", "tensor_name")}
        shards = pick(records, **same)
        assert len(shards) == ranks
        assert all(r["global_shape"] == expected["global_shape"] for r in shards)
        found = put_together(shards)
        assert found.shape == expected["tensor"].shape
        if ranks == 2:  # tensor-parallel ranks draw different weights
            torch.testing.assert_close(found, expected["tensor"], rtol=1e-4, atol=1e-6)


def put_together(shards: list[dict]) -> torch.Tensor:
    """Return the whole tensor from all ranks' records, by `dims` alone."""
    for group in ("cp", "tp"):
        others: dict[int, list[dict]] = {}
        for r in sorted(shards, key=lambda r: r["rank"][group]):
            others.setdefault(r["rank"]["tp"] if group == "cp" else 0, []).append(r)
        shards = [parts[0] | {"tensor": one_group(parts, group)} for parts in others.values()]
    (whole,) = shards
    return whole["tensor"]


def one_group(parts: list[dict], group: str) -> torch.Tensor:
    letters, _, partial = parts[0]["dims"].partition(" | ")
    tensors = [r["tensor"] for r in parts]
    for axis, letter in enumerate(letters.split()):
        if letter.endswith(f"[{group}]"):
            return torch.cat(tensors, axis)
        if letter.endswith(f"[{group}:zigzag]"):
            halves = [tensor.chunk(2, axis) for tensor in tensors]
            return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], axis)
    if partial == f"partial[{group}]":
        return sum(tensors)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "these are not replicas"
    return tensors[0]
