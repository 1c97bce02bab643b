"""Every field of the configuration is in one class of hf/fields.py; fixed fields are refused."""

import itertools
from dataclasses import fields

import pytest

from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments.core_releases import LATER, REMOVED
from megatron.training.arguments.options import ModelOptions
from megatron.training.arguments.parse_args import parse_args
from megatron.training.errors import UserError
from megatron.training.hf import architectures, llama
from megatron.training.hf.fields import CLASSES, EXPRESSED, FIXED
from tests.published import PUBLISHED
from tests.training.hf.command_lines import another_value, folder_of, parse


def test_every_field_is_in_exactly_one_class():
    known = {f.name for f in fields(MLATransformerConfig) if not f.name.startswith("_")}
    known |= {f.name for f in fields(ModelOptions)}
    assert set().union(*CLASSES.values()) - REMOVED == known - LATER - REMOVED
    for one, another in itertools.combinations(CLASSES, 2):
        assert not CLASSES[one] & CLASSES[another], (one, another)


def test_what_is_fixed_or_expressed_is_what_is_compared():
    compared = set()
    for config in PUBLISHED.values():
        (architecture,) = (
            a for a in architectures.ARCHITECTURES if [a.name] == config["architectures"]
        )
        compared |= set(architecture.flags(config))
    by_hand = {"activation_func", "gated_linear_unit", "max_position_embeddings"}
    assert compared | by_hand == FIXED | EXPRESSED


WITHOUT_A_FLAG = {"activation_func", "gated_linear_unit"}
#: Flags that contradict the published value, for fields where `another_value` does not.
CONTRARY = {
    "swiglu": "--quick-geglu",
    "position_embedding_type": "--position-embedding-type learned_absolute",
    "normalization": "--normalization LayerNorm",
    "add_bias_linear": "--add-bias-linear",
    "qk_layernorm": "--no-qk-layernorm",
    "moe_router_pre_softmax": "--no-moe-router-pre-softmax",
}


@pytest.mark.parametrize("name", sorted(FIXED - WITHOUT_A_FLAG))
def test_every_fixed_field_is_refused_by_name(tmp_path, name):
    flag = CONTRARY.get(name) or another_value(name)
    with pytest.raises(UserError) as refusal:
        parse(folder_of(tmp_path, "deepseek2_lite"), *flag.split())
    given = "--quick-geglu" if name == "swiglu" else "--" + name.replace("_", "-")
    assert f"{given} is " in str(refusal.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--moe-router-topk 1 --moe-apply-probs-on-input",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-force-load-balancing",
        "--moe-input-jitter-eps 0.01",
    ],
)
def test_a_model_that_routes_in_another_way_is_not_saved(tmp_path, flag):
    shape = parse(folder_of(tmp_path, "deepseek2_lite")).args
    assert shape.moe_router_load_balancing_type == "aux_loss"
    with pytest.raises(
        UserError, match=f"cannot express this model: .*{flag.split(' --')[-1][:20]}"
    ):
        parse_args(
            [
                *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
                *("--seq-length", "64", "--micro-batch-size", "1", "--lr", "0", "--mock-data"),
                *("--train-iters", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"),
                *("--multi-latent-attention", "--qk-layernorm", "--rope-type", "rope"),
                *("--mscale-all-dim", "0", "--normalization", "RMSNorm", "--swiglu"),
                *("--disable-bias-linear", "--position-embedding-type", "rope"),
                *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-pre-softmax"),
                *("--moe-shared-expert-intermediate-size", "64", "--save-hf", str(tmp_path / "o")),
                *flag.split(),
            ]
        )


def test_losses_that_balance_experts_are_a_choice_of_training(tmp_path):
    folder = folder_of(tmp_path, "deepseek2_lite")
    for kind in llama.LOSSES_ONLY:
        parse(folder, "--moe-router-load-balancing-type", kind)
