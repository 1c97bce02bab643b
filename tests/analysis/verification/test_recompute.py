"""Test the parts of the verification: formats from a dump, and deviations by rounding."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron.analysis.verification.recompute_attention import AttentionFormats, attention
from megatron.analysis.verification.recompute_linear import linear
from megatron.analysis.verification.recorded_formats import (
    NotCheckedError,
    Softmax,
    of_card,
    of_records,
    parse_operand,
    softmax_of_card,
)
from megatron.fake_quant import get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.tiles.tiling import Tiling

MXFP8, MXFP4, NVFP4 = (Operand(get_format(name)) for name in ("mxfp8", "mxfp4", "nvfp4"))
ROTATED = Operand(get_format("nvfp4"), Hadamard(16, "nvfp4"))
IN_TILES = GemmFormats(
    MXFP8, MXFP8, unnormalized=True, tiling=Tiling(64, "reverse", 256.0, "quantized")
)
CHOICES = {
    "uniform": GemmFormats.uniform(get_format("mxfp8")),
    "high precision": GemmFormats(),
    "mixed": GemmFormats(MXFP8, MXFP4, MXFP8, MXFP8, NVFP4, MXFP8),
    "one operand": GemmFormats(fprop_a=MXFP8),
    "straight-through": GemmFormats(MXFP8, MXFP4, straight_through=True),
    "rotated wgrad": GemmFormats(NVFP4, NVFP4, NVFP4, NVFP4, ROTATED, ROTATED),
    "rotated straight-through": GemmFormats(ROTATED, ROTATED, straight_through=True),
    "requantized": GemmFormats(
        NVFP4,
        MXFP4,
        MXFP8,
        Operand(get_format("mxfp8"), source="dequantized"),
        Operand(None, Hadamard(16, "nvfp4")),
        Operand(get_format("mxfp4"), Hadamard(16, "nvfp4"), source="dequantized"),
    ),
    "requantized after a rotated forward pass": GemmFormats(
        ROTATED, ROTATED, dgrad_b=Operand(None, source="dequantized")
    ),
    "mean split": GemmFormats(
        replace(MXFP4, split="mean"),
        MXFP4,
        replace(MXFP8, split="mean"),
        Operand(),
        replace(ROTATED, split="mean"),
        replace(ROTATED, split="mean"),
    ),
    "mean split, straight-through": GemmFormats(
        replace(ROTATED, split="mean"), ROTATED, straight_through=True
    ),
    "scales of several kinds": GemmFormats(
        *(Operand(get_format(name)) for name in ("fp8_e4m3", "fp8_rowwise", "fp8_block")),
        Operand(get_format("fp8_e5m2"), source="dequantized"),
        NVFP4,
        Operand(source="dequantized"),
    ),
    "spelled out": GemmFormats.uniform(get_format("mx:e3m4:b16:rceil")),
}


def tensors_of(formats, dtype=torch.bfloat16):
    """Return a linear layer's six tensors, computed by the layer's own function."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((48, 32), (64, 32), (48, 64))
    x, w, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    x.requires_grad_()
    w.requires_grad_()
    y = quantized_matmul(x, w, formats)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    found = {"input": x, "weight": w, "output": y, "grad_output": dy}
    found |= {"grad_input": dx, "grad_weight": dw}
    return {name: tensor.detach() for name, tensor in found.items()}


def recorded(formats):
    """Return the formats of input, weight and output gradient, as the layer records them."""
    pairs = (("fprop_a", "wgrad_a"), ("fprop_b", "dgrad_b"), ("dgrad_c", "wgrad_c"))
    named = ([str(formats.effective(slot)) for slot in pair] for pair in pairs)
    return [" | ".join(dict.fromkeys(names)) for names in named]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_layers_results_follow_under_a_reading_of_its_records(name, dtype):
    formats = CHOICES[name]
    readings = of_records(*recorded(formats))
    assert formats in readings
    outcomes = dict(linear(tensors_of(formats, dtype), formats, 1.0))
    assert outcomes.keys() == {"output", "grad_input", "grad_weight"}
    assert not any(outcome.wrong for outcome in outcomes.values())


def test_a_wrong_format_is_no_reading_that_fits():
    tensors = tensors_of(CHOICES["uniform"])
    for other in ("mixed", "high precision", "straight-through", "rotated wgrad"):
        outcomes = dict(linear(tensors, CHOICES[other], 1.0))
        assert any(outcome.wrong for outcome in outcomes.values()), other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["uniform", "rotated straight-through"])
