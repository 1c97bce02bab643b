"""Test `python -m megatron.analysis verify`: sound dumps pass, and all damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore
from tests import forks
from tests.analysis.fake_dump import records
from tests.analysis.verification.verifying import change_card, count, path_of, verify

#: Results by layout: 3 per linear layer and 4 per attention, for each pass on each rank.
RESULTS = {
    "one": (48, 16),
    "mxfp8": (24, 8),
    "hifp8-frozen": (22, 8),
    "tp2": (96, 32),
    "tp2sp": (96, 32),
    "pp2": (48, 16),
    "cp2": (96, 32),
    "dp2": (48, 16),
    "tp2sp-mxfp4": (48, 16),
    "cp2-mxfp8": (48, 16),
    "window": (24, 8),
    "window-cp2": (48, 16),
    "recipe": (24, 8),
    "experts": (204, 24),
    "ep2": (156, 24),
    "ep2-mxfp8": (156, 24),
    "latent-mxfp8": (102, 12),
}
#: Replicas by layout: weights under cp and dp; inputs of column-parallel and outputs of
#: row-parallel layers.
REPLICAS = {"one": 0, "mxfp8": 24, "tp2": 16, "tp2sp": 16, "cp2": 8, "dp2": 8, "ep2": 18}


def change(path, function):
    payload = torch.load(path, weights_only=True)
    torch.save(payload | {"tensor": function(payload["tensor"])}, path)


def flip(tensor, bit):
    """Flip one bit of the value with the largest magnitude, which is not zero."""
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


def test_what_cannot_be_recomputed_is_counted(dumps, copied):
    stochastic = verify(dumps / "stochastic")
    assert stochastic.unchecked == {
        "stochastic rounding: no codes were saved (--collect-tensors codes)": 12,
        "stochastic rounding: attention is not recomputed from codes": 4,
    }
    dropout = verify(dumps / "dropout")
    [(reason, number)] = dropout.unchecked.items()
    assert number == 4
    assert "attention with dropout 0.5: its dropout mask is not saved" in reason
    folder = copied("dropout")
    change_card(folder, quantization=None)
    [(reason, number)] = verify(folder).unchecked.items()
    assert number == 4
    assert "attention with unknown mask, scale and dropout" in reason
    assert stochastic.findings == dropout.findings == []


def test_with_arguments_in_the_card_the_reason_is_the_argument(copied):
    folder = copied("dropout")
    change_card(folder, arguments={"attention_dropout": 0.5})
    reason = "attention with dropout 0.5: its dropout mask is not saved"
    assert verify(folder).unchecked == {reason: 4}


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
    """The test flips an exponent bit of one value; a wrong operand makes all its results wrong."""
    folder = copied(layout)
    path = path_of(folder, micro_batch=0, rank=0, **where)
    change(path, lambda x: flip(x, bit=x.element_size() * 8 - 4))
    verdict = verify(folder)
    results = [finding for finding in verdict.errors if finding.what == "result"]
    assert {finding.text.split(" of ")[0] for finding in results} >= wrong
    assert all(where.get("module", "core_attention") in finding.text for finding in results)
    if where["tensor_name"] != "weight":  # its replicas on other ranks differ from it now
        assert {finding.what for finding in verdict.errors} == {"result"}


def test_even_the_last_bit_of_a_bf16_output_can_be_too_much(copied):
    """The value is off by 3/4 of its last bit; rounding allows 1/2, and a slack of 4 allows 2."""
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


MLA = {
    "multi_latent_attention": True,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "rotary_scaling_factor": 40,
    "mscale_all_dim": 0.707,
}
WINDOW = {"window_size": [5, 0], "window_attn_skip_freq": 2}


@pytest.mark.parametrize(
    ("layout", "arguments"), [("latent-mxfp8", MLA), ("window", WINDOW), ("window-cp2", WINDOW)]
)
def test_the_arguments_of_an_older_card_tell_of_windows_and_scales(copied, layout, arguments):
    """An audit without `operands` does not describe the softmax, but the arguments do."""
    folder = copied(layout)
    [card] = folder.glob("run_*.json")
    audit = json.loads(card.read_text())["quantization"]
    for part in audit:
        del part["operands"]
    change_card(folder, quantization=audit, arguments=arguments)
    verdict = verify(folder)
    assert verdict.errors == []
    assert count(verdict.checked, "attention, bit for bit") == RESULTS[layout][1]
    change_card(folder, arguments={"num_layers": 2})
    assert all("grad" in each.text or "output" in each.text for each in verify(folder).errors)
    assert verify(folder).errors, "taken for causal attention with the usual scale"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"marks": ["stochastic sums"]}, "a matmul with unknown properties: stochastic sums"),
        ({"slots": {"fprop_a": "mxfp9"}}, "the unknown format 'mxfp9'"),
        ({"slots": {}}, "a run card whose audit cannot be parsed (KeyError: 'fprop_a')"),
        ({"modules": 3}, "a run card whose audit cannot be parsed (TypeError"),
    ],
)
def test_what_the_card_says_and_we_do_not_know_is_not_checked(copied, change, reason):
    folder = copied("recipe")
    [card] = folder.glob("run_*.json")
    audit = json.loads(card.read_text())["quantization"]
    for entry in audit[0]["operands"]:
        entry |= change
    change_card(folder, quantization=audit)
    verdict = verify(folder)
    assert verdict.errors == []
    assert sum(verdict.unchecked.values()) == 32
    assert all(reason in why for why in verdict.unchecked)


@pytest.mark.parametrize(
    ("softmax", "reason"),
    [
        ({"kind": "off-by-one"}, "attention with the unsupported softmax 'off-by-one'"),
        ({"dropout": 0.1}, "attention with dropout 0.1: its dropout mask is not saved"),
        ({"window": "wide"}, "a run card whose audit cannot be parsed (ValueError"),
    ],
)
def test_a_softmax_that_is_not_recomputed_is_not_checked(copied, softmax, reason):
    folder = copied("recipe")
    [card] = folder.glob("run_*.json")
    audit = json.loads(card.read_text())["quantization"]
    for entry in audit[0]["operands"]:
        entry["softmax"] = entry["softmax"] and entry["softmax"] | softmax
    change_card(folder, quantization=audit)
    verdict = verify(folder)
    assert verdict.errors == []
    [(why, number)] = verdict.unchecked.items()
    assert number == RESULTS["recipe"][1]
    assert why.startswith(reason)


def test_a_replica_that_differs_is_named(copied):
    folder = copied("tp2")
    where = {"layer": 0, "module": "linear_fc1", "tensor_name": "input", "micro_batch": 1}
    path = path_of(folder, rank=1, **where)
    change(path, lambda x: flip(x, bit=0))
    [finding] = verify(folder).errors
    assert finding.what == "replica"
    assert finding.where == str(path)
    assert "differs from its replica on rank 0 (" in finding.text
    assert "1 of 4096 values differ, by up to" in finding.text


def test_a_recomputed_forward_that_differs_is_named(copied):
    folder = copied("mxfp8")
    path = path_of(folder, layer=0, module="linear_fc1", tensor_name="input", recomputed=True)
    change(path, lambda x: flip(x, bit=3))
    [finding] = verify(folder).errors
    assert (finding.what, finding.where) == ("replica", str(path))
    assert "differs from the tensor of the first pass" in finding.text


def test_a_lost_file_is_named_and_its_results_are_not_checked(copied):
    folder = copied("pp2")
    path = path_of(folder, layer=1, module="linear_fc1", tensor_name="input", micro_batch=0)
    path.unlink()
    verdict = verify(folder)
    assert [str(each) for each in verdict.errors] == [
        f"ERROR  file: {path}: listed in an index, but missing"
    ]
    assert verdict.unchecked == {"no input to recompute the result from": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_name": "key"},
        {"layer_idx": 1},
        {"format": "mxfp4"},
        {"micro_batch": 1},
        {"rank": {"world": 1}},
    ],
    ids=str,
)
def test_a_file_whose_metadata_contradict_the_index_is_named(copied, change):
    folder = copied("one")
    path = path_of(folder, layer=0, tensor_name="query", micro_batch=0)
    content = torch.load(path, weights_only=True)
    torch.save(content | {"metadata": content["metadata"] | change}, path)
    [error] = [each for each in verify(folder).errors if each.what == "file"]
    assert error.where == str(path)
    assert f"{next(iter(change))} is " in error.text
    assert " in its metadata, but " in error.text


@pytest.mark.parametrize("name", ["input", "weight", "grad_output", "query", "key", "value"])
def test_a_format_that_the_audit_does_not_have_is_named(copied, name):
    """The results follow from the audit's formats, so only the record can be wrong."""
    folder = copied("cp2-mxfp8")
    chosen = {"layer": 1, "tensor_name": name, "micro_batch": 0, "rank": 1}
    chosen["layer_type"] = "linear" if name in ("input", "weight", "grad_output") else "attention"
    paths = {Path(record.path).name for record in TensorStore(folder).select(**chosen).itertuples()}
    for index in folder.glob("index_*.jsonl"):
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        changed = [
            line | {"format": "mxfp4"} if line.get("file") in paths else line for line in lines
        ]
        index.write_text("".join(json.dumps(line) + "\n" for line in changed))
    for path in paths:
        content = torch.load(folder / path, weights_only=True)
        torch.save(content | {"metadata": content["metadata"] | {"format": "mxfp4"}}, folder / path)
    errors = verify(folder).errors
    assert paths
    assert {Path(error.where).name for error in errors} == paths
    assert all(
        "the format is mxfp4 in its record, but mxfp8 in the run card" in error.text
        for error in errors
    )


