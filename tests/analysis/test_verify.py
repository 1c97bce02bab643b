"""`python -m megatron.analysis verify`: sound dumps pass, and every kind of damage is found."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron.analysis import schedule
from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore
from megatron.analysis.verify import Verification
from tests.analysis.fake_dump import write_dump
from tests.subprocesses import run

#: Results by layout: 3 of each linear layer and 4 of attention, each pass on each rank.
RESULTS = {
    "one": (48, 16), "mxfp8": (24, 8), "hifp8-frozen": (22, 8), "tp2": (96, 32), "tp2sp": (96, 32),
    "pp2": (48, 16), "cp2": (96, 32), "dp2": (48, 16), "tp2sp-mxfp4": (48, 16),
    "cp2-mxfp8": (48, 16),
}  # fmt: skip
#: Of the weights under cp, dp; of what enters the column- and leaves the row-parallel layers.
REPLICAS = {"one": 0, "mxfp8": 32, "tp2": 16, "tp2sp": 16, "cp2": 16, "dp2": 8}


def verify(folder, **how):
    return Verification(TensorStore(folder), **how).run()


def count(counter, word):
    return sum(number for what, number in counter.items() if word in what)


@pytest.fixture
def copied(dumps, tmp_path):
    """A copy of a layout's dump, to be damaged."""

    def copy(name):
        return shutil.copytree(dumps / name, tmp_path / name)

    return copy


def path_of(folder, **conditions):
    """The one file, relative to which damage is done."""
    [record] = TensorStore(folder).select(**conditions).itertuples()
    return Path(record.path)


def change(path, function):
    payload = torch.load(path, weights_only=True)
    torch.save(payload | {"tensor": function(payload["tensor"])}, path)


def flip(tensor, bit):
    """One bit of the value that is largest, so that it is no zero."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.clone().flatten()
    at = int(flat.abs().argmax())
    flat.view(whole)[at] ^= 1 << bit
    return flat.view(tensor.shape)


@pytest.mark.parametrize("layout", RESULTS)
def test_a_sound_dump_passes(dumps, layout):
    verdict = verify(dumps / layout)
    assert verdict.errors == []
    assert not verdict.unchecked
    results = count(verdict.checked, "linear"), count(verdict.checked, "attention")
    assert results == RESULTS[layout]
    assert count(verdict.checked, "files") == len(TensorStore(dumps / layout))
    assert count(verdict.checked, "replicas") == REPLICAS.get(layout, verdict.checked["replicas"])


def test_what_cannot_be_recomputed_is_counted(dumps):
    stochastic = verify(dumps / "stochastic")
    assert stochastic.unchecked == {"stochastic rounding: the random bits are not saved": 16}
    dropout = verify(dumps / "dropout")
    [(reason, number)] = dropout.unchecked.items()
    assert number == 4
    assert "no arguments: its mask, scale and dropout" in reason
    assert stochastic.findings == dropout.findings == []


def test_with_arguments_in_the_card_the_reason_is_the_argument(copied):
    folder = copied("dropout")
    [card] = folder.glob("run_*.json")
    content = json.loads(card.read_text()) | {"arguments": {"attention_dropout": 0.5}}
    card.write_text(json.dumps(content))
    assert verify(folder).unchecked == {"attention with attention_dropout 0.5: not recomputed": 4}


def test_a_frozen_weight_is_a_note(dumps):
    notes = verify(dumps / "hifp8-frozen").findings
    assert [note.where for note in notes] == [
        f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in (0, 1)
    ]
    assert all(note.note and "grad_weight: no number is missing" in note.text for note in notes)


LINEAR = {"layer": 1, "module": "linear_fc2"}
ATTENTION = {"layer": 1, "layer_type": "attention"}


@pytest.mark.parametrize(
    ("layout", "where", "wrong"),
    [
        ("hifp8-frozen", LINEAR | {"tensor_name": "output"}, {"output"}),
        ("hifp8-frozen", LINEAR | {"tensor_name": "grad_weight"}, {"grad_weight"}),
        ("tp2sp-mxfp4", LINEAR | {"tensor_name": "input"}, {"output", "grad_weight"}),
        ("tp2sp-mxfp4", LINEAR | {"tensor_name": "weight"}, {"output", "grad_input"}),
        ("dp2", LINEAR | {"tensor_name": "grad_output"}, {"grad_input", "grad_weight"}),
        ("hifp8-frozen", ATTENTION | {"tensor_name": "output"}, {"output"}),
        ("cp2-mxfp8", ATTENTION | {"tensor_name": "output"}, {"output"}),
        ("cp2-mxfp8", ATTENTION | {"tensor_name": "grad_key"}, {"grad_key"}),
        ("dp2", ATTENTION | {"tensor_name": "grad_query"}, {"grad_query"}),
        ("dp2", ATTENTION | {"tensor_name": "value"}, {"output", "grad_query", "grad_key"}),
    ],
)
def test_a_flipped_bit_is_found_in_what_follows_from_it(copied, layout, where, wrong):
    """The exponent's second bit of one value; in an operand, all results that it enters."""
    folder = copied(layout)
    path = path_of(folder, micro_batch=0, rank=0, **where)
    change(path, lambda x: flip(x, bit=x.element_size() * 8 - 4))
    verdict = verify(folder)
    results = [finding for finding in verdict.errors if finding.what == "result"]
    assert {finding.text.split(" of ")[0] for finding in results} >= wrong
    assert all(where.get("module", "core_attention") in finding.text for finding in results)
    if where["tensor_name"] != "weight":  # whose replicas on other ranks differ from it now
        assert {finding.what for finding in verdict.errors} == {"result"}


