"""Recipes: the format of each operand, and the messages for invalid recipes."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron.fake_quant import Hadamard, get_format
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.policy import OperationPolicy, resolve
from megatron.fake_quant.recipe import load_recipe
from megatron.fake_quant.tiles.tiling import Tiling

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))
MATCHER = "matchers:\n  all: {config: %s, type: glob, pattern: '*', enabled: true}\n"


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_recipe(path)

    return load


def in_force(recipe, operation="linear", module="decoder.layers.1.mlp.linear_fc1", layer=1, at=1):
    return OperationPolicy(operation, None, "test", recipe.rules_for(module, layer, 4)).at(at)


def names(formats):
    return {slot: str(getattr(formats, slot)) for slot in SLOTS}


# What is in force.


def test_a_format_for_all_operands(load):
    recipe = load("configs:\n  c:\n    linear: mxfp4\n" + MATCHER % "c")
    assert in_force(recipe) == GemmFormats.uniform(get_format("mxfp4"))
    assert in_force(recipe, "qk") is None


SLOT_NAMES = {
    "linear": {
        "fprop_a": ("fprop", "input"),
        "fprop_b": ("fprop", "weight"),
        "dgrad_c": ("dgrad", "grad_output"),
        "dgrad_b": ("dgrad", "weight"),
        "wgrad_c": ("wgrad", "grad_output"),
        "wgrad_a": ("wgrad", "input"),
    },
    "qk": {
        "fprop_a": ("fprop", "query"),
        "fprop_b": ("fprop", "key"),
        "dgrad_c": ("grad_query", "grad_scores"),
        "dgrad_b": ("grad_query", "key"),
        "wgrad_c": ("grad_key", "grad_scores"),
        "wgrad_a": ("grad_key", "query"),
    },
    "pv": {
        "fprop_a": ("fprop", "probs"),
        "fprop_b": ("fprop", "value"),
        "dgrad_c": ("grad_probs", "grad_output"),
        "dgrad_b": ("grad_probs", "value"),
        "wgrad_c": ("grad_value", "grad_output"),
        "wgrad_a": ("grad_value", "probs"),
    },
}
EIGHTEEN = [(op, slot) for op, slots in SLOT_NAMES.items() for slot in slots]


@pytest.mark.parametrize(("operation", "slot"), EIGHTEEN)
def test_each_of_the_eighteen_slots_has_a_name_of_its_own(load, operation, slot):
    gemm, operand = SLOT_NAMES[operation][slot]
    text = f"configs:\n  c:\n    {operation}:\n      {gemm}: {{{operand}: hifp8}}\n"
    found = names(in_force(load(text + MATCHER % "c"), operation))
    assert found == {each: "hifp8" if each == slot else "none" for each in SLOTS}


def test_defaults_go_from_the_operation_to_the_gemm_to_the_operand(load):
    recipe = load(
        "configs:\n  c:\n    linear:\n      format: mxfp8\n      backward: mxfp4\n"
        "      wgrad: {format: mxfp6_e2m3, input: none}\n" + MATCHER % "c"
    )
    assert names(in_force(recipe)) == {
        "fprop_a": "mxfp8",
        "fprop_b": "mxfp8",
        "dgrad_c": "mxfp4",
        "dgrad_b": "mxfp4",
        "wgrad_c": "mxfp6_e2m3",
        "wgrad_a": "none",
    }


def test_a_bf16_backward_pass_is_straight_through(load):
    recipe = load("configs:\n  c:\n    pv: {format: mxfp4, backward: bf16}\n" + MATCHER % "c")
    assert in_force(recipe, "pv") == GemmFormats(
        fprop_a=Operand(get_format("mxfp4")),
        fprop_b=Operand(get_format("mxfp4")),
        straight_through=True,
    )


def test_transforms_are_of_both_operands(load):
    recipe = load(
        "configs:\n  c:\n    linear:\n      wgrad: {hadamard: {size: 16, signs: nvfp4}}\n"
        "      dgrad: {format: mxfp4, hadamard: 32}\n" + MATCHER % "c"
    )
    formats = in_force(recipe)
    assert formats.wgrad_c == formats.wgrad_a == Operand(None, Hadamard(16, "nvfp4"))
    assert formats.dgrad_c == formats.dgrad_b == Operand(get_format("mxfp4"), Hadamard(32))
    assert not formats.random


def test_signs_can_be_drawn_for_each_call(load):
    text = "configs:\n  c:\n    linear: {wgrad: {hadamard: {size: 16, signs: random}}}\n"
    formats = in_force(load(text + MATCHER % "c"))
    assert formats.wgrad_c == formats.wgrad_a == Operand(None, Hadamard(16, "random"))
    assert formats.random


def test_an_operand_can_come_from_the_dequantized_forward_copy(load):
    text = (
        "configs:\n  c:\n    linear:\n      fprop: nvfp4\n"
        "      dgrad: {weight: {format: mxfp8, source: dequantized}}\n"
        "      wgrad: {format: 'mxfp4:sr', hadamard: 16, input: {source: dequantized}}\n"
    )
    assert names(in_force(load(text + MATCHER % "c"))) == {
        "fprop_a": "nvfp4",
        "fprop_b": "nvfp4",
        "dgrad_c": "none",
        "dgrad_b": "mxfp8+dequantized",
        "wgrad_c": "mxfp4:sr+H16:none",
        "wgrad_a": "mxfp4:sr+H16:none+dequantized",
    }


def test_the_mean_over_tokens_can_be_split_off(load):
    text = (
        "configs:\n  c:\n    linear:\n      format: mxfp4\n"
        "      fprop: {input: {split: mean}}\n"
        "      dgrad: {grad_output: {format: 'mxfp4:sr', split: mean}}\n"
    )
    assert names(in_force(load(text + MATCHER % "c"))) == {
        "fprop_a": "mxfp4+mean",
        "fprop_b": "mxfp4",
        "dgrad_c": "mxfp4:sr+mean",
        "dgrad_b": "mxfp4",
        "wgrad_c": "mxfp4",
        "wgrad_a": "mxfp4",
    }


def test_probabilities_can_be_unnormalized(load):
    text = "configs:\n  c:\n    pv: {format: mxfp8, probabilities: %s}\n" + MATCHER % "c"
    assert in_force(load(text % "unnormalized"), "pv").unnormalized
    assert not in_force(load(text % "normalized"), "pv").unnormalized


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("tile: 64", Tiling(64)),
        ("order: reverse", Tiling(128, "reverse")),
        ("scale: 256", Tiling(scale=256.0)),
        ("row_sum: quantized", Tiling(row_sum="quantized")),
        (
            "order: reverse, tile: 32, scale: 0.5, row_sum: exact",
            Tiling(32, "reverse", 0.5),
        ),
    ],
)
def test_attention_can_run_in_tiles(load, keys, expected):
    text = "configs:\n  c:\n    pv: {format: mxfp8, %s}\n" + MATCHER % "c"
    formats = in_force(load(text % keys), "pv")
    assert formats.tiling == expected
    assert formats.unnormalized, "as in kernels"
    assert replace(formats, tiling=None, unnormalized=False) == GemmFormats.uniform(
        get_format("mxfp8")
    )


def test_tiles_need_no_format_and_take_normalized_probabilities(load):
    text = "configs:\n  c:\n    pv: {%s}\n" + MATCHER % "c"
    formats = in_force(load(text % "tile: 48, probabilities: normalized"), "pv")
    assert formats == GemmFormats(tiling=Tiling(48))
    assert in_force(load(text % "tile: 48"), "pv").unnormalized


def test_the_first_matcher_that_fits_counts_and_a_type_will_do_for_a_config(load):
    recipe = load(
        "matchers:\n"
        "  head: {config: bf16, type: glob, pattern: 'output_layer', enabled: true}\n"
        "  off: {config: mxfp4, type: glob, pattern: '*', enabled: false}\n"
        "  fc1: {config: 'linear_mxfp8:rceil', type: glob, pattern: '*fc1', enabled: true}\n"
        "  rest: {config: hifp8, type: glob, pattern: '*', enabled: true}\n"
    )
    assert in_force(recipe, module="output_layer", layer=-1) is None
    assert names(in_force(recipe))["wgrad_a"] == "mxfp8:rceil"
    assert in_force(recipe, "qk") is None  # linear_ affects only linear layers
    other = "decoder.layers.1.mlp.linear_fc2"
    assert names(in_force(recipe, module=other))["fprop_a"] == "hifp8"


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("first 2", [0, 1]),
        ("last 1", [3]),
        ("0-1,3", [0, 1, 3]),
        ("2", [2]),
        ("first 9", [0, 1, 2, 3]),
    ],
)
def test_layers_are_chosen_by_number_or_from_either_end(load, layers, chosen):
    recipe = load(
        "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*', enabled: true, "
        f"layers: '{layers}'}}\n"
    )
    assert [n for n in range(4) if in_force(recipe, layer=n) is not None] == chosen
    assert in_force(recipe, layer=-1) is None  # outside of the layers


def test_last_layers_are_not_those_of_multi_token_prediction(load):
    """Layers of multi-token prediction have the numbers after the last layer."""
    text = "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*', enabled: true, layers: %s}\n"
    for layers in ("last 1", "first 9"):
        assert in_force(load(text % layers), layer=4) is None
    assert in_force(load(text % "'4'"), layer=4) is not None


def test_rules_whose_iterations_are_all_taken_do_not_count(load):
    recipe = load(
        "matchers:\n"
        "  a: {config: mxfp8, type: glob, pattern: '*', enabled: true, iterations: 1-10}\n"
        "  b: {config: hifp8, type: glob, pattern: '*', enabled: true, iterations: 5-8}\n"
        "  c: {config: mxfp4, type: glob, pattern: '*', enabled: true, iterations: 8-20}\n"
        "  d: {config: bf16, type: glob, pattern: '*', enabled: true, iterations: 11-}\n"
        "  e: {config: nvfp4, type: glob, pattern: '*', enabled: true}\n"
    )
    counting = recipe.rules_for("decoder.layers.0.mlp.linear_fc1", 0, 4)
    assert [rule.name for rule in counting] == ["a", "c", "d"]
    assert recipe.changes() == [5, 8, 9, 11, 21]
    found = {at: in_force(recipe, at=at) for at in (10, 11, 20, 21)}
    short = {at: None if f is None else str(f.fprop_a) for at, f in found.items()}
    assert short == {10: "mxfp8", 11: "mxfp4", 20: "mxfp4", 21: None}


def test_operands_without_a_format_are_high_precision(load):
    recipe = load("configs:\n  c: {linear: {format: bf16, backward: none}}\n" + MATCHER % "c")
    assert in_force(recipe) is None


@pytest.mark.parametrize(
    ("text", "interval"), [("5", (5, 5)), ("1-100", (1, 100)), ("101-", (101, math.inf))]
)
def test_a_number_or_a_range_of_iterations(load, text, interval):
    recipe = load(
        "matchers:\n"
        f"  a: {{config: mxfp8, type: glob, pattern: '*', enabled: true, iterations: {text}}}\n"
    )
    assert recipe.rules[0].iterations == interval


def test_a_list_of_iterations_is_refused(load):
    with pytest.raises(ValueError, match=r"1,3-5; .* a matcher for each further one"):
        load(
            "matchers:\n"
            "  a: {config: mxfp8, type: glob, pattern: '*', enabled: true, iterations: '1,3-5'}\n"
        )


def test_a_schedule_over_iterations(load):
    recipe = load(
        "matchers:\n"
        "  warm: {config: bf16, type: glob, pattern: '*', enabled: true, iterations: 1-10}\n"
        "  cool: {config: hifp8, type: glob, pattern: '*', enabled: true, iterations: 91-}\n"
        "  rest: {config: mxfp4, type: glob, pattern: '*', enabled: true}\n"
    )
    found = {at: in_force(recipe, at=at) for at in (1, 10, 11, 90, 91, 10**9)}
    short = {at: None if f is None else str(f.fprop_a) for at, f in found.items()}
    assert short == {1: None, 10: None, 11: "mxfp4", 90: "mxfp4", 91: "hifp8", 10**9: "hifp8"}


# Precedence.


def test_a_recipe_beats_the_environment_and_a_flag_beats_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MATCHER % "mxfp4")
    policy = resolve({"recipe": str(path), "qk": "hifp8"}, {"CUSTOM_QUANT_TYPE": "mxfp8"})
    assert policy.quant_type == "recipe_mine_qk-hifp8"
    plans = {op: policy.plan(op, "decoder.layers.0.x", 0, 2) for op in ("linear", "qk", "pv")}
    assert {op: str(plan.at(1).fprop_a) for op, plan in plans.items()} == {
        "linear": "mxfp4",
        "qk": "hifp8",
        "pv": "mxfp4",
    }
    assert plans["linear"].source_at(1) == "recipe mine.yaml, matcher 'all' (line 2)"
    assert plans["qk"].source_at(1) == "flag --qk-quant"
    by_environment = resolve({}, {"QUANT_RECIPE": str(path)})
    assert by_environment.quant_type == "recipe_mine"
    by_flag = resolve({"custom_quant_type": "hifp8"}, {"QUANT_RECIPE": str(path)})
    assert by_flag.quant_type == "hifp8"


@pytest.mark.parametrize(
    "flags", [{"custom_quant_type": "mxfp8"}, {"linear": "mxfp8", "qk": "mxfp8", "pv": "bf16"}]
)
def test_a_recipe_that_flags_would_overrule_everywhere_is_refused(tmp_path, flags):
    path = tmp_path / "mine.yaml"
    path.write_text(MATCHER % "mxfp4")
    with pytest.raises(ValueError, match="would be overruled by flags in every layer"):
        resolve({"recipe": str(path), **flags}, {})


def test_the_lm_head_needs_a_recipe():
    policy = resolve({"custom_quant_type": "mxfp8"}, {})
    assert not policy.plan("linear", "output_layer", -1, 2, is_lm_head=True).of_all_times()


# Errors, each with the line number.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config:\n  a: 1\n", "line 1: recipe has the key 'config'; it takes configs, matchers"),
        ("- 1\n", "line 1: it takes configs: and matchers:"),
        ("a: [\n", "it is not YAML"),
        ("matchers:\n  m: 1\n", "line 2: matcher 'm' is 1; it takes config, type, pattern"),
        ("matchers:\n  m: {}\n  m: {}\n", "line 3: the key 'm' occurs twice"),
        (
            "matchers:\n  m: {config: mxfp8, type: glob, patern: '*', enabled: true}\n",
            "line 2: matcher 'm' has the key 'patern'; it takes config, type, pattern, enabled",
        ),
        (
            "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*'}\n",
            "line 2: matcher 'm' has no enabled; add it",
        ),
        (
            "matchers:\n  m: {config: mxfp8, type: regex, pattern: '*', enabled: true}\n",
            "line 2: matcher 'm' has type 'regex'; the only accepted type is glob",
        ),
        (
            MATCHER % "mxfp5",
            r"line 2: matcher 'all' names the config 'mxfp5'; the configs are none",
        ),
        (
            "configs:\n  c:\n    linaer: mxfp8\n" + MATCHER % "c",
            "line 3: config 'c' has the key 'linaer'; it takes linear, qk, pv",
        ),
        (
            "configs:\n  c:\n    linear: mxfp9\n" + MATCHER % "c",
            "line 3: linear of config 'c': unknown format 'mxfp9', did you mean mxfp",
        ),
        (
            "configs:\n  c:\n    linear:\n      fprop: {inptu: mxfp8}\n" + MATCHER % "c",
            "line 4: fprop of linear of config 'c' has no operand 'inptu', did you mean input?",
        ),
        (
            "configs:\n  c:\n    qk:\n      dgrad: mxfp8\n" + MATCHER % "c",
            "line 4: qk of config 'c' has the key 'dgrad'; it takes .*grad_query, grad_key",
        ),
        (
            "configs:\n  c:\n    linear: {format: mxfp8, backward: bf16, wgrad: mxfp4}\n"
            + MATCHER % "c",
            "line 3: linear of config 'c': the backward pass is straight-through and some",
        ),
        (
            "configs:\n  c:\n    linear:\n      wgrad: {hadamard: 24}\n" + MATCHER % "c",
            "line 4: hadamard of wgrad .* size 24; choose a power of two",
        ),
        (
            "configs:\n  c:\n    linear:\n      wgrad: {hadamard: {sise: 16}}\n" + MATCHER % "c",
            "line 4: hadamard of wgrad of linear of config 'c' has the key 'sise'",
        ),
        (
            "configs:\n  c:\n    linear:\n      format: mxfp8\n"
            "      dgrad: {grad_output: {source: dequantized}}\n" + MATCHER % "c",
            "line 3: linear of config 'c': grad_output of dgrad has the source dequantized, but ",
        ),
        (
            "configs:\n  c:\n    linear: {wgrad: {input: {source: dequantized}}}\n" + MATCHER % "c",
            "line 3: linear of config 'c': input of wgrad has the source dequantized, but the "
            "forward pass does not quantize this operand; give input of fprop a format",
        ),
        (
            "configs:\n  c:\n    linear: {wgrad: {input: {source: copy}}}\n" + MATCHER % "c",
            "source of input of wgrad of linear of config 'c' is 'copy'; choose original or deq",
        ),
        (
            "configs:\n  c:\n    linear: {wgrad: {input: {from: copy}}}\n" + MATCHER % "c",
            "input of wgrad of linear of config 'c' has the key 'from'; it takes format, source",
        ),
        (
            "configs:\n  c:\n    linear: {wgrad: {input: {}}}\n" + MATCHER % "c",
            "input of wgrad of linear of config 'c' is empty; give a format, or a mapping",
        ),
        (
            "configs:\n  c:\n    linear: {fprop: {weight: {format: mxfp4, split: mean}}}\n"
            + MATCHER % "c",
            "line 3: split of weight of fprop .* mean over tokens, and the rows of this operand "
            "are not tokens; remove the split",
        ),
        (
            "configs:\n  c:\n    linear: {fprop: {input: {split: mean}}}\n" + MATCHER % "c",
            "line 3: input of fprop .* the split mean of an operand is for quantizing the rest; "
            "give the operand a format",
        ),
        (
            "configs:\n  c:\n    pv: {probabilities: raw}\n" + MATCHER % "c",
            "line 3: probabilities of pv of config 'c' is 'raw'; choose normalized or unnorm",
        ),
        (
            "configs:\n  c:\n    pv: {probabilities: unnormalized}\n" + MATCHER % "c",
            "line 3: `probabilities: unnormalized` of pv of config 'c' needs a format for P",
        ),
        (
            "configs:\n  c:\n    pv: {format: mxfp8, tile: 64.5}\n" + MATCHER % "c",
            "line 3: pv of config 'c': a tile of 64.5 keys; give a number of keys, such as 128",
        ),
        (
            "configs:\n  c:\n    pv:\n      format: mxfp8\n      order: back\n" + MATCHER % "c",
            "line 5: pv of config 'c': the order of tiles 'back'; choose forward or reverse",
        ),
        (
            "configs:\n  c:\n    pv: {format: mxfp8, scale: -1}\n" + MATCHER % "c",
            "line 3: pv of config 'c': the scale of P -1 is out of range; choose a number",
        ),
        (
            "configs:\n  c:\n    pv: {format: mxfp8, row_sum: both}\n" + MATCHER % "c",
            "line 3: pv of config 'c': the row_sum of tiles 'both'; choose exact or quantized",
        ),
        (
            "configs:\n  c:\n    pv: {scale: 256}\n" + MATCHER % "c",
            "line 3: pv of config 'c': the scale 256 of .* give probs of fprop a format",
        ),
        (
            "configs:\n  c:\n    pv: {format: mxfp8, probabilities: normalized, scale: 256}\n"
            + MATCHER % "c",
            "line 3: pv of config 'c': the scale 256 of probabilities in tiles: for unnorm",
        ),
        (
            "configs:\n  c:\n    pv: {format: mxfp8, tile: 48}\n" + MATCHER % "c",
            "line 3: pv of config 'c': probs of fprop has blocks of 32 values of mxfp8 along the "
            "keys, which tiles of 48 keys cut; choose a multiple of 32 keys",
        ),
        (
            "configs:\n  c:\n    qk: mxfp8\n    pv: {tile: 16}\n" + MATCHER % "c",
            "line 3: qk of config 'c': grad_scores of grad_query has blocks of 32 values",
        ),
        (
            "configs:\n  c:\n    qk: {format: mxfp8, tile: 32}\n" + MATCHER % "c",
            "line 3: qk of config 'c' has the key 'tile'; it takes format, backward, fprop",
        ),
        # An empty value does not mean bf16.
        ("description: x\n", "line 1: recipe has no enabled matcher, so it has no effect"),
        ("matchers:\n", "line 1: recipe has no enabled matcher"),
        (
            "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*', enabled: false}\n",
            "line 1: recipe has no enabled matcher",
        ),
        ("configs:\n  c:\n" + MATCHER % "c", "line 2: config 'c' is empty; give linear, qk, pv"),
        ("configs:\n  c: {}\n" + MATCHER % "c", "line 2: config 'c' is empty"),
        (
            "configs:\n  c:\n    linear:\n" + MATCHER % "c",
            "line 3: linear of config 'c' is empty; give a format",
        ),
        (
            "configs:\n  c:\n    linear: {format: mxfp8, backward: }\n" + MATCHER % "c",
            "line 3: backward of linear of config 'c' is empty; give a format",
        ),
        (
            "configs:\n  c:\n    linear:\n      dgrad: {grad_output: }\n" + MATCHER % "c",
            "line 4: grad_output of dgrad of linear of config 'c' is empty",
        ),
        (MATCHER % "", "line 2: config of matcher 'all' is empty; give a value"),
        (
            "configs:\n  c:\n    linear: mxfp8\n" + MATCHER % "bf16",
            "line 2: config 'c' is used by no enabled matcher; remove it",
        ),
        (
            "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*', enabled: true, layers: x}\n",
            "line 2: matcher 'm' has layers: x; give numbers or ranges",
        ),
        (
            "matchers:\n  m: {config: mxfp8, type: glob, pattern: '*', enabled: true, "
            "iterations: 9-3}\n",
            "line 2: matcher 'm' has iterations: 9-3; iterations count from 1",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(load, text, message):
    with pytest.raises(ValueError, match=rf"recipe .*mine\.yaml: .*{message}"):
        load(text)


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ("[mxfp8]", "linear of config 'c' is a list; give one format"),
        ("{format: {a: b}}", "format of linear of config 'c' is a mapping; give one format"),
        ("{fprop: [{a: b}]}", "fprop of linear of config 'c' is a list; give one format"),
        ("{fprop: {}}", "fprop of linear .* is empty; give a format, or its operands input and w"),
        ("yes", "unknown format 'yes'"),
        ("16:17", "YAML reads 16:17 as the number 977; write decimal digits"),
        ("!foo mxfp8", "could not determine a constructor for the tag '!foo'; give plain"),
        ("{format: mxfp8, wgrad: {hadamard: 010}}", "YAML reads 010 as the number 8"),
        ("{format: mxfp8, wgrad: {hadamard: {size: 16, signs: true}}}", "unknown signs True"),
        ("{format: mxfp8, wgrad: {hadamard: {size: 16, signs: -1}}}", "unknown signs -1; choose"),
        (
            "{fprop: {input: {format: mxfp8, source: dequantized}}}",
            "input of fprop has the source dequantized, .* only weight of dgrad and input of wgrad",
        ),
    ],
)
def test_a_value_is_named_as_the_file_has_it(load, linear, message):
    with pytest.raises(ValueError, match=rf"line 3: .*{message}") as error:
        load(f"configs:\n  c:\n    linear: {linear}\n" + MATCHER % "c")
    assert "Node(" not in str(error.value)
    assert str(error.value).count("line 3") == 1


@pytest.mark.parametrize("layers", ["010", "1:30", "0x10", "1_0", "1 0", "first 0", "'1 - 2 3'"])
def test_layers_that_could_be_misread_are_refused(load, layers):
    with pytest.raises(ValueError, match=r"YAML reads|has layers"):
        load(MATCHER.replace("enabled", f"layers: {layers}, enabled") % "mxfp8")


def test_a_config_may_have_a_name_that_yaml_reads_as_a_truth_value(load):
    text = "configs:\n  no: {linear: mxfp8}\n" + MATCHER % "no"
    assert load(text).rules[0].config_name == "no"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml: it cannot be read: No such file"):
        load_recipe(tmp_path / "absent.yaml")


# The recipes in examples/recipes.


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_ready_recipes_load_and_say_whom_they_follow(path):
    recipe = load_recipe(path)
    assert recipe.rules
    description = yaml.safe_load(path.read_text())["description"]
    paper = re.search(r"arXiv \d{4}\.\d{5}|specification v1\.0|MindSpeed", description)
    assert paper or re.search(r"(?i)no paper|a template", description)


def test_there_are_as_many_ready_recipes_as_the_readme_says():
    assert [path.stem for path in RECIPES] == [
        "fa_only",
        "fa_tiles",
        "fp8_delayed",
        "hif8",
        "hif8_per_tensor",
        "linear_only",
        "mxfp4_linear_stochastic",
        "mxfp4_stochastic",
        "nvfp4_pretraining",
        "nvidia_mxfp8",
        "ocp_mxfp8",
        "precision_schedule",
    ]