def test_query_groups_on_several_ranks_are_counted_once(tmp_path):
    """Neighboring ranks hold the same group if there are fewer groups than ranks."""
    folder = foreign(
        tmp_path / "dump",
        dims="s b g[tp:2] d",
        tensor=torch.ones(4, 2, 1, 8),
        shape=[4, 2, 1, 8],
        global_shape=[4, 2, 1, 8],
        rank={"world": 0, "world_size": 2, "tp": 0, "tp_size": 2},
    )
    assert [each for each in verify(folder).errors if each.what == "file"] == []


def test_values_and_metadata(copied):
    folder = copied("one")
    first, second, third = (
        path_of(folder, layer=0, module="linear_proj", micro_batch=0, tensor_name=name)
        for name in ("output", "grad_output", "input")
    )
    change(first, lambda x: x.clone().index_fill_(0, torch.tensor(0), torch.nan))
    change(second, lambda x: x.double())
    third.write_bytes(third.read_bytes()[:1000])
    found = {finding.where: finding.text for finding in verify(folder).errors}
    assert found[str(second)] == "holds float64, but the dtype in its record is float32"
    assert found[str(third)].startswith("not an archive of torch.save: corrupt, truncated")
    assert found[str(first)] == "128 NaN and 0 Inf of 4096 values"


