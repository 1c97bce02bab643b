"""Test that sharded layers have the codes of unsharded ones in formats with `:global`."""

import itertools
import json
from pathlib import Path

import pytest

from tests import forks
from tests.analysis.verification.verifying import count, verify
from tests.core.gpt_runs import collect, pick
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("global_amax_worker.py")
RANKS = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("reports")
    done = forks.run(WORKER, ranks=RANKS, env=environment(PYTHONPATH=REPO, REPORT_DIR=folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *itertools.product(["tp2", "cp2", "tp2 ep2"], ["fp8_e4m3", "nvfp4"]),
        ("tp2 cp2", "nvfp4"),
        ("cp4 ep2", "nvfp4"),
    ],
)
def test_codes_scales_and_values_are_those_of_the_whole_tensor(reports, layout, name):
    """All 18 operands agree, as do those of experts without tokens and of frozen weights."""
    for report in reports:
        found = report[f"{layout} {name}:global"]
        assert found["operands"] == 12 + 4 * 6 + 6
        assert found["differing"] == []


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_shard_s_own_amax_gives_other_codes(reports, layout, name):
    """Otherwise the test above would show nothing."""
    differing = [each for report in reports for each in report[f"{layout} {name}"]["differing"]]
    operands = {each.removesuffix(" codes") for each in differing if each.endswith(" codes")}
    divided_by_both = {"column dgrad_c", "row fprop_a", "qk fprop_a", "pv dgrad_c", "qk wgrad_c"}
    assert operands >= divided_by_both
    assert ("column fprop_b" in operands) == (layout == "tp2"), "tp shards weights"
    assert ("column fprop_a" in operands) == (layout == "cp2"), "cp shards tokens"
    assert ("expert column fprop_a" in operands) == (layout == "cp2"), "cp shards tokens of experts"


def test_an_exchange_of_tokens_that_cuts_a_micro_batch_is_refused(reports):
    message = reports[0]["refusal"]
    assert "neither a part of the ranks [0, 1, 2] that share a micro-batch" in message
    assert "choose the format without :global" in message


def test_verify_recomputes_each_rank_s_results_with_the_recorded_amax(tmp_path):
    dump = tmp_path / "dump"
    options = ("--tp", "2", "--sequence-parallel", "--recompute", "--layers", "1")
    flags = {"collect_tensors": ["all", "codes"]}
    variables = {"ranks": 2, "flags": flags, "CUSTOM_QUANT_TYPE": "nvfp4:global"}
    records = collect(dump, *options, "--micro-batches", "1", **variables)
    found = verify(dump, exact=True)
    assert found.errors == []
    assert count(found.checked, "results of linear layers, bit for bit") == 2 * 4 * 3
    assert count(found.checked, "results of attention, bit for bit") == 2 * 4
    for name, slots in (("grad_weight", 6), ("grad_key", 12)):
        amaxes = [record["amax"] for record in pick(records, tensor_name=name)]
        assert {len(amax) for amax in amaxes} == {slots}
        assert amaxes[: len(amaxes) // 2] == amaxes[len(amaxes) // 2 :], "both ranks have the same"
    for index in dump.glob("index_*.jsonl"):
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        without = [json.dumps(line | {"amax": None}) for line in lines]
        index.write_text("".join(f"{line}\n" for line in without))
    found = verify(dump)
    assert found.errors == []
    assert found.unchecked["a scale from a global amax that was not recorded"] == 2 * (4 * 3 + 4)
