"""Test that the codes and scales that a real run stores equal the operands of the matmuls."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.collection.limits import OVERHEAD
from megatron.fake_quant import dequantize, fake_quantize
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.fake_quant.matmul.products import multiply
from megatron.fake_quant.matmul.unrounded import unpacked_parts
from megatron.fake_quant.recipe.operands import GEMMS
from megatron.tensor_record import CODES, ON_REQUEST, TENSOR_NAMES
from tests.analysis.verification.verifying import count, verify
from tests.core.gpt_runs import collect, pick

RECIPE = """
configs:
  everywhere:
    linear: {format: "nvfp4:sr"}
    qk: mxfp4
    pv: hifp8:t15
matchers:
  all: {type: glob, pattern: "*", config: everywhere, enabled: true}
"""


def test_names_are_those_of_recipes():
    for operation, names in CODES.items():
        prefix = "" if operation == "linear" else f"{operation}_"
        slots = [(gemm, each) for gemm, pair in GEMMS[operation].items() for each in pair]
        assert [f"{prefix}{gemm}_{each}_codes" for gemm, each in slots] == list(names)
        assert len(names) == len(SLOTS)
    assert sum(len(names) for names in CODES.values()) == 18


@pytest.fixture(scope="module")
def rounded_to_nearest(tmp_path_factory):
    dump = tmp_path_factory.mktemp("nearest") / "dump"
    flags = {"collect_tensors": ["all", "codes", "attention_probs"]}
    options = ("--micro-batches", "2", "--dtype", "bf16")
    collect(dump, *options, flags=flags, CUSTOM_QUANT_TYPE="mxfp8")
    return TensorStore(dump)


def test_every_slot_of_every_matmul_is_there(rounded_to_nearest):
    records = rounded_to_nearest.records
    for layer_type, names in TENSOR_NAMES.items():
        found = records[records["layer_type"] == layer_type]
        assert set(found["tensor_name"]) == set(names) - {"attention_scores"}
    weights = rounded_to_nearest.select(tensor_name=["fprop_weight_codes", "dgrad_weight_codes"])
    assert set(weights["micro_batch"]) == {0}, "codes of weights are the same in all micro-batches"
    assert len(weights) == 2 * 4 * 2


#: tensor of each slot of a linear layer, and the axis of its tokens-by-features matrix
OPERANDS = {
    "fprop_input_codes": ("input", -1),
    "fprop_weight_codes": ("weight", -1),
    "dgrad_grad_output_codes": ("grad_output", -1),
    "dgrad_weight_codes": ("weight", 0),
    "wgrad_grad_output_codes": ("grad_output", 0),
    "wgrad_input_codes": ("input", 0),
}


def test_codes_stand_for_the_operand_as_the_matmul_had_it(rounded_to_nearest):
    store = rounded_to_nearest
    checked = 0
    for record in store.select(layer_type="linear", tensor_name=list(OPERANDS)).itertuples():
        name, axis = OPERANDS[record.tensor_name]
        (of_operand,) = store.select(
            module=record.module, micro_batch=record.micro_batch, tensor_name=name
        ).itertuples() or [None]
        operand = store.load(of_operand).flatten(0, -2)
        quantized = store.load_codes(record)
        assert quantized.codes.dtype == torch.uint8
        assert (quantized.shape, quantized.dtype) == (tuple(operand.shape), torch.bfloat16)
        assert torch.equal(dequantize(quantized), fake_quantize(operand, "mxfp8", axis=axis))
        checked += 1
    assert checked == 2 * 4 * (6 * 2 - 2), "two layers, four linears, two micro-batches"


def test_probabilities_and_their_codes(rounded_to_nearest):
    store = rounded_to_nearest
    for record in store.select(tensor_name="pv_fprop_probs_codes").itertuples():
        where = {"layer": record.layer_idx, "micro_batch": record.micro_batch}
        (of_probs,) = store.select(tensor_name="attention_probs", **where).itertuples()
        probs = store.load(of_probs).flatten(0, 1)
        assert torch.equal(dequantize(store.load_codes(record)), fake_quantize(probs, "mxfp8"))


def test_codes_are_refused_where_they_mean_nothing(rounded_to_nearest):
    store = rounded_to_nearest
    codes = next(store.select(tensor_name="fprop_input_codes").itertuples())
    with pytest.raises(ValueError, match=r"blocks of one rank.*load_codes"):
        store.load_global(codes.Index)
    with pytest.raises(ValueError, match=r"no codes.*load it with load"):
        store.load_codes(next(store.select(tensor_name="input").itertuples()))


def refused(*_):
    raise AssertionError("the operands of nvfp4 in bfloat16 have a scale")


def test_random_bits_are_those_of_the_matmul(tmp_path):
    """A linear layer's results follow bit for bit from the codes of its operands.

    The random bits of the rounding cannot be reproduced without the codes.
    """
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    dump = tmp_path / "dump"
    flags = {"collect_tensors": ["all", "codes"], "collect_layers": "1"}
    options = ("--micro-batches", "2", "--dtype", "bf16")
    records = collect(dump, *options, flags=flags, QUANT_RECIPE=str(recipe))
    store = TensorStore(dump)
    found = {"output": 0, "grad_input": 0, "grad_weight": 0}
    for module in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        for micro_batch in (0, 1):
            where = {"module": module, "micro_batch": micro_batch}
            operands = {
                record.tensor_name: unpacked_parts(store.load_codes(record), torch.bfloat16)
                for record in store.select(**where, tensor_name=list(OPERANDS)).itertuples()
            }
            assert set(operands) == set(OPERANDS), "rounded anew in every micro-batch"
            factors = {
                "output": (operands["fprop_input_codes"], operands["fprop_weight_codes"].t()),
                "grad_input": (operands["dgrad_grad_output_codes"], operands["dgrad_weight_codes"]),
                "grad_weight": (
                    operands["wgrad_grad_output_codes"].t(),
                    operands["wgrad_input_codes"],
                ),
            }
            for name, (left, right) in factors.items():
                (record,) = store.select(**where, tensor_name=name).itertuples()
                result = store.load(record).flatten(0, -2)
                assert torch.equal(result, multiply(left, right, 1.0, refused))
                exact = left.dense().double() @ right.dense().double()
                assert (result == exact.bfloat16()).double().mean() > 0.98
                found[name] += 1
    assert found == dict.fromkeys(found, 8)
    verdict = verify(dump, exact=True)
    assert verdict.errors == []
    assert count(verdict.checked, "results of linear layers, bit for bit") == 3 * 8
    for record in pick(records, tensor_name="fprop_input_codes"):
        content = torch.load(dump / record["file"], weights_only=True)
        assert set(content["scales"]) == {"blocks", "tensor"}, "nvfp4 has both"
        of_values = content["tensor"].nbytes + content["scales"]["blocks"].nbytes + 4
        assert of_values < record["bytes"] <= of_values + OVERHEAD
        assert content["tensor"].nbytes == 64 * 64 // 2 or record["module"].endswith("fc2")


REQUANTIZED = """
configs:
  everywhere:
    linear:
      fprop: {input: "nvfp4:sr", weight: nvfp4, hadamard: {size: 16, signs: random}}
      dgrad:
        grad_output: {format: mxfp8, split: mean}
        weight: {format: mxfp8, source: dequantized}
      wgrad:
        hadamard: {size: 16, signs: random}
        grad_output: {format: "mxfp4:sr", split: mean}
        input: {format: nvfp4, source: dequantized, split: mean}
