"""Tests of the example recipes, of the audit, and of errors for rules that match nothing."""

import re

import pytest

from tests.subprocesses import REPO
from tests.training.runs import NO_DROPOUT, train

RECIPES = sorted((REPO / "examples" / "recipes").glob("*.yaml"))
#: multiplications of the test's model, counted by hand. Per token and layer: linear_qkv 64 x 128,
#: linear_proj 64 x 64, linear_fc1 64 x 512 (gated: twice 256), linear_fc2 256 x 64, QK^T and PV
#: 64 x 64 each (64 keys, 4 heads of 16). The LM head has 64 x 128.
LINEAR, QK, PV = 64 * 128 + 64 * 64 + 64 * 512 + 256 * 64, 64 * 64, 64 * 64
TOTAL = 4 * (LINEAR + QK + PV) + 64 * 128
#: quantized share of all matmul FLOPs, by recipe
SHARES = {
    "ocp_mxfp8": (TOTAL - 64 * 128) / TOTAL,
    "nvidia_mxfp8": 4 * LINEAR / TOTAL,
    "nvfp4_pretraining": 3 * LINEAR / TOTAL,
    "mxfp4_stochastic": 2 / 3 * 4 * LINEAR / TOTAL,  # only dgrad and wgrad
    "mxfp4_linear_stochastic": 4 * LINEAR / TOTAL,
    "hif8": 4 * LINEAR / TOTAL,
    "hif8_per_tensor": 4 * LINEAR / TOTAL,
    "fp8_delayed": 4 * LINEAR / TOTAL,
    "fa_only": 4 * (QK + PV) / TOTAL,
    "fa_tiles": 4 * (QK + PV) / TOTAL,
    "linear_only": 4 * LINEAR / TOTAL,
    "precision_schedule": 0.0,  # at the first iteration
}


@pytest.fixture(scope="module")
def plain():
    return train("--mock-data", *NO_DROPOUT)


def audited_share(output: str) -> float:
    return float(re.search(r"in low precision: ([\d.e+-]+)% of the FLOPs", output)[1]) / 100


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_ready_recipe_trains(path, plain):
    done = train("--mock-data", *NO_DROPOUT, "--quant-recipe", path)
    assert done.status == 0, done.errors
    assert audited_share(done.output) == pytest.approx(SHARES[path.stem], rel=1e-3)
    assert done.losses[6] < done.losses[1] - 0.5
    assert done.losses != plain.losses
    mark = "(unnormalized probabilities) (tiles of 128 keys, reverse, P x 256)"
    assert (mark in done.output) == (path.stem == "fa_tiles")


@pytest.mark.parametrize("name", ["fa_only", "fa_tiles"])
def test_attention_with_dropout_is_refused_if_the_recipe_has_none(name):
    recipe = REPO / "examples" / "recipes" / f"{name}.yaml"
    done = train("--mock-data", "--attention-dropout", "0.1", "--quant-recipe", recipe)
    assert done.status == 2
    assert f"[ERROR] recipe {name}.yaml, matcher" in done.errors
    assert "give --attention-dropout 0" in done.errors
    assert "Traceback" not in done.errors


def test_a_schedule_switches_at_its_iteration(plain, tmp_path):
    path = tmp_path / "late.yaml"
    path.write_text(
        "matchers:\n  late: {config: mxfp4, type: glob, pattern: '*', enabled: true, "
        "iterations: 3-}\n"
    )
    done = train("--mock-data", *NO_DROPOUT, "--quant-recipe", path)
    assert [done.losses[i] == plain.losses[i] for i in range(1, 5)] == [True, True, False, False]


def test_the_audit_lists_and_stops(tmp_path):
    done = train("--mock-data", "--quant-audit", "--custom-quant-type", "FA_linear_mxfp8:rceil")
    assert done.status == 0, done.errors
    assert not done.lines, "it must not train"
    lines = [line.removeprefix(">").split() for line in done.output.splitlines()]
    table = {(line[0], line[1]): line[2:] for line in lines if "--custom-quant-type" in line}
    source = ["flag", "--custom-quant-type"]
    assert table == {
        ("decoder.layers.0-3.mlp.linear_fc1", "linear"): ["mxfp8:rceil", *source],
        ("decoder.layers.0-3.mlp.linear_fc2", "linear"): ["mxfp8:rceil", *source],
        ("decoder.layers.0-3.self_attention.core_attention", "qk"): ["mxfp8:rceil", *source],
        ("decoder.layers.0-3.self_attention.core_attention", "pv"): [
            "high",
            "precision",
            *source,
        ],
        ("decoder.layers.0-3.self_attention.linear_proj", "linear"): ["mxfp8:rceil", *source],
        ("decoder.layers.0-3.self_attention.linear_qkv", "linear"): ["mxfp8:rceil", *source],
    }
    assert audited_share(done.output) == pytest.approx(4 * (LINEAR + QK) / TOTAL, rel=1e-3)
    assert "output_layer" in done.output


def test_the_audit_of_a_schedule_shows_each_of_its_parts():
    path = REPO / "examples" / "recipes" / "precision_schedule.yaml"
    done = train("--mock-data", "--quant-audit", "--quant-recipe", path)
    assert done.status == 0, done.errors
    shares = re.findall(r"from iteration (\d+) on, .*: ([\d.]+)% of the FLOPs", done.output)
    part = 100 * 4 * LINEAR / TOTAL
    expected = {"1": 0, "3": pytest.approx(part, rel=1e-3), "5": 0}
    assert {start: float(share) for start, share in shares} == expected
    assert "fprop mxfp4 x mxfp4, dgrad mxfp4:sr x mxfp4:sr" in done.output