def test_another_order_of_summation_is_allowed_and_little_more(dtype, name):
    """Products are summed in float32 from the last to the first, and rounded to the dtype once."""
    formats = CHOICES[name]
    tensors = tensors_of(formats, dtype)
    a, b = (
        op.quantized(tensors[t], axis=-1).scaled()
        for op, t in ((formats.fprop_a, "input"), (formats.fprop_b, "weight"))
    )
    total = torch.zeros(48, 64)
    for k in reversed(range(32)):
        total += a[:, k : k + 1].float() * b[:, k].float()
    backwards = total.to(dtype)
    outcome = dict(linear(tensors | {"output": backwards}, formats, 1.0))["output"]
    assert not outcome.wrong
    spoilt = tensors["output"].clone()
    spoilt[7, 9] = spoilt.abs().max() * 1.25
    outcome = dict(linear(tensors | {"output": spoilt}, formats, 1.0))["output"]
    assert outcome.wrong
    assert outcome.text.startswith("the value at [7, 9] is ")


def test_what_is_random_is_not_checked_and_the_rest_is():
    """Only the output gradient is rounded stochastically, so the output can be recomputed."""
    random = Operand(get_format("mxfp8:sr"))
    formats = GemmFormats(MXFP8, MXFP8, random, MXFP8, random, MXFP8)
    outcomes = dict(linear(tensors_of(formats), formats, 1.0))
    assert not outcomes["output"].wrong
    for name in ("grad_input", "grad_weight"):
        assert isinstance(outcomes[name], NotCheckedError)


def test_nan_and_overflow_follow_as_values_do():
    formats = CHOICES["high precision"]
    tensors = tensors_of(formats, torch.float16)
    tensors["input"][0, 0] = torch.nan
    tensors["input"][1] = 60000.0
    tensors["weight"][0] = 60000.0
    tensors["output"] = (tensors["input"].float() @ tensors["weight"].float().t()).half()
    assert not dict(linear(tensors, formats, 1.0))["output"].wrong
    tensors["output"][5, 5] = torch.nan
    assert dict(linear(tensors, formats, 1.0))["output"].wrong


def test_operands_that_do_not_fit_are_wrong():
    tensors = tensors_of(CHOICES["uniform"])
    tensors["weight"] = tensors["weight"][:, :16]
    assert "do not fit" in dict(linear(tensors, GemmFormats(), 1.0))["output"].text


def test_operands_as_records_name_them():
    assert parse_operand("none") == Operand()
    assert parse_operand("mxfp8:rceil") == Operand(get_format("mxfp8:rceil"))
    assert parse_operand("nvfp4+H16:nvfp4") == ROTATED
    assert parse_operand("none+H32:7") == Operand(None, Hadamard(32, 7))
    assert parse_operand("nvfp4+mean") == Operand(get_format("nvfp4"), split="mean")
    assert parse_operand("nvfp4+mean+H16:nvfp4") == replace(ROTATED, split="mean")
    assert parse_operand("nvfp4+dequantized") == Operand(get_format("nvfp4"), source="dequantized")
    assert parse_operand("nvfp4+H16:nvfp4+dequantized") == replace(ROTATED, source="dequantized")
    with pytest.raises(NotCheckedError, match=r"unknown format 'mxfp8.doubled'"):
        parse_operand("mxfp8+doubled")
    with pytest.raises(NotCheckedError, match="unknown format 'mxfp9'"):
        parse_operand("mxfp9")


def test_the_cards_audit_is_read_as_the_trainer_writes_it():
    from megatron.core.low_precision import matmul_audit

    modules = {name: f"decoder.layers.{{}}.mlp.{name.replace(' ', '_')}" for name in CHOICES}
    found = [
        matmul_audit._matmul(
            pattern.format(layer), "linear", 1.0, CHOICES[name], "recipe r.yaml, (x)"
        )
        for name, pattern in modules.items()
        for layer in (0, 1, 5)
    ]
    unnormalized = GemmFormats(MXFP8, MXFP8, unnormalized=True)
    found.append(
        matmul_audit._matmul("decoder.layers.0.core", "pv", 1.0, unnormalized, "somewhere")
    )
    found.append(matmul_audit._matmul("decoder.layers.1.core", "pv", 1.0, IN_TILES, "somewhere"))
    old = {"iteration": 1, "matmuls": ["decoder.layers.0-9.mlp.uniform  linear  mxfp4  recipe"]}
    card = {"quantization": [old, {"iteration": 3, "matmuls": matmul_audit.table(found)}]}
    for name, pattern in modules.items():
        assert of_card(card, pattern.format(5), "linear", 4) == CHOICES[name]
        assert of_card(card, pattern.format(2), "linear", 4) is None
    assert of_card(card, "decoder.layers.0.core", "pv", 3) == unnormalized
    assert of_card(card, "decoder.layers.1.core", "pv", 3) == IN_TILES
    assert of_card(card, "decoder.layers.7.mlp.uniform", "linear", 2) == GemmFormats.uniform(
        get_format("mxfp4")
    )
    assert of_card({"quantization": None}, "x", "linear", 1) is None
    assert len(SLOTS) == 6


