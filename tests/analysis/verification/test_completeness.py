"""Test which tensors, ranks, layers and numbers a run lacks.

What is left out on purpose, or could not be written, is reported as a note.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections import Counter

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.verification import completeness
from tests.analysis.fake_dump import LAYER, write_dump
from tests.analysis.verification.verifying import RUN, change_card, errors, path_of, rewrite, verify


def test_a_frozen_weight_is_a_note(dumps):
    notes = verify(dumps / "hifp8-frozen").findings
    assert [note.where for note in notes] == [
        f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in (0, 1)
    ]
    assert all(note.note and "grad_weight: not computed (frozen) or" in note.text for note in notes)


@pytest.mark.parametrize("name", ["output", "grad_weight"])
def test_a_tensor_of_which_no_trace_is_left_is_missed(copied, name):
    folder = copied("cp2")
    path = path_of(folder, layer=1, module="linear_fc1", tensor_name=name, micro_batch=0, rank=1)
    path.unlink()
    for index in folder.glob("*rank01.jsonl"):
        lines = index.read_text().splitlines(keepends=True)
        index.write_text("".join(line for line in lines if path.name not in line))
    numbers, missing = verify(folder).errors
    assert "1 of its records' numbers are in no index and no file" in numbers.text
    assert missing.where.endswith(
        "iteration 1, micro-batch 0, rank 1, decoder.layers.1.mlp.linear_fc1"
    )
    assert (missing.what, missing.text) == ("missing", name)


def test_a_rank_without_records_is_missed(copied):
    folder = copied("tp2sp")
    for path in [*folder.glob("*_rank01_*.pt"), *folder.glob("*rank01.jsonl")]:
        path.unlink()
    [finding] = verify(folder).errors
    assert finding.where.endswith("rank 1")
    assert finding.text == "no record, but other ranks of pipeline stage 0 have some"


def test_the_cards_arguments_tell_of_what_is_missing_altogether(copied):
    folder = copied("pp2")
    args = {"control_iter": 3, "num_layers": 3, "global_batch_size": 6, "micro_batch_size": 2}
    change_card(folder, arguments=args, iterations=2)
    assert [f"{each.what}: {each.text}" for each in verify(folder).errors] == [
        "iterations: the run card implies 2, but there are records of only 1",
        "micro-batches: the run card implies 3 per iteration, but there are records of only 2",
        "layers: no record of layer 2",
    ]


def test_counts_of_a_billion_take_no_memory(copied):
    """A run card and records may claim any number of ranks, layers, iterations and samples."""
    huge = 10**9
    folder = copied("pp2")
    args = {"control_iter": huge, "num_layers": huge, "global_batch_size": huge}
    change_card(folder, arguments=args | {"micro_batch_size": 1}, iterations=huge)
    records = TensorStore(folder).records.assign(world_size=huge, pp_size=2)
    card = TensorStore(folder).run_card(records["run_id"].iloc[0])
    tracemalloc.start()
    texts = [str(finding) for finding in completeness.check_run(records, card)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert len(texts) < 200
    for expected in (
        "the run card implies 1000000000, but",
        "no record of layer 2-999999999",
        "more ranks up to rank 499999999",
    ):
        assert any(expected in text for text in texts), texts


def test_a_killed_run_may_end_within_its_last_pass(copied):
    folder = copied("one")
    change_card(folder, status="running")
    [index] = folder.glob("*.jsonl")
    lines = index.read_text().splitlines(keepends=True)
    for line in lines[-10:]:  # in the order in which two threads wrote
        (folder / json.loads(line)["file"]).unlink()
    index.write_text("".join(lines[:-10]) + lines[-10][:50])
    verdict = verify(folder)
    assert verdict.errors == []
    assert {finding.what for finding in verdict.findings} >= {"run card", "missing"}


def test_a_truncated_index_costs_nothing(copied):
    folder = copied("tp2")
    for index in folder.glob("*.jsonl"):
        index.write_text(index.read_text()[:-100])
    assert verify(folder).errors == []


def test_in_a_run_of_several_iterations_each_pass_is_expected(tmp_path):
    """One tensor of iteration 2 of 3 is lost, and a whole layer of iteration 3."""
    write_dump(tmp_path, layers=2, iterations=3)
    [index] = tmp_path.glob("*.jsonl")
    kept = []
    for line in map(json.loads, index.read_text().splitlines()):
        lost = line["iteration"] == 2 and line["layer_idx"] == 0 and line["tensor_name"] == "query"
        if lost or (line["iteration"] == 3 and line["layer_idx"] == 1):
            (tmp_path / line["file"]).unlink()
        else:
            kept.append(json.dumps(line) + "\n")
    index.write_text("".join(kept))
    records = TensorStore(tmp_path).records
    missing = [
        each for each in completeness.check_run(records, {"status": "finished"}) if not each.note
    ]
    places = sorted(each.where.split(", ")[0] for each in missing if each.what == "missing")
    assert places == ["iteration 2", "iteration 3", "iteration 3"]


def micro_batches(folder, *, shared):
    """Write two iterations of two micro-batches, by renumbering the records of two layers."""
    write_dump(folder, layers=2, iterations=2)

    def change(line):
        line["micro_batch"], line["layer_idx"] = line["layer_idx"], 0
        line["module"] = line["module"].replace("layers.1", "layers.0")
        lost = shared and line["micro_batch"] == 1 and line["tensor_name"] == "weight"
        return None if lost else line

    index = rewrite(folder, change)
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    renumbered = [json.dumps(line | {"counter": i}) for i, line in enumerate(lines, start=1)]
    index.write_text("\n".join(renumbered) + "\n")


@pytest.mark.parametrize("shared", [True, False])
def test_a_weight_that_an_iteration_has_once_is_in_all_of_its_passes(tmp_path, shared):
    micro_batches(tmp_path, shared=shared)
    assert errors(tmp_path) == ([], [])
    rewrite(
        tmp_path,
        lambda line: (
            None
            if (line["tensor_name"], line["iteration"], line["micro_batch"]) == ("weight", 2, 0)
            else line
        ),
    )
    numbers, *missing = errors(tmp_path)[0]
    assert "1 of its records' numbers" in numbers
    where = "ERROR  missing: iteration 2, micro-batch {}, rank 0, decoder.layers.0"
    assert [each.partition(".self_attention")[0] for each in missing] == [
        where.format(batch) for batch in ((0, 1) if shared else (0,))
    ]


def test_the_one_weight_of_an_iteration_recomputes_all_of_its_passes(copied):
    """A weight may be saved with every micro-batch or with one of them."""
    folder = copied("one")
    whole = verify(folder)
    [index] = folder.glob("*.jsonl")
    kept, again = [], 0  # the dump has the weight of every micro-batch
    for line in map(json.loads, index.read_text().splitlines()):
        if line["tensor_name"] == "weight" and line["micro_batch"] == 1:
            again += 1
            (folder / line["file"]).unlink()
        else:
            kept.append(line)
    lines = [json.dumps(line | {"counter": i}) + "\n" for i, line in enumerate(kept, start=1)]
    index.write_text("".join(lines))
    verdict = verify(folder)
    assert verdict.findings == []
    assert verdict.unchecked == {}
    assert verdict.checked == whole.checked - Counter(files=again)
    store = TensorStore(folder)
    where = {"layer": 1, "module": "linear_fc1", "tensor_name": "weight"}
    first, second = (store.load_global(micro_batch=batch, **where) for batch in (0, 1))
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="no tensor has micro_batch=2"):
        store.load_global(micro_batch=2, **where)


def ends_early(folder, *, rank, after):
    """Write a dump of two ranks, one of which saved only the first few tensors."""
    write_dump(folder, layers=1, iterations=3, world_size=2)
    [index] = folder.glob(f"index_*_rank{rank:02d}.jsonl")
    lines = index.read_text().splitlines(keepends=True)
    for line in map(json.loads, lines[after:]):
        (folder / line["file"]).unlink()
    index.write_text("".join(lines[:after]))
    return index


def test_what_a_rank_lacks_that_reached_a_limit_is_a_note(tmp_path):
    index = ends_early(tmp_path, rank=1, after=len(LAYER) + 3)
    missing, _ = errors(tmp_path, "limited")
    assert missing == [], "without an event, any rank may have reached the limit"
    with index.open("a") as lines:
        for event in ("switched", "limited", "dropped", "kept"):
            line = {"event": event, "run_id": RUN, "rank": {"world": 1}, "why": f"for {event}"}
            lines.write(json.dumps(line) + "\n")
    for status in ("limited", "finished"):
        missing, notes = errors(tmp_path, status)
        assert missing == []
        told = [str(note) for note in notes if note.what == "not all"]
        assert told == [
            f"note  not all: run {RUN}, rank 1: {event}: for {event}"
            for event in ("limited", "dropped")
        ]
    first = next(json.loads(line) for line in index.read_text().splitlines())
    rewrite_first = [line for line in index.read_text().splitlines() if first["file"] not in line]
    index.write_text("\n".join(rewrite_first) + "\n")
    (tmp_path / first["file"]).unlink()
    numbers, lost = errors(tmp_path, "limited")[0]
    assert numbers.endswith("rank 1: 1 of its records' numbers are in no index and no file: 1")
    assert "iteration 1, micro-batch 0, rank 1" in lost, "lost before the limit"


def test_what_a_ring_says_that_it_left_out_of_an_iteration_is_a_note(tmp_path):
    write_dump(tmp_path, layers=1, iterations=2)
    [index] = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    kept = [line for line in lines if line["iteration"] == 2 or line["counter"] <= 3]
    for number, line in enumerate(kept, 1):
        line["counter"] = number
    index.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for line in lines:
        if line not in kept:
            (tmp_path / line["file"]).unlink()
    change_card(tmp_path, arguments={"collect_ring": 2})
    assert errors(tmp_path)[0], "no event explains the gap"
    with index.open("a") as file:
        for iteration in (1, "one"):
            event = {"event": "left_out", "iteration": iteration, "rank": {"world": 0}}
            file.write(json.dumps(event | {"run_id": RUN}) + "\n")
    missing, notes = errors(tmp_path)
    assert missing == []
    assert "missing" in {note.what for note in notes}


def test_without_such_an_event_it_is_a_loss(tmp_path):
    ends_early(tmp_path, rank=1, after=len(LAYER) + 3)
    missing, _ = errors(tmp_path, "finished")
    assert len(missing) == 2 + 2, "two passes of two modules"


def test_numbers_that_a_killed_run_had_not_written_yet_are_a_note(tmp_path):
    """Several threads write, so the last number may be present and the one before it missing."""
    write_dump(tmp_path, layers=1, iterations=2)
    last = 2 * len(LAYER)
    rewrite(tmp_path, lambda line: None if line["counter"] == last - 1 else line)
    missing, notes = errors(tmp_path, "running")
    assert missing == []
    assert {note.what for note in notes} == {"run card", "numbers", "missing"}
    missing, _ = errors(tmp_path, "finished")
    assert len(missing) == 2


def test_a_run_that_was_killed_in_its_first_pass_lacks_what_came_later(tmp_path):
    write_dump(tmp_path, layers=1)
    rewrite(tmp_path, lambda line: line if line["counter"] < 7 else None)
    args = {"num_layers": 2, "global_batch_size": 4, "micro_batch_size": 1}
    [index] = tmp_path.glob("*.jsonl")
    place = {"world": 0, "world_size": 1, "dp": 0, "dp_size": 1, "pp": 0, "pp_size": 1}
    lines = [json.loads(line) | {"rank": place} for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    change_card(tmp_path, arguments=args)
    assert errors(tmp_path, "running")[0] == []
    assert len(errors(tmp_path, "finished")[0]) == 2


def test_iterations_that_a_ring_or_a_flag_file_left_out_are_not_missed(tmp_path):
    write_dump(tmp_path, layers=1, iterations=2)
    for chosen in ({"collect_ring": 4}, {"collect_flag_file": "on"}):
        change_card(tmp_path, arguments={"control_iter": 0} | chosen, iterations=90)
        missing, notes = errors(tmp_path)
        assert missing == []
        assert "--collect-" in notes[0].text
    change_card(tmp_path, arguments={"control_iter": 0}, iterations=90)
    assert len(errors(tmp_path)[0]) == 1


def test_lost_last_records_are_missed_by_the_number_in_the_card(tmp_path):
    """If the last micro-batch is lost, numbers have no gap, and all other passes are complete."""
    micro_batches(tmp_path, shared=True)
    saved = len(TensorStore(tmp_path).records)
    outcome = [{"rank": 0, "tensors": saved}, {"rank": "0"}, {"rank": 7, "tensors": 3}]
    change_card(tmp_path, ranks=outcome)
    assert errors(tmp_path) == ([], [])
    lost = 0

    def cut(line):
        nonlocal lost
        last = (line["iteration"], line["micro_batch"]) == (2, 1)
        lost += last
        return None if last else line

    rewrite(tmp_path, cut)
    [numbers] = errors(tmp_path)[0]
    assert f"its last {lost} of {saved} records (run card)" in numbers
    assert lost > 10


def add_records(folder, copies):
    """Add copies of the records of a dump with other fields, and number all records anew.

    `copies` is a function that returns the changed fields of each copy of a record.
    """
    [index] = folder.glob("index_*.jsonl")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines.copy():
        for number, changes in enumerate(copies(line)):
            file = f"{number}_{line['file']}"
            shutil.copy(folder / line["file"], folder / file)
            lines.append(line | changes | {"file": file})
    renumbered = [json.dumps(line | {"counter": i}) for i, line in enumerate(lines, start=1)]
    index.write_text("\n".join(renumbered) + "\n")


def test_a_weight_with_several_values_does_not_change_what_other_modules_save(tmp_path):
    """A module with delayed scaling saves its weight's codes in each micro-batch; others do not."""
    micro_batches(tmp_path, shared=False)

    def of_another_module(line):
        if line["layer_type"] != "linear" or (
            line["tensor_name"] == "weight" and line["micro_batch"] == 1
        ):
            return []
        return [{"module": "decoder.layers.0.mlp.linear_fc1"}]

    add_records(tmp_path, of_another_module)
    assert errors(tmp_path) == ([], [])


def test_the_codes_of_an_expert_without_tokens_are_not_missing(tmp_path):
    micro_batches(tmp_path, shared=True)
    gemms = {"input": "fprop", "grad_output": "dgrad"}
    empty = (2, 1)  # iteration and micro-batch without a token

    def without_tokens(line):
        if (line["iteration"], line["micro_batch"]) == empty and line["tensor_name"] in gemms:
            line["shape"] = [0, 64]
        return line

    rewrite(tmp_path, without_tokens)

    def codes(line):
        name = line["tensor_name"]
        if line["layer_type"] != "linear" or name not in gemms or 0 in line["shape"]:
            return []
        return [{"tensor_name": f"{gemms[name]}_{name}_codes"}]

    add_records(tmp_path, codes)
    assert TensorStore(tmp_path).records["tensor_name"].str.endswith("_codes").sum() == 6
    assert errors(tmp_path) == ([], [])
