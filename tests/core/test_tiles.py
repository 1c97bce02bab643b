"""Test attention layers in tiles: masks, defaults, refusals and collected tensors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.analysis.verification.recompute_attention import AttentionFormats, attention
from megatron.fake_quant import get_format
from megatron.fake_quant.accumulate import get_accumulator
from megatron.fake_quant.matmul.gemm_formats import ACCUMULATOR_FIELDS, GEMM_SLOTS, GemmFormats
from megatron.fake_quant.tiles.tiling import Tiling
from tests import forks
from tests.core.gpt_runs import collect, pick
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("tiles_worker.py")
RECIPE = """
configs:
  tiles:
    qk: {format: "mx:e4m3:b16:floor", grad_key: {accumulate: "fda:l16:f9:m9:rz:p16"}}
    pv:
      format: "mx:e4m3:b16:floor"
      accumulate: "fda:l16:f13:m13:rz:p16"
      tile: 16
      order: reverse
      scale: 256
      row_sum: quantized
matchers:
  core: {type: glob, pattern: "*.core_attention", config: tiles, enabled: true}
"""


@pytest.fixture(scope="module")
def report():
    done = forks.run(WORKER, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("unnormalized", [False, True])
@pytest.mark.parametrize("case", ["causal", "window", "padding", "coefficient", "value dim"])
def test_one_tile_has_the_bits_of_whole_matrices(report, case, unnormalized):
    """Normalized P in several tiles differs in the last bits only; a few values cross a tie."""
    found = report["comparisons"][f"{case} {unnormalized}"]
    assert found["96"] == dict.fromkeys(("o", "dq", "dk", "dv"), True)
    limit = 0.05 if unnormalized else 2e-3
    assert all(error < limit for error in found["32"].values()), found


def test_long_sequences_run_in_tiles_by_default_and_the_log_says_so(report):
    found = report["defaults"]
    assert all(found["same"].values())
    assert found["audit"] == "tiles of 128 keys"
    assert found["small"] == "None"
    size = "whole matrices of 80 queries and 80 keys take 0 MiB per head and copy in float32"
    assert len(found["lines"]) == 3, "one line for each decision, not for each pass"
    for line, (start, reason) in zip(
        found["lines"],
        [
            ("tiles of 128 keys", ""),
            ("whole matrices", ", but qk: fprop_a has the format fp8_e4m3:delayed, whose scale"),
            ("whole matrices", ", but dropout draws random bits for whole matrices"),
        ],
        strict=True,
    ):
        assert re.match(f"attention in {start}: {size}, more than [0-9]+ MiB{reason}", line)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dropout", "attention in tiles of 32 keys: dropout draws .* give --attention-dropout 0"),
        ("softmax", "the softmax off-by-one adds a term .* or remove the tiles from the recipe"),
        ("blocks", "qk: dgrad_c has blocks of 32 values of mxfp8 along the keys"),
        ("queries", "causal attention has 2 queries for 80 keys; give an attention mask"),
    ],
)
def test_what_tiles_cannot_compute_is_refused(report, what, said):
    assert re.search(said, report["refusals"][what]), report["refusals"][what]


@pytest.mark.parametrize("name", ["mxfp8:sr", "fp8_e4m3", "mxfp4:sr"])
def test_a_repeated_forward_pass_has_the_bits_of_the_first_one(report, name):
    found = report["recomputation"][name]
    assert found.pop("passes") == [False, True], "once without and once with a graph"
    assert found == dict.fromkeys(("o", "dq", "dk", "dv"), True)


def test_the_largest_logit_is_tracked_in_tiles_too(report):
    whole, *tiles = report["logits"]
    for found in tiles:
        assert found == pytest.approx(whole, rel=1e-5)


def test_the_tensors_of_a_layer_in_tiles_are_collected_and_recomputed(tmp_path):
    """Scores and probabilities are assembled on request, and the other results stay the same."""
    path = tmp_path / "tiles.yaml"
    path.write_text(RECIPE)
    options = ("--micro-batches", "1", "--layers", "1", "--dtype", "bf16")
    every = ["all", "attention_scores", "attention_probs"]
    records, plain = (
        collect(tmp_path / name, *options, flags={"collect_tensors": names}, QUANT_RECIPE=path)
        for name, names in (("every", every), ("plain", ["all"]))
    )
    held = {r["tensor_name"]: r["tensor"] for r in pick(records, layer_type="attention")}
    sums = "fda:l16:f13:m13:rz:p16"
    named = {"qk_wgrad": "fda:l16:f9:m9:rz:p16"} | {f"pv_{gemm}": sums for gemm in GEMM_SLOTS}
    for record in pick(plain, layer_type="attention"):
        assert record["accumulate"] == named
        assert torch.equal(record["tensor"], held[record["tensor_name"]])
    assert held["attention_probs"].shape == (2, 4, 32, 32)
    rows = held["attention_probs"].float().sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0.05, atol=0)
    qk = GemmFormats.uniform(get_format("mx:e4m3:b16:floor"))
    tiling, of_pv = Tiling(16, "reverse", 256.0, "quantized"), get_accumulator(sums)
    pv = replace(qk, **dict.fromkeys(ACCUMULATOR_FIELDS, of_pv), unnormalized=True, tiling=tiling)
    qk = replace(qk, wgrad_accumulator=get_accumulator("fda:l16:f9:m9:rz:p16"))
    formats = AttentionFormats(qk, pv)
    outcomes = {name: outcome for _, name, outcome in attention([held], formats, 1.0)}
    assert outcomes.keys() == held.keys() - {"query", "key", "value", "grad_output"}
    assert all(outcome.exact for outcome in outcomes.values()), outcomes
    low = get_accumulator("fda:l16:f3:m3:rz:p16")
    for changed in ({"tiling": Tiling(16)}, {"wgrad_accumulator": low}):
        other = AttentionFormats(qk, replace(pv, **changed))
        outcomes = {name: outcome for _, name, outcome in attention([held], other, 1.0)}
        assert any(outcome.wrong for outcome in outcomes.values()), changed


def test_codes_of_matrices_that_exist_only_in_tiles_are_refused(tmp_path):
    path = tmp_path / "tiles.yaml"
    path.write_text(RECIPE)
    options = ("--micro-batches", "1", "--layers", "1")
    with pytest.raises(
        AssertionError, match=r"(?s)_grad_scores_codes pv_fprop_probs_codes .*quantizes P"
    ):
        collect(
            tmp_path / "dump", *options, flags={"collect_tensors": ["codes"]}, QUANT_RECIPE=path
        )
    whole = ["qk_fprop_query_codes", "pv_fprop_value_codes", "pv_grad_probs_grad_output_codes"]
    records = collect(
        tmp_path / "whole", *options, flags={"collect_tensors": whole}, QUANT_RECIPE=path
    )
    assert sorted(r["tensor_name"] for r in records) == sorted(whole)
