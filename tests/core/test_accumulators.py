"""Accumulators in a real run: recipes, the flag, the audit, the records and their verification."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.verification.recorded_formats import of_card
from megatron.core.low_precision import matmul_audit
from megatron.fake_quant import get_format, policy
from megatron.fake_quant.accumulate import get_accumulator
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.policy import resolve
from megatron.fake_quant.recipe import load_recipe
from megatron.fake_quant.tiles.tiling import Tiling
from tests import forks
from tests.analysis.verification.verifying import count, verify
from tests.core.gpt_runs import collect
from tests.subprocesses import REPO, environment

RECIPE = """
configs:
  hopper:
    linear: {format: fp8_block, accumulate: hopper_fp8_promote128}
    qk: {format: fp8_e4m3, accumulate: hopper_fp8, grad_key: {format: bf16, accumulate: fp32}}
    pv: {fprop: {probs: "nvfp4", value: "nvfp4", accumulate: blackwell_nvfp4}}
matchers:
  all: {type: glob, pattern: "*layers*", config: hopper, enabled: true}
"""
IN_TILES = RECIPE.replace("blackwell_nvfp4}", "blackwell_nvfp4}, tile: 32, order: reverse")
PV = {"pv_fprop": "blackwell_nvfp4"}
QK = {"qk_fprop": "hopper_fp8", "qk_dgrad": "hopper_fp8", "qk_wgrad": "fp32"}
LINEAR = {f"linear_{gemm}": "hopper_fp8_promote128" for gemm in ("fprop", "dgrad", "wgrad")}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accumulators")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ("--micro-batches", "1", "--dtype", "bf16")
    flags = {"collect_tensors": ["all", "codes"], "collect_layers": "0"}
    return collect(
        folder / "dump", *options, flags=flags, QUANT_RECIPE=str(recipe)
    ), folder / "dump"


def test_records_name_the_accumulators_and_results_follow_from_their_operands(dump):
    records, folder = dump
    for record in records:
        expected = LINEAR if record["layer_type"] == "linear" else QK | PV
        assert record["accumulate"] == expected
    verdict = verify(folder, exact=True)
    assert verdict.errors == []
    assert count(verdict.checked, "results of linear layers, bit for bit") == 3 * 4


def test_another_accumulator_is_found_out(dump, tmp_path):
    """Sums with fewer bits lead to different products of a linear layer."""
    _, folder = dump
    store = TensorStore(folder)
    row = next(store.select(tensor_name="output", module="linear_qkv").itertuples())
    assert row.accumulate == LINEAR
    from megatron.analysis.verification.recompute_linear import linear
    from megatron.analysis.verification.recorded_formats import of_accumulate, of_records

    where = {"module": "linear_qkv", "micro_batch": 0}
    rows = {r.tensor_name: r for r in store.select(**where).itertuples() if r.codes is None}
    rows["weight"] = next(store.select(module="linear_qkv", tensor_name="weight").itertuples())
    tensors = {name: store.load(r) for name, r in rows.items()}
    names = [rows[name].format for name in ("input", "weight", "grad_output")]
    for text, wrong in (("hopper_fp8_promote128", False), ("fda:l32:f5:m5:rz:p128", True)):
        accumulate = dict.fromkeys(LINEAR, text)
        (formats, *_) = of_records(*names, accumulators=of_accumulate(accumulate, "linear"))
        outcomes = dict(linear(tensors, formats, 1.0))
        assert {outcome.wrong for outcome in outcomes.values()} == {wrong}
        assert {outcome.exact for outcome in outcomes.values()} == {not wrong}
    assert (
        "values differ from the sums of products in fda:l32:f5:m5:rz:p128"
        in outcomes["output"].text
    )


@pytest.mark.parametrize("recipe", [RECIPE, IN_TILES], ids=["whole", "tiles"])
def test_the_audit_shows_the_accumulators_and_is_read_back(tmp_path, recipe):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    config = load_recipe(path).rules[0].config
    entries = [
        matmul_audit._matmul("decoder.layers.0.x", operation, 1.0, formats, "recipe")
        for operation, formats in config.items()
    ]
    linear, qk, pv = (entry.summary for entry in entries)
    assert linear.endswith("(accumulated in hopper_fp8_promote128)")
    assert "(fprop and grad_query accumulated in hopper_fp8, grad_key in fp32)" in qk
    assert "(fprop accumulated in blackwell_nvfp4)" in pv
    assert ("(tiles of 32 keys, reverse)" in pv) == (recipe == IN_TILES)
    operands = json.loads(json.dumps(matmul_audit.for_card(entries)))
    for card in ({"operands": operands, "matmuls": []}, {"matmuls": matmul_audit.table(entries)}):
        quantization = {"quantization": [{"iteration": 1} | card]}
        for operation, formats in config.items():
            assert of_card(quantization, "decoder.layers.0.x", operation, 1) == formats


def test_without_an_audit_the_accumulators_of_attention_come_from_the_records():
    from megatron.analysis.verification.results import _attention_formats

    fields = {"iteration": 1, "module": "m", "quant_type": "FA_fp8_e4m3", "format": "fp8_e4m3"}
    row = SimpleNamespace(**fields, accumulate=QK, global_shape=[16, 1, 2, 8])
    formats = _attention_formats([dict.fromkeys(("query", "key", "value"), row)], {})
    assert {f"qk_{gemm}": unit.name for gemm, unit in formats.qk.accumulators.items()} == QK
    assert formats.pv == GemmFormats.uniform(get_format("fp8_e4m3"))


def test_the_flag_applies_to_what_the_unit_multiplies():
    hopper = get_accumulator("hopper_fp8")
    policy_ = resolve({"linear": "fp8_e4m3", "accumulate": "HOPPER_FP8"}, {})
    assert policy_.plan("linear", "x", 0, 1).at(1).accumulators == dict.fromkeys(
        ("fprop", "dgrad", "wgrad"), hopper
    )
    assert policy_.plan("qk", "x", 0, 1).at(1) is None
    assert policy_.plan("qk", "x", 0, 1).source_at(1) == "default"
    assert policy_.describe()[-1] == "accumulator: hopper_fp8 (flag --quant-accumulate)"
    policy_ = resolve({"linear": "mxfp8"}, {"QUANT_ACCUMULATE": "fp32"})
    assert policy_.plan("linear", "x", 0, 1).at(1) == resolve({"linear": "mxfp8"}, {}).plan(
        "linear", "x", 0, 1
    ).at(1)
    policy_ = resolve({}, {"QUANT_ACCUMULATE": "hopper_bf16"})
    assert (policy_.quant_type, policy_.changes_matmuls) == ("bf16", True)
    assert policy_.request == "accumulator hopper_bf16"
    plan = policy_.plan("pv", "x", 0, 1)
    assert plan.at(1).accumulators.keys() == {"fprop", "dgrad", "wgrad"}
    assert plan.source_at(1) == "environment variable QUANT_ACCUMULATE"
    assert policy_.plan("linear", "output_layer", -1, 1, is_lm_head=True).at(1) is None


def test_a_straight_through_backward_pass_keeps_torch_s_accumulator(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "configs: {a: {linear: {format: fp8_e4m3, backward: bf16}}}\n"
        "matchers: {all: {type: glob, pattern: '*', config: a, enabled: true}}\n"
    )
    plan = resolve({"recipe": str(path), "accumulate": "hopper_fp8"}, {}).plan("linear", "x", 0, 1)
    assert list(plan.at(1).accumulators) == ["fprop"]
    assert list(plan.of_all_times()[0][0].accumulators) == ["fprop"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"accumulate": "hoper_fp8"},
            "flag --quant-accumulate: unknown accumulator 'hoper_fp8', d",
        ),
        ({"linear": "mxfp4", "accumulate": "hopper_fp8"}, "-accumulate: fprop: .* block scales"),
        (
            {"accumulate": "hopper_fp8"},
            "applies to no matmul, because it multiplies e4m3, e5m2 and",
        ),
        ({"recipe": "R", "accumulate": "hopper_fp8"}, "sets accumulators of its own; remove the"),
    ],
)
def test_a_flag_without_effect_or_unit_is_refused(flags, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    flags = {name: str(path) if value == "R" else value for name, value in flags.items()}
    with pytest.raises(ValueError, match=message):
        resolve(flags, {})


def test_a_recipe_s_accumulators_win_over_the_variable(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    found = resolve({"recipe": str(path)}, {"QUANT_ACCUMULATE": "cdna3_fp8"})
    assert found.accumulator is None
    assert (
        found.plan("linear", "layers", 0, 1).at(1).fprop_accumulator.name == "hopper_fp8_promote128"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "linear: {accumulate: hopper}",
            "line 2: linear of config 'a': unknown accumulator 'hopper'",
        ),
        (
            "linear: {format: mxfp4, accumulate: hopper_fp8}",
            "fprop: .* cannot be combined with mxfp4",
        ),
        (
            "qk: {format: fp8_e4m3, backward: bf16, accumulate: hopper_fp8}",
            "grad_query has the accumulator hopper_fp8 and multiplies a copy that key of fprop",
        ),
        ("pv: {grad_probs: {accumulate: hopper_fp8}}", "grad_probs: .* not multiply bfloat16 elem"),
        ("linear: {fprop: {accumulate: []}}", "fprop of linear of config .a.: unknown accumulator"),
    ],
)
def test_a_recipe_with_a_combination_without_a_unit_is_refused(config, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"configs:\n  a: {{{config}}}\n"
        "matchers: {all: {type: glob, pattern: '*', config: a, enabled: true}}\n"
    )
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_high_precision_matmuls_take_an_accumulator_in_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "configs: {a: {linear: {format: bf16, accumulate: hopper_bf16}, qk: {accumulate: fp32}}}\n"
        "matchers: {all: {type: glob, pattern: '*', config: a, enabled: true}}\n"
    )
    config = load_recipe(path).rules[0].config
    assert config["linear"].fprop_accumulator == get_accumulator("hopper_bf16")
    assert config["qk"] is None, "fp32 is the accumulator of torch.matmul"


def test_tiles_are_accumulated_by_the_flag_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "configs: {a: {qk: fp8_e4m3, pv: {format: fp8_e4m3, tile: 64}}}\n"
        "matchers: {all: {type: glob, pattern: '*', config: a, enabled: true}}\n"
    )
    found = resolve({"recipe": str(path), "accumulate": "hopper_fp8"}, {})
    for operation in ("qk", "pv"):
        formats = found.plan(operation, "x", 0, 1).at(1)
        assert formats.accumulators.keys() == {"fprop", "dgrad", "wgrad"}
    assert formats.tiling == Tiling(64)
    path.write_text(path.read_text().replace("pv: {format: fp8_e4m3", "pv: {format: mxfp4"))
    with pytest.raises(ValueError, match=r"flag --quant-accumulate: .* be combined with mxfp4"):
        resolve({"recipe": str(path), "accumulate": "hopper_fp8"}, {})


def test_a_flag_for_a_format_whose_blocks_a_recipe_s_tiles_cut_is_refused_before_training(tmp_path):
    from megatron.core.low_precision.recipe_check import _cut_blocks

    path = tmp_path / "recipe.yaml"
    path.write_text(
        "configs: {a: {pv: {format: fp8_e4m3, tile: 16, accumulate: hopper_fp8}}}\n"
        "matchers: {all: {type: glob, pattern: '*', config: a, enabled: true}}\n"
    )
    module = type("Module", (), {"identity": type("Identity", (), {"name": "core_attention"})()})()
    for name, messages in (("fp8_e4m3", 0), ("mxfp8", 2)):
        in_force = resolve({"recipe": str(path), "qk": name}, {})
        module.plan_of = lambda operation, plan=in_force.plan: plan(operation, "x", 0, 1)
        found = list(_cut_blocks(module))
        assert len(found) == messages
    assert "core_attention: attention in tiles of 16 keys: the format of QK^T that a f" in found[0]
    assert "blocks of 32 values of mxfp8 along the keys, which tiles of 16 keys cut" in found[0]


@pytest.fixture
def reset():
    yield
    policy._current = None


def test_a_bypass_and_a_dtype_are_refused_for_an_accumulator_alone(reset, monkeypatch):
    from megatron.core.low_precision.coverage_check import check_coverage
    from megatron.core.low_precision.recipe_check import _other_dtypes

    monkeypatch.setenv("QUANT_ACCUMULATE", "hopper_bf16")
    policy._current = None
    model = torch.nn.Module()
    model.config = type("Config", (), {"quant_recipe": None, "cuda_graph_impl": "local"})()
    with pytest.raises(
        ValueError, match="accumulator hopper_bf16 does not reach a model with cuda"
    ):
        check_coverage(model, collecting=False)
    module = torch.nn.Module()
    module.identity = type("Identity", (), {"name": "decoder.x"})()
    module.config = type("Config", (), {"params_dtype": torch.float32})()
    formats = GemmFormats(fprop_accumulator=get_accumulator("hopper_bf16"))
    (message,) = _other_dtypes(module, "linear", formats, "flag")
    assert "flag: decoder.x: fprop of linear: " in message
    assert "does not multiply float32 elements; it multiplies bfloat16, float16" in message
    module.config.params_dtype = torch.bfloat16
    assert list(_other_dtypes(module, "linear", formats, "flag")) == []


def one_config(path, config, more=""):
    path.write_text(
        f"configs: {{a: {{{config}}}}}\n"
        f"matchers: {{all: {{type: glob, pattern: '*layers*', config: a, enabled: true{more}}}}}\n"
    )
    return str(path)


def test_a_recipe_s_fp32_is_an_accumulator_of_its_own(tmp_path):
    """It changes nothing by itself, but a flag or variable must not replace it."""
    path = one_config(tmp_path / "recipe.yaml", "linear: {fprop: {accumulate: fp32}}")
    with pytest.raises(ValueError, match="sets accumulators of its own"):
        resolve({"recipe": path, "accumulate": "hopper_bf16"}, {})
    found = resolve({"recipe": path}, {"QUANT_ACCUMULATE": "hopper_bf16"})
    assert found.plan("linear", "layers", 0, 1).at(1) is None
    assert found.describe()[-1] == f"accumulator: layer by layer (recipe {path})"
    with pytest.raises(ValueError, match="QUANT_ACCUMULATE: unknown accumulator 'hoper'"):
        resolve({"recipe": path}, {"QUANT_ACCUMULATE": "hoper"})


def test_accumulators_that_flags_overrule_do_not_hide_the_variable(tmp_path):
    config = "linear: {format: fp8_e4m3, accumulate: cdna3_fp8}"
    flags = {"recipe": one_config(tmp_path / "recipe.yaml", config), "linear": "fp8_e4m3"}
    for more, variables in (
        ({}, {"QUANT_ACCUMULATE": "hopper_fp8"}),
        ({"accumulate": "hopper_fp8"}, {}),
    ):
        formats = resolve(flags | more, variables).plan("linear", "layers", 0, 1).at(1)
        assert formats.fprop_accumulator.name == "hopper_fp8"


def test_the_lm_head_is_left_out_unless_a_recipe_gives_it_a_format(tmp_path):
    path = tmp_path / "recipe.yaml"
    flags = {
        "recipe": one_config(path, "linear: fp8_e4m3"),
        "accumulate": "fda:l32:f13:m13:rz",
    }
    head = ("linear", "output_layer", -1, 1)
    plan = resolve(flags, {}).plan(*head, is_lm_head=True)
    assert (plan.at(1), plan.of_all_times()) == (None, [])
    path.write_text(path.read_text().replace("*layers*", "*"))
    assert resolve(flags, {}).plan(*head, is_lm_head=True).at(1).accumulators
    path.write_text(path.read_text().replace("fp8_e4m3", "bf16"))
    assert resolve(flags, {}).plan(*head, is_lm_head=True).at(1) is None


def test_iterations_without_a_rule_are_checked_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    flags = {"recipe": None, "accumulate": "volta_fp16"}
    for iterations, gap in (("5-", True), ("1-4", True), ("1-", False)):
        more = f", iterations: {iterations}"
        flags["recipe"] = one_config(path, "linear: fp16", more)
        plan = resolve(flags, {}).plan("linear", "layers", 0, 1)
        names = [source for _, source in plan.of_all_times()]
        matched = "recipe recipe.yaml, matcher 'all' (line 2)"
        assert names == [matched, *["flag --quant-accumulate"] * gap]
        assert (plan.source_at(1) == matched) != (iterations == "5-")


def test_a_unit_for_float16_alone_multiplies_models_in_float16(tmp_path):
    from megatron.core.low_precision.recipe_check import _other_dtypes

    formats = resolve({"accumulate": "volta_fp16"}, {}).plan("linear", "layers", 0, 1).at(1)
    assert (
        load_recipe(Path(one_config(tmp_path / "recipe.yaml", "linear: {accumulate: volta_fp16}")))
        .rules[0]
        .config["linear"]
        == formats
    )
    module = type("Module", (), {"identity": type("Identity", (), {"name": "x"})()})()
    for dtype, refused in ((torch.float16, False), (torch.bfloat16, True), (torch.float32, True)):
        module.config = type("Config", (), {"params_dtype": dtype})()
        assert bool(list(_other_dtypes(module, "linear", formats, "flag"))) == refused


SIZES = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --bf16 --eval-iters 1"
)


def test_training_runs_with_accumulators_in_every_matmul(tmp_path):
    """Recomputation gives the losses of a run without it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    losses = {}
    for name, more in {
        "plain": "",
        "recomputed": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    }.items():
        options = [*SIZES.split(), *more.split(), "--quant-recipe", str(recipe)]
        result = forks.run(
            REPO / "pretrain_gpt.py", *options, cwd=tmp_path, env=environment(PYTHONPATH=REPO)
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert "(accumulated in hopper_fp8_promote128)" in result.stdout
        losses[name] = [
            line.split("lm loss: ")[1][:14]
            for line in result.stdout.splitlines()
            if "lm loss: " in line
        ]
    assert len(losses["plain"]) >= 2
    assert losses["recomputed"] == losses["plain"]