def test_even_the_last_bit_of_a_bf16_output_can_be_too_much(copied):
    """Three quarters of a unit off the exact value; rounding allows half, `slack` 4 two."""
    folder = copied("tp2sp-mxfp4")
    path = path_of(folder, layer=0, module="linear_qkv", tensor_name="output", rank=0)
    exact = verify(folder)
    change(path, lambda x: x + torch.finfo(x.dtype).eps * x.abs().max())
    assert [finding.where for finding in verify(folder).errors] == [str(path)]
    change(path, lambda x: x - torch.finfo(x.dtype).eps * x.abs().max())
    loose = verify(folder, slack=100)
    assert loose.errors == []
    assert count(loose.checked, "within") == count(exact.checked, "within") + 1
    strict = verify(folder, slack=100, exact=True)
    assert str(path) in [finding.where for finding in strict.errors]


def test_a_replica_that_differs_is_named(copied):
    folder = copied("tp2")
    where = {"layer": 0, "module": "linear_fc1", "tensor_name": "input", "micro_batch": 1}
    path = path_of(folder, rank=1, **where)
    change(path, lambda x: flip(x, bit=0))
    [finding] = verify(folder).errors
    assert finding.what == "replica"
    assert finding.where == str(path)
    assert "is not its replica on rank 0 (" in finding.text
    assert "1 of 4096 values differ, by up to" in finding.text


def test_a_recomputed_forward_that_differs_is_named(copied):
    folder = copied("mxfp8")
    path = path_of(folder, layer=0, module="linear_fc1", tensor_name="input", recomputed=True)
    change(path, lambda x: flip(x, bit=3))
    [finding] = verify(folder).errors
    assert (finding.what, finding.where) == ("replica", str(path))
    assert "is not the first of the same pass" in finding.text


def test_a_lost_file_is_named_and_its_results_are_not_checked(copied):
    folder = copied("pp2")
    path = path_of(folder, layer=1, module="linear_fc1", tensor_name="weight", micro_batch=0)
    path.unlink()
    verdict = verify(folder)
    assert [str(each) for each in verdict.errors] == [
        f"ERROR  file: {path}: an index names it, but it is not there"
    ]
    assert verdict.unchecked == {"no weight to recompute it from": 2}


