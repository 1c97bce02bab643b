"""Tests that a collection plan predicts what the run writes, to the byte, in several layouts."""

import argparse
import re
from collections import Counter

import pytest

from megatron.tensor_record import read_events, read_index
from megatron.training import collection
from tests.training.runs import MODEL, NO_DROPOUT, train

SMALL = (
    *(word for word in MODEL if word != "--use-cpu-initialization"),
    *(*NO_DROPOUT, "--mock-data", "--num-layers", "2", "--seq-length", "32"),
)
ROW = re.compile(r"    (?P<name>\S.*?) {2,}(?P<tensors>\d+) +(?P<bytes>\d+)  .*")
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2"),
)


def tables(output: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the rows of each table of a plan, as (tensors, bytes)."""
    rows_by_table: dict[str, dict[str, tuple[int, int]]] = {}
    for line in output.splitlines():
        if title := re.fullmatch(r"  (layer|tensor|iteration|rank) +tensors +bytes", line):
            rows = rows_by_table.setdefault(title[1], {})
        elif row := ROW.fullmatch(line):
            rows[row["name"]] = (int(row["tensors"]), int(row["bytes"]))
    return rows_by_table


def measured(records: list[dict], key) -> dict[str, tuple[int, int]]:
    tensors, size = Counter(), Counter()
    for record in records:
        tensors[str(key(record))] += 1
        size[str(key(record))] += record["bytes"]
    return {name: (tensors[name], size[name]) for name in tensors}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        # numbers above 255 in the metadata, and a window that skips iterations
        (1, "--control-iter 0 --collect-iterations 2-6:2 --collect-micro-batches 9 --bf16"),
        (
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --custom-quant-type mxfp8"
            " --collect-tensors all attention_probs attention_scores --collect-slice s=4:20:2",
        ),
        (
            2,
            "--pipeline-model-parallel-size 2 --collect-micro-batches 0 --collect-operations"
            " forward --recompute-granularity full --recompute-method uniform"
            " --recompute-num-layers 1",
        ),
        (2, "--context-parallel-size 2 --collect-ranks last --collect-modules core_* linear_fc1"),
        (2, " ".join(MOE)),
    ],
    ids=["iterations", "tp-sp-probs", "pp-recompute", "cp-one-rank", "ep"],
)
def test_the_plan_is_what_the_run_writes(tmp_path, ranks, options):
    folder = tmp_path / "dump"
    flags = (*options.split(), "--save-tensors", "--tensor-save-dir", folder)
    planned = train(*flags, "--collect-plan", ranks=ranks, model=SMALL)
    assert planned.status == 0, planned.errors
    assert not folder.exists(), "a plan writes nothing"
    assert not planned.lines, "a plan trains nothing"
    done = train(*flags, ranks=ranks, model=SMALL)
    assert done.status == 0, done.errors
    too_few = "has 4 micro-batches, fewer than --collect-micro-batches 9"
    for run in (planned, done):
        assert (too_few in run.output + run.errors) == ("--collect-micro-batches 9" in options)
    records = [r for path in folder.glob("index_*.jsonl") for r in read_index(path)]
    assert sum(r["bytes"] for r in records) == sum(p.stat().st_size for p in folder.glob("*.pt"))
    plan = tables(planned.output)
    total = plan["rank"].pop("total")
    assert f"> saved {total[0]} tensors, " in done.output
    assert total == measured(records, lambda r: "total")["total"]
    assert plan["layer"] == measured(records, lambda r: r["layer_idx"])
    of_tensor = measured(records, lambda r: f"{r['layer_type']} {r['tensor_name']}")
    assert plan["tensor"] == of_tensor
    assert plan["rank"] == measured(records, lambda r: r["rank"]["world"])
    by_iteration = measured(records, lambda r: r["iteration"])
    for name, (tensors, size) in plan["iteration"].items():
        first = re.match(r"\d+", name)[0]
        assert by_iteration[first] == (tensors, size)
    assert ": holds\n" in planned.output
    events = [event for path in folder.glob("index_*.jsonl") for event in read_events(path)]
    assert {event["event"] for event in events} <= {"trained"}, "nothing was left out"


@pytest.mark.parametrize(
    ("selected", "stages", "number"), [(1, 1, 1), (3, 2, 4), (0, 1, 8), (9, 1, 8), (8, 4, 8)]
)
def test_a_plan_runs_only_the_selected_micro_batches(monkeypatch, selected, stages, number):
    monkeypatch.setattr(collection, "get_num_microbatches", lambda: 8)
    args = argparse.Namespace(collect_micro_batches=selected, pipeline_model_parallel_size=stages)
    assert collection._planned_micro_batches(args) == number
