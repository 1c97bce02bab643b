"""Test which settings of two run cards differ."""

from __future__ import annotations

import json

import pytest

from megatron.analysis.diff.settings import MISSING, differing
from megatron.collection import run_card
from megatron.collection.run_card import collect_run_card, rank_coordinates
from megatron.fake_quant import policy


@pytest.fixture
def card(monkeypatch):
    """A function that returns the run card of a run with some environment variables and flags."""

    def made(arguments=None, *, recipe=None, **environment):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(policy, "_current", None)
            patch.setattr(policy, "_environment", {})
            patch.setattr(run_card, "_git", lambda: {"commit": "abc", "modified": False})
            policy.configure(recipe=recipe)
            made = collect_run_card("x", arguments or {}, rank_coordinates())
        return json.loads(json.dumps(made))

    return made


@pytest.mark.parametrize(
    "name",
    [
        *("moe_router_load_balancing_type", "moe_router_force_load_balancing", "dataloader_type"),
        *("q_lora_rank", "kv_lora_rank", "cpu_offloading", "distribute_saved_activations"),
        *("data_path", "load_hf", "use_mamba_mem_eff_path", "max_seqlen_per_dp_cp_rank"),
    ],
)
def test_an_argument_that_changes_the_numbers_is_named(card, name):
    assert differing(card({name: "a"}), card({name: "b"})) == {name: ("a", "b")}


@pytest.mark.parametrize(
    "name",
    [
        *("save", "load", "tensor_save_dir", "log_interval", "tensorboard_dir", "rank"),
        *("wandb_project", "mlflow_run_name", "config_logger_dir", "data_cache_path"),
    ],
)
def test_an_argument_that_changes_no_number_is_not_named(card, name):
    assert differing(card({name: "a"}), card({name: "b"})) == {}


def test_an_accumulator_of_the_environment_is_named(card):
    other = card(CUSTOM_QUANT_TYPE="mxfp8", QUANT_ACCUMULATE="blackwell_mx")
    found = differing(card(CUSTOM_QUANT_TYPE="mxfp8"), other)
    assert found == {"accumulator": (MISSING, "blackwell_mx")}
    assert other["environment"]["QUANT_ACCUMULATE"] == "blackwell_mx"


def test_variables_of_the_numerics_are_named(card):
    found = differing(card(OMP_NUM_THREADS="1"), card(OMP_NUM_THREADS="2"))
    assert found == {"OMP_NUM_THREADS": ("1", "2")}
    assert differing(card(CUDA_VISIBLE_DEVICES="0"), card(CUDA_VISIBLE_DEVICES="1")) == {}
    assert differing(card(TENSOR_SAVE_DIR="a"), card(TENSOR_SAVE_DIR="b")) == {}


def test_recipes_of_the_same_name_are_distinguished(card, tmp_path):
    cards = []
    for folder, config in (("a", "mxfp8"), ("b", "mxfp4")):
        path = tmp_path / folder / "mine.yaml"
        path.parent.mkdir()
        matcher = f"{{config: {config}, type: glob, pattern: '*', enabled: true}}"
        path.write_text(f"matchers:\n  all: {matcher}\n")
        cards.append(card(recipe=str(path)))
    [(name, digests)] = differing(*cards).items()
    assert name == "recipe_digest"
    assert digests[0] != digests[1]
    assert differing(cards[0], cards[0]) == {}


def audit(fmt: str, *, source: str = "recipe a", start: int = 1) -> list[dict]:
    operands = [
        {
            "modules": f"decoder.layers.{layer}.mlp.linear_fc1",
            "operation": "linear",
            "slots": {"fprop_a": fmt if layer else "mxfp8", "fprop_b": "mxfp8"},
            "marks": [],
            "softmax": None,
            "source": source,
        }
        for layer in range(2)
    ]
    return [{"iteration": start, "operands": operands}]


def test_the_first_matmul_with_other_formats_is_named(card):
    """An older card has no hash of the recipe."""
    a, b = card() | {"quantization": audit("mxfp8")}, card() | {"quantization": audit("mxfp4")}
    place = "decoder.layers.1.mlp.linear_fc1 linear: fprop_a"
    [(name, formats)] = differing(a, b).items()
    assert name == "formats"
    assert formats == (f"{place} mxfp8, fprop_b mxfp8", f"{place} mxfp4, fprop_b mxfp8")
    same = card() | {"quantization": audit("mxfp8", source="recipe b", start=11)}
    assert differing(a, same) == {}
    assert differing(a, card()) == {}


def test_the_commit_and_the_checkpoint_are_named(card):
    a = card() | {"loaded": {"checkpoint": "x", "iteration": 3, "weights_only": True}}
    b = card() | {"git": {"commit": "abc", "modified": True}, "loaded": None}
    assert differing(a, b) == {
        "loaded_checkpoint": ("x", MISSING),
        "loaded_iteration": ("3", MISSING),
        "loaded_weights_only": ("True", MISSING),
        "commit": ("abc", "abc with changes"),
    }


def test_long_values_are_compared_in_full(card):
    long = "/data/" + 200 * "x"
    [(name, values)] = differing(card({"data_path": long + "a"}), card({"data_path": long})).items()
    assert name == "data_path"
    assert values[0].endswith("xxa")
    assert all(len(value) <= 80 for value in values)


@pytest.mark.parametrize("bad", [None, 3, "x", [3], {"operands": 3}, [{"operands": [3]}]])
def test_a_damaged_card_is_compared_as_far_as_possible(card, bad):
    names = ("formats", "recipe", "git", "loaded", "environment", "quantization", "arguments")
    damaged = card() | dict.fromkeys(names, bad)
    assert isinstance(differing(card(), damaged), dict)