CARD = {"iteration": 3}


def test_the_cards_audit_is_read_as_programs_are_to_read_it():
    """The field `operands` is read, even if the text in `matmuls` differs from it."""
    from megatron.core.low_precision import matmul_audit

    softmax = matmul_audit.Softmax(0.25, None, (7, 0), 0.0, "vanilla", in_fp32=True)
    found = [
        matmul_audit._matmul(
            f"decoder.layers.{layer}.mlp.{number}", "linear", 1.0, formats, "recipe"
        )
        for number, formats in enumerate(CHOICES.values())
        for layer in (0, 1, 5)
    ]
    core = "decoder.layers.{}.core"
    unnormalized = GemmFormats(MXFP8, MXFP8, unnormalized=True)
    for layer in (0, 1):
        name = core.format(layer)
        found.append(matmul_audit._matmul(name, "qk", 1.0, CHOICES["mixed"], "recipe", softmax))
        found.append(matmul_audit._matmul(name, "pv", 1.0, unnormalized, "recipe"))
    found.append(matmul_audit._matmul(core.format(2), "pv", 1.0, IN_TILES, "recipe"))
    told = json.loads(json.dumps(matmul_audit.for_card(found)))
    assert len(told) == len(CHOICES) + 3, "equal layers share one entry"
    card = {"quantization": [CARD | {"matmuls": ["x  linear  mxfp4  y"], "operands": told}]}
    for number, formats in enumerate(CHOICES.values()):
        for layer, expected in ((0, formats), (5, formats), (2, None)):
            module = f"decoder.layers.{layer}.mlp.{number}"
            assert of_card(card, module, "linear", 4) == expected
            assert of_card(card, module, "linear", 2) is None, "before the audit"
    assert of_card(card, "x", "linear", 4) is None
    assert of_card(card, core.format(1), "qk", 3) == CHOICES["mixed"]
    assert of_card(card, core.format(1), "pv", 3) == unnormalized
    assert of_card(card, core.format(2), "pv", 3) == IN_TILES
    assert softmax_of_card(card, core.format(1), 3) == Softmax(0.25, None, (7, 0), in_fp32=True)
    assert softmax_of_card(card, core.format(7), 3) is None
    through = next(each for each in told if "straight-through" in each["marks"])
    assert through["slots"]["wgrad_a"] == through["slots"]["fprop_a"] != "none"
    assert through["slots"]["wgrad_c"] == "none"


@pytest.mark.parametrize(
    ("arguments", "layer", "expected"),
    [
        ({"num_layers": 2}, 0, Softmax()),
        ({"window_size": (5, 0), "window_attn_skip_freq": 2}, 0, Softmax(window=(5, 0))),
        ({"window_size": (5, 0), "window_attn_skip_freq": 2}, 1, Softmax()),
        ({"window_size": [5, 1], "window_attn_skip_freq": [0, 1]}, 0, Softmax()),
        ({"window_size": [5, 1], "window_attn_skip_freq": [0, 1]}, 1, Softmax(window=(5, 1))),
        ({"softmax_scale": 0.5}, 0, Softmax(scale=0.5)),
        (
            {"apply_query_key_layer_scaling": True, "kv_channels": 16},
            3,
            Softmax(scale=1 / 16, coefficient=4),
        ),
    ],
)
def test_the_arguments_of_an_older_card_tell_of_the_softmax(arguments, layer, expected):
    module = f"decoder.layers.{layer}.self_attention.core_attention"
    assert softmax_of_card({"arguments": arguments}, module, 1) == expected


PLAIN = Softmax()
SHAPES = {
    "plain": (PLAIN, 16),
    "window": (Softmax(window=(2, 0)), 16),
    "two-sided window": (Softmax(window=(1, 3)), 16),
    "scaled, with smaller values": (Softmax(scale=0.3), 8),
    "scaled twice": (Softmax(scale=0.1, coefficient=3.0), 24),
}