@pytest.mark.parametrize("name", ["output", "grad_weight"])
def test_a_tensor_of_which_no_trace_is_left_is_missed(copied, name):
    folder = copied("cp2")
    path = path_of(
        folder, layer=1, module="linear_fc1", tensor_name=name, micro_batch=0, rank=1
    )  # fmt: skip
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
    [card] = folder.glob("run_*.json")
    args = {"control_iter": 3, "num_layers": 3, "global_batch_size": 6, "micro_batch_size": 2}
    content = json.loads(card.read_text()) | {"arguments": args, "iterations": 2}
    card.write_text(json.dumps(content))
    assert [f"{each.what}: {each.text}" for each in verify(folder).errors] == [
        "iterations: 2 were collected by the run card, but records are of 1",
        "micro-batches: 3 of each iteration by the run card, but records are of 2",
        "layers: no record of layer 2",
    ]


def test_a_killed_run_may_end_within_its_last_pass(copied):
    folder = copied("one")
    [card] = folder.glob("run_*.json")
    card.write_text(json.dumps(json.loads(card.read_text()) | {"status": "running"}))
    for path in sorted(folder.glob("*.pt"))[-10:]:
        path.unlink()
    [index] = folder.glob("*.jsonl")
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:-10]) + lines[-10][:50])
    verdict = verify(folder)
    assert verdict.errors == []
    assert {finding.what for finding in verdict.findings} >= {"run card", "missing"}


def test_a_truncated_index_costs_nothing(copied):
    folder = copied("tp2")
    for index in folder.glob("*.jsonl"):
        index.write_text(index.read_text()[:-100])
    assert verify(folder).errors == []


def test_values_and_metadata(copied):
    folder = copied("one")
    first, second, third = (
        path_of(folder, layer=0, module="linear_proj", micro_batch=0, tensor_name=name)
        for name in ("output", "grad_output", "weight")
    )
    change(first, lambda x: x.clone().index_fill_(0, torch.tensor(0), torch.nan))
    change(second, lambda x: x.double())
    third.write_bytes(third.read_bytes()[:1000])
    found = {finding.where: finding.text for finding in verify(folder).errors}
    assert found[str(second)] == "holds float64, but its record says float32"
    assert found[str(third)].startswith("corrupt or cut short")
    assert found[str(first)] == "128 NaN and 0 Inf of 4096 values"


def test_foreign_files_are_read_and_the_rest_is_said_to_be_unchecked(tmp_path):
    name = "20250908_095220_0007_linear_L1_backward_pre_linear_mxfp8_grad_output.pt"
    torch.save(torch.ones(4), tmp_path / name)
    verdict = verify(tmp_path)
    assert verdict.findings == []
    assert list(verdict.unchecked.values()) == [1]


def test_the_command(dumps, copied, capsys):
    assert main(["verify", str(dumps / "mxfp8")]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "  checked: 96 files\n" in told.out
    assert told.out.endswith("0 error(s), 0 note(s)\n")
    folder = copied("mxfp8")
    next(folder.glob("*_0001_*")).unlink()
    done = run([sys.executable, "-m", "megatron.analysis", "verify", folder, "--run", "latest"])
    assert done.returncode == 1
    assert done.stdout.startswith("ERROR  file: ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "nowhere"), "[ERROR] no folder nowhere; collect tensors first"),
        (("verify",), "[ERROR] the following arguments are required: DIR; see python -m megatron"),
        (("verify", ".", "--slack", "-1"), "[ERROR] --slack is -1; give a number above 0"),
        ((), "[ERROR] the following arguments are required: COMMAND"),
    ],
)
def test_wrong_options(capsys, arguments, said):
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert capsys.readouterr().err.startswith(said)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert (
        "python -m megatron.analysis verify enhanced_tensor_logs/mxfp8" in capsys.readouterr().out
    )


def test_in_a_run_of_several_iterations_each_pass_is_expected(tmp_path):
    """One tensor of the second of three iterations, and all of a layer in the third."""
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
    [card] = tmp_path.glob("run_*.json")
    card.write_text(json.dumps(json.loads(card.read_text()) | {"status": "finished"}))
    records = TensorStore(tmp_path).records
    missing = [
        each for each in schedule.check_run(records, {"status": "finished"}) if not each.note
    ]
    places = sorted(each.where.split(", ")[0] for each in missing if each.what == "missing")
    assert places == ["iteration 2", "iteration 3", "iteration 3"]
