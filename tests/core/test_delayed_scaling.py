"""Delayed scaling in a model: when amaxes are recorded, exchanged and used, on two real ranks."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.collection.weight_dedup import WeightDedup
from megatron.core.low_precision.delayed_scaling import DelayedScaling
from megatron.fake_quant import get_format
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("delayed_worker.py")
LENGTH = 3  #: length of the histories in delayed_worker.py


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    env = environment(PYTHONPATH=REPO, REPORT_DIR=folder)
    done = forks.run(WORKER, ranks=2, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def passes_of(log):
    """Return passes by operand: (iteration, micro-batch, own amax, given amax, recomputed)."""
    passes, iteration = defaultdict(list), -1
    for entry in log:
        if entry == ["iteration"]:
            iteration += 1
            continue
        mode, index, key, own, given, again = entry
        assert mode == ("evaluation" if iteration == 1 else "training")
        passes[tuple(key)].append((iteration, index, own, given, again))
    return passes


def simulated(records):
    """Return the amax before each update, and after the last one, from the recorded amaxes."""
    amaxes = [0.0]
    for step in range(len(records)):
        amaxes.append(max(records[max(0, step + 1 - LENGTH) : step + 1]))
    return amaxes


@pytest.mark.parametrize(
    ("layout", "shared"),
    [("data", True), ("tensor", True), ("pipeline", False), ("interleaved", False)],
)
def test_each_operand_has_the_amax_of_the_passes_before_it_on_both_ranks(reports, layout, shared):
    ranks = [passes_of(report[layout]) for report in reports]
    assert (ranks[0].keys() == ranks[1].keys()) == shared
    assert not shared or any(
        [p[2] for p in ranks[0][key]] != [p[2] for p in ranks[1][key]] for key in ranks[0]
    )
    for rank in ranks:
        assert {slot for _, _, slot in rank} == set(SLOTS)
        for key, passes in rank.items():
            first = [p for p in passes if not p[4] and p[0] != 1]
            own = [p[2] for p in first]
            if shared:
                other = [p[2] for p in ranks[1 - ranks.index(rank)][key] if not p[4] and p[0] != 1]
                own = list(map(max, own, other))
            expected = simulated(own)
            assert [p[3] for p in first] == expected[:-1]
            # An evaluation uses the amaxes of the training before it.
            before = sum(p[0] == 0 for p in first)
            evaluated = [p[3] for p in passes if p[0] == 1]
            assert evaluated == [expected[before]] * len(evaluated)
            assert bool(evaluated) == key[2].startswith("fprop")
            # A recomputed pass uses the amax of the first pass of its micro-batch.
            used = {(p[0], p[1]): p[3] for p in first}
            again = [p for p in passes if p[4]]
            assert all(p[3] == used[p[0], p[1]] for p in again)
            assert bool(again) == (not shared and key[2].startswith("fprop"))


def test_pipelines_run_other_micro_batches_before_a_recomputation(reports):
    """Otherwise, the test above would not detect a recomputation that uses the latest amax."""
    for report in reports[:1]:
        passes = passes_of(report["pipeline"])[
            "decoder.layers.0.mlp.linear_fc1", "linear", "fprop_a"
        ]
        order = [(p[0], p[1], p[4]) for p in passes]
        assert order.index((0, 1, False)) < order.index((0, 0, True))


def test_a_rank_without_values_takes_part(reports):
    assert [report["empty"] for report in reports] == [[2.0, 7.0]] * 2


def test_training_outside_of_the_schedules_is_refused(reports):
    assert "in the pipeline schedules, and this forward pass runs outside" in reports[0]["outside"]


def test_a_traced_call_is_refused():
    fmt = get_format("fp8_e4m3:delayed")
    scaling = DelayedScaling.__new__(DelayedScaling)
    with (
        FakeTensorMode(),
        pytest.raises(ValueError, match=r"eagerly, or choose .* such as fp8_e4m3"),
    ):
        scaling.amax_of("decoder", "linear", "fprop_a", torch.ones(2), fmt)


def test_codes_of_a_weight_are_saved_with_each_scale():
    dedup = WeightDedup()
    fields = {"iteration": 1, "module": "m", "tensor_name": "fprop_weight_codes"}
    for name, again in (("fp8_e4m3:delayed+H16:nvfp4", True), ("fp8_e4m3", False)):
        codes = fields | {"format": name, "codes": {"rounding": "nearest"}}
        assert [dedup.is_new(codes), dedup.is_new(codes)] == [True, again]
