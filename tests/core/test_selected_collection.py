"""Test that real runs of a small GPT collect what is selected, and that training is unchanged."""

import json
from collections import Counter

import pytest
import torch

from megatron.tensor_record import read_events
from tests import forks
from tests.core.gpt_runs import (
    COLLECT_ALL,
    WORKER,
    collect,
    expected,
    loaded,
    one,
)
from tests.subprocesses import REPO, environment


def same_training(tmp_path, *options: str, ranks: int = 1, **flags) -> list[dict]:
    """Collect with these arguments of `configure`, and compare with a run that collects nothing.

    Return the index lines, each with its tensor.
    """
    reports = []
    for name in ("plain", "collecting"):
        out = tmp_path / name
        out.mkdir()
        env = environment(PYTHONPATH=REPO, REPORT_DIR=out, TENSOR_SAVE_DIR=tmp_path / "dump")
        script = WORKER
        if name == "collecting":
            script = tmp_path / "collect_all.py"
            script.write_text(COLLECT_ALL.format(worker=str(WORKER), flags=flags))
        result = forks.run(script, *options, ranks=ranks, cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stderr[-3000:]
        reports.append([json.loads(path.read_text()) for path in sorted(out.iterdir())])
    assert reports[0] == reports[1]
    return loaded(tmp_path / "dump")


def test_one_rank_of_a_tensor_parallel_pair_collects_and_training_goes_on_alike(tmp_path):
    """Under sequence parallelism, an observed matmul runs different collective operations.

    If only the rank that writes observed it, the two would wait for each other.
    """
    options = ("--tp", "2", "--sequence-parallel", "--iterations", "2")
    records = same_training(tmp_path, *options, ranks=2, collect_ranks="1")
    assert len(records) == expected(layers=2, micro_batches=2, iterations=2)
    assert {r["rank"]["world"] for r in records} == {1}
    assert [path.name[-8:-6] for path in (tmp_path / "dump").glob("index_*")] == ["01"]


def test_a_rank_that_has_reached_its_limit_holds_up_no_other(tmp_path):
    """Rank 1 has no room from the third tensor on, in the middle of a layer."""
    options = ("--tp", "2", "--sequence-parallel", "--iterations", "2")
    flags = {"collect_max_files": 6, "collect_tensors": ["all"]}
    records = same_training(tmp_path, *options, ranks=2, **flags)
    assert Counter(r["rank"]["world"] for r in records) == {0: 3, 1: 3}
    for path in (tmp_path / "dump").glob("index_*"):
        events = read_events(path)
        assert [event["event"] for event in events] == ["limited", "dropped"]
        assert events[1]["tensors"] == expected(layers=2, micro_batches=2, iterations=2) - 3
    (card,) = (tmp_path / "dump").glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "limited"


@pytest.mark.parametrize("layout", [(), ("--tp", "2", "--sequence-parallel"), ("--cp", "2")])
def test_scores_and_probabilities_are_what_the_softmax_and_pv_see(tmp_path, layout):
    """If scores are collected, our attention replaces megatron-core's, with identical results."""
    names = ["attention_scores", "attention_probs", "query", "key", "value", "output"]
    flags = {"collect_tensors": names, "collect_modules": ["core_attention"]}
    flags["collect_layers"] = "1"
    ranks = 2 if layout else 1
    records = same_training(tmp_path, *layout, "--dtype", "bf16", ranks=ranks, **flags)
    for rank in range(ranks):
        found = {
            r["tensor_name"]: r
            for r in records
            if (r["rank"]["world"], r["micro_batch"]) == (rank, 1)
        }
        assert set(found) == set(names)
        scores, probs = found["attention_scores"], found["attention_probs"]
        cp = "s[cp:zigzag]" if "--cp" in layout else "s"
        assert scores["dims"] == probs["dims"] == f"b a[tp] {cp} k"
        assert scores["global_shape"] == [2, 4, 32, 32]
        assert (scores["phase"], probs["phase"]) == ("post", "pre")
        mine = found["query"]["tensor"].permute(1, 2, 0, 3)
        if "--cp" not in layout:  # with --cp, the keys of the other rank are also used
            heads = [
                found[name]["tensor"].permute(1, 2, 0, 3).repeat_interleave(2, dim=1)
                for name in ("key", "value")
            ]
            torch.testing.assert_close(
                scores["tensor"], 0.25 * mine @ heads[0].mT, rtol=2e-2, atol=2e-2
            )
            output = (probs["tensor"] @ heads[1]).permute(2, 0, 1, 3).flatten(2)
            torch.testing.assert_close(output, found["output"]["tensor"], rtol=1e-2, atol=1e-2)
        sums = probs["tensor"].float().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=2e-2, atol=2e-2)


def test_a_slice_is_cut_from_the_whole_tensor(tmp_path):
    dump = tmp_path / "dump"
    options = ("--micro-batches", "2", "--iterations", "2", "--dtype", "bf16")
    slices = {"collect_slice": ["s=8:24:2", "h=0:16"], "collect_iterations": "2"}
    whole = collect(tmp_path / "whole", *options, CUSTOM_QUANT_TYPE="mxfp8")
    records = collect(dump, *options, CUSTOM_QUANT_TYPE="mxfp8", flags=slices)
    assert len(records) == len(whole) // 2
    for r in records:
        same = {k: r[k] for k in ("module", "iteration", "micro_batch", "tensor_name")}
        full = one(whole, **same)
        letters = [letter[0] for letter in r["dims"].partition("|")[0].split()]
        cut = {"s": slice(8, 24, 2), "h": slice(0, 16)}
        part = full[tuple(cut.get(letter, slice(None)) for letter in letters)]
        assert torch.equal(r["tensor"], part)
        assert r["tensor"].untyped_storage().nbytes() == part.numel() * 2
        assert r["global_shape"] == list(full.shape)
        if part.shape == full.shape:
            assert r["slice"] is None
        else:
            assert r["slice"]["of"] == list(full.shape)
            starts = [8 if letter == "s" else 0 for letter in letters]
            assert r["slice"]["start"] == starts
            assert r["slice"]["step"] == [2 if letter == "s" else 1 for letter in letters]


def test_only_what_is_selected_is_written(tmp_path):
    flags = {
        "collect_iterations": "2,4-",
        "collect_modules": ["mlp.*"],
        "collect_tensors": ["input", "grad_output"],
        "collect_micro_batches": 1,
    }
    records = collect(tmp_path / "dump", "--iterations", "5", flags=flags)
    found = {(r["iteration"], r["micro_batch"], r["tensor_name"]) for r in records}
    assert found == {(i, 0, name) for i in (2, 4, 5) for name in ("input", "grad_output")}
    assert {r["module"].rpartition(".")[2] for r in records} == {"linear_fc1", "linear_fc2"}
    assert len(records) == 3 * 2 * 2 * 2