matchers:
  all: {type: glob, pattern: "*", config: everywhere, enabled: true}
"""


@pytest.mark.parametrize("how", [(), ("--recompute",)])
def test_verify_recomputes_forward_copies_random_signs_and_means(tmp_path, how):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(REQUANTIZED)
    dump = tmp_path / "dump"
    flags = {"collect_tensors": ["all", "codes"], "collect_layers": "1"}
    options = ("--micro-batches", "2", "--dtype", "bf16", *how)
    records = collect(dump, *options, flags=flags, QUANT_RECIPE=str(recipe))
    verdict = verify(dump, exact=True)
    assert verdict.errors == []
    assert count(verdict.checked, "results of linear layers, bit for bit") == 3 * 8
    (x, *_), (weight, *_) = (pick(records, tensor_name=name) for name in ("input", "weight"))
    assert x["format"] == "nvfp4:sr+H16:random | nvfp4+mean+H16:random+dequantized"
    assert weight["format"] == "nvfp4+H16:random | mxfp8+dequantized"
    formats = [record["format"] for record in pick(records, tensor_name="fprop_weight_codes")]
    assert len(set(formats)) == len(formats) == 8, "each micro-batch has its own signs"
    assert all(re.fullmatch(r"nvfp4\+H16:\d+", name) for name in formats)
    assert len(pick(records, tensor_name="dgrad_weight_codes")) == 8


def test_verify_misses_nothing_and_finds_codes_of_another_tensor(rounded_to_nearest, tmp_path):
    (card,) = rounded_to_nearest.folder.glob("run_*.json")
    assert set(ON_REQUEST) - {"attention_scores"} <= set(
        json.loads(card.read_text())["selection"]["tensors"]
    )
    found = verify(rounded_to_nearest.folder, exact=True)
    assert found.errors == []
    assert count(found.checked, "results of linear layers, bit for bit") == 2 * 4 * 3 * 2
    shutil.copytree(rounded_to_nearest.folder, tmp_path / "copy")
    record = rounded_to_nearest.select(tensor_name="fprop_input_codes").iloc[0]
    path = tmp_path / "copy" / Path(record["path"]).name
    content = torch.load(path, weights_only=True)
    content["tensor"][0, 0] ^= 1
    torch.save(content, path)
    (error,) = verify(tmp_path / "copy").errors
    assert "codes of an operand are not those of the saved tensor" in str(error)