def test_the_audit_tells_apart_what_multiplies_differently(tmp_path):
    path = tmp_path / "ways.yaml"
    path.write_text(
        "configs:\n"
        "  through: {linear: {format: mxfp8, backward: bf16}}\n"
        "  raw: {pv: {format: mxfp8, probabilities: unnormalized}}\n"
        "matchers:\n"
        "  linear: {config: through, type: glob, pattern: '*.linear_*', enabled: true}\n"
        "  core: {config: raw, type: glob, pattern: '*.core_attention', enabled: true}\n"
    )
    done = train("--mock-data", *NO_DROPOUT, "--quant-audit", "--quant-recipe", path)
    assert done.status == 0, done.errors
    gemms = "fprop mxfp8 x mxfp8, dgrad none x mxfp8, wgrad none x mxfp8 (straight-through)"
    assert gemms in done.output
    assert re.search(r"core_attention +pv +mxfp8 \(unnormalized probabilities\)", done.output)
    # Two of a linear layer's three GEMMs keep the gradient in high precision.
    share = (4 * LINEAR / 3 + 4 * PV) / TOTAL
    assert audited_share(done.output) == pytest.approx(share, rel=1e-3)


def test_the_audit_is_the_same_from_every_pipeline_stage():
    one = train("--mock-data", "--quant-audit", "--custom-quant-type", "mxfp8")
    two = train(
        *("--mock-data", "--quant-audit", "--custom-quant-type", "mxfp8"),
        *("--pipeline-model-parallel-size", "2"),
        ranks=2,
    )

    def table(done):
        return [line for line in done.output.splitlines() if line.startswith(">   ")]

    assert len(table(one)) == 7
    assert table(one) == table(two)


@pytest.mark.parametrize(
    ("tensor_ranks", "config", "message"),
    [
        (
            1,
            "linear: {fprop: {format: mxfp4, hadamard: 128}}",
            "decoder.layers.0.self_attention.linear_proj: fprop of linear has a Hadamard transform "
            "of size 128, which does not divide its 64 input features;",
        ),
        (
            2,
            "linear: {dgrad: {format: mxfp4, hadamard: 128}}",
            "decoder.layers.0.self_attention.linear_qkv: dgrad of linear has a Hadamard transform "
            "of size 128, which does not divide its 64 output features (of a tensor-parallel "
            "rank);",
        ),
        (
            1,
            "pv: {fprop: {format: mxfp4, hadamard: 128}}",
            "decoder.layers.0.self_attention.core_attention: fprop of pv has a Hadamard transform "
            "of size 128, which does not divide its 64 keys;",
        ),
    ],
)
def test_a_transform_that_does_not_fit_is_refused_before_training(
    tmp_path, tensor_ranks, config, message
):
    pattern = "*.linear_qkv" if tensor_ranks > 1 else "*"
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"configs:\n  rotated:\n    {config}\n"
        f"matchers:\n  all: {{config: rotated, type: glob, pattern: '{pattern}', "
        "iterations: 5-, enabled: true}\n"
    )
    layout = ("--tensor-model-parallel-size", str(tensor_ranks), "--quant-audit")
    done = train("--mock-data", "--quant-recipe", path, *layout, ranks=tensor_ranks)
    assert done.status != 0
    assert f"[ERROR] recipe {path.name[:-5]}" in done.errors, done.errors
    assert message in done.errors


@pytest.mark.parametrize(
    ("matchers", "message"),
    [
        (
            "  typo: {config: mxfp8, type: glob, pattern: '*.linear_fc3', enabled: true}\n",
            r"line 2: matcher 'typo' with the pattern '\*.linear_fc3' fits none of the 21 modules",
        ),
        (
            "  deep: {config: mxfp8, type: glob, pattern: '*', layers: '9', enabled: true}\n",
            r"line 2: matcher 'deep' with the pattern '\*' and layers '9' fits none",
        ),
        (
            "  all: {config: mxfp8, type: glob, pattern: '*', enabled: true}\n"
            "  more: {config: bf16, type: glob, pattern: '*.linear_fc1', enabled: true}\n",
            r"line 3: matcher 'more' is never reached: earlier matchers already apply to "
            r"decoder.layers.0.mlp.linear_fc1",
        ),
    ],
    ids=["typo", "layer", "shadowed"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rule_for_nothing_is_refused(tmp_path, matchers, message, ranks):
    path = tmp_path / "mine.yaml"
    path.write_text("matchers:\n" + matchers)
    layout = ("--pipeline-model-parallel-size", str(ranks))
    done = train("--mock-data", "--quant-recipe", path, *layout, ranks=ranks)
    assert done.status != 0
    assert re.search(rf"\[ERROR\] recipe {path}: {message}", done.errors), done.errors
    # torchrun prints a traceback of its own
    assert f'File "{REPO}/megatron' not in done.errors, "the error must not be a traceback"


def test_a_recipe_that_is_not_there_is_an_error_of_one_line(tmp_path):
    done = train("--mock-data", "--quant-recipe", tmp_path / "absent.yaml")
    assert done.status != 0
    assert "absent.yaml: it cannot be read: No such file" in done.errors
    assert "Traceback" not in done.errors


def test_a_recipe_or_statistics_after_the_last_iteration_are_refused(tmp_path):
    path = tmp_path / "late.yaml"
    matcher = "{config: mxfp8, type: glob, pattern: '*', iterations: 100-, enabled: true}"
    path.write_text(f"matchers:\n  late: {matcher}\n")
    done = train("--mock-data", "--quant-recipe", path)
    assert done.status != 0
    assert "sets its first format in iteration 100, and the run ends at iteration 6" in done.errors
    done = train("--mock-data", "--tensor-statistics", "7")
    assert done.status != 0
    assert "--tensor-statistics 7 measures none of the iterations" in done.errors