def test_foreign_files_are_read_and_the_rest_is_said_to_be_unchecked(tmp_path):
    name = "20250908_095220_0007_linear_L1_backward_pre_linear_mxfp8_grad_output.pt"
    torch.save(torch.ones(4), tmp_path / name)
    verdict = verify(tmp_path)
    assert verdict.findings == []
    assert list(verdict.unchecked.values()) == [1]


def foreign(folder, **changes):
    """Write one file with the metadata of another program."""
    folder.mkdir()
    [first, *_] = records(run_id="r", quant_type="bf16", layers=1)
    metadata = first[0].to_metadata() | changes
    tensor = changes.pop("tensor", torch.ones(first[1], dtype=torch.bfloat16))
    metadata |= {"dtype": str(tensor.dtype).removeprefix("torch.")}
    metadata.pop("tensor", None)
    torch.save({"tensor": tensor, "metadata": metadata}, folder / "a.pt")
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dims": "s b h[mp]"}, "dims 's b h[mp]': no parallel group 'mp'"),
        ({"dims": "s b"}, "its shape is [64, 2, 64], but its dims are 's b'"),
        ({"dims": "s b {h}", "global_shape": None}, "'{h}' is not understood"),
        ({"tensor": torch.tensor([[[torch.nan]]]).to(torch.float8_e4m3fn)}, "1 NaN and 0 Inf of 1"),
    ],
)
def test_strange_metadata_are_an_error_of_their_file(tmp_path, changes, said):
    if "tensor" in changes:
        changes = changes | {"shape": [1, 1, 1], "global_shape": [1, 1, 1]}
    verdict = verify(foreign(tmp_path / "dump", **changes))
    [error] = [each for each in verdict.errors if each.what in ("file", "values")]
    assert error.where == str(tmp_path / "dump" / "a.pt")
    assert said in error.text


@pytest.mark.parametrize(
    "changes", [{"run_id": None}, {"rank": None}, {"micro_batch": None}, {"dims": None}]
)
def test_what_does_not_say_what_it_is_is_counted(tmp_path, changes):
    verdict = verify(foreign(tmp_path / "dump", **changes))
    assert [each.what for each in verdict.findings if not each.note] == []
    [(reason, number)] = verdict.unchecked.items()
    assert number == 1
    assert "tensors that their metadata do not identify" in reason


def test_a_layer_type_of_another_program_is_read(tmp_path):
    verdict = verify(foreign(tmp_path / "dump", layer_type="norm"))
    assert verdict.errors == []
    assert verdict.checked["files"] == 1


def test_nothing_readable_is_an_error(tmp_path, capsys):
    (tmp_path / "a.pt").write_bytes(b"")
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"ERROR  file: {tmp_path / 'a.pt'}: the file is empty")


def test_the_command(dumps, copied, capsys):
    assert main(["verify", str(dumps / "mxfp8")]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "  checked: 88 files\n" in told.out
    assert told.out.endswith("0 error(s), 0 note(s)\n")
    folder = copied("mxfp8")
    next(folder.glob("*_0001_*")).unlink()
    command = ("-m", "megatron.analysis", "verify", folder, "--run", "latest")
    done = forks.run(*command, libraries_only=True)
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