def attention_tensors(dtype=torch.float32, softmax=PLAIN, values=16):
    """Compute attention in float64 by its definition, [s, b, heads, d], two heads per group."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 16), (1, 16), (1, values))
    q, k, v = (torch.randn(8, 1, *shape, generator=generator).to(dtype) for shape in shapes)
    dout = torch.randn(8, 1, 2 * values, generator=generator).to(dtype)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scale = (softmax.scale or 1 / 4) * (softmax.coefficient or 1)
    scores = torch.einsum("sbad,tbgd->bast", wide[0], wide[1]) * scale
    before, after = softmax.window or (8, 0)
    seen = torch.tensor([[i - before <= j <= i + after for j in range(8)] for i in range(8)])
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("bast,tbgd->sbad", probs, wide[2]).flatten(2)
    grads = torch.autograd.grad(out, wide, dout.double())
    results = {"output": out.detach(), "grad_query": grads[0], "grad_key": grads[1]}
    results |= {"grad_value": grads[2], "attention_probs": probs.detach()}
    results |= {"attention_scores": scores.detach() / (softmax.coefficient or 1)}
    found = {"query": q, "key": k, "value": v, "grad_output": dout}
    return found | {name: x.to(dtype) for name, x in results.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_by_its_definition_is_within_what_rounding_allows(dtype, shape):
    softmax, values = SHAPES[shape]
    tensors = attention_tensors(dtype, softmax, values)
    formats = AttentionFormats(None, None, softmax)
    outcomes = {name: o for _, name, o in attention([tensors], formats, 1.0)}
    assert outcomes.keys() == set(tensors) - {"query", "key", "value", "grad_output"}
    assert not any(outcome.wrong for outcome in outcomes.values()), outcomes
    for other in SHAPES.keys() - {shape}:
        formats = AttentionFormats(None, None, SHAPES[other][0])
        assert any(o.wrong for *_, o in attention([tensors], formats, 1.0)), other
    for name in ("output", "attention_probs", "grad_key"):
        wrong = tensors[name].clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[int(wrong.abs().argmax())] *= 1.25
        spoilt = tensors | {name: wrong}
        found = {
            n: o.wrong
            for _, n, o in attention([spoilt], AttentionFormats(None, None, softmax), 1.0)
        }
        assert [n for n, wrong in found.items() if wrong] == [name]
    assert "its worst value is off by" in outcomes["output"].text


def test_unnormalized_probabilities_are_those_of_another_order_of_division():
    """Without a format, dividing before or after PV is the same, up to a few roundings."""
    formats = AttentionFormats(None, GemmFormats(unnormalized=True))
    outcomes = {name: o for _, name, o in attention([attention_tensors()], formats, 1.0)}
    assert not any(outcome.wrong for outcome in outcomes.values())
    formats = AttentionFormats(None, GemmFormats(MXFP8, MXFP8, unnormalized=True))
    outcomes = {name: o for _, name, o in attention([attention_tensors()], formats, 1.0)}
    assert outcomes["output"].wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_tiles_is_recomputed_in_tiles(dtype, shape):
    softmax, values = SHAPES[shape]
    tensors = attention_tensors(dtype, softmax, values)
    pv = GemmFormats(unnormalized=True, tiling=Tiling(3, "reverse"))
    formats = AttentionFormats(None, pv, softmax)
    outcomes = {name: o for _, name, o in attention([tensors], formats, 1.0)}
    assert outcomes.keys() == set(tensors) - {"query", "key", "value", "grad_output"}
    assert not any(outcome.wrong for outcome in outcomes.values()), outcomes
    for name in ("output", "attention_probs", "grad_key"):
        wrong = tensors[name].clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[int(wrong.abs().argmax())] *= 1.25
        spoilt = attention([tensors | {name: wrong}], formats, 1.0)
        assert [n for _, n, outcome in spoilt if outcome.wrong] == [name]


def test_where_some_values_are_not_finite_the_others_are_compared():
    """A NaN in a key reaches the queries after it; results of the other queries are compared."""
    tensors = attention_tensors()
    tensors["key"][5] = torch.nan
    outputs = tensors["output"].clone()
    outputs[5:] = torch.nan
    formats = AttentionFormats(None, None)

    def outcome(output):
        return next(
            o
            for _, n, o in attention([tensors | {"output": output}], formats, 1.0)
            if n == "output"
        )

    assert not outcome(outputs).wrong
    assert "NaN or Inf differ from the recomputation" in outcome(outputs.nan_to_num(nan=1.0)).text
    outputs[0, 0, 0] += 1
    assert outcome(outputs).wrong
