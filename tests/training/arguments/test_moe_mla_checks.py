"""Tests of the flags of MLA and mixtures of experts: errors, defaults and FLOPs."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.core.transformer.moe import experts
from megatron.training.arguments.parse_args import parse_args
from megatron.training.checkpointing.compatibility import check_optimizer
from megatron.training.errors import UserError
from megatron.training.logging import flops_per_token
from tests.training.runs import MINIMAL

MLA = (*MINIMAL, "--multi-latent-attention", "--disable-bias-linear", "--swiglu")
EXPERTS = (*MLA, "--num-experts", "4", "--moe-ffn-hidden-size", "32")
#: message for --moe-grouped-gemm, which needs bf16 and a megatron-core with grouped experts
GROUPED = "needs --bf16" if hasattr(experts, "GroupedMLP") else "does nothing here: since release"
TENSOR = ("--tensor-model-parallel-size", "2")


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-grouped-gemm", GROUPED),
        ("--moe-permute-fusion", "--moe-permute-fusion needs the package transformer_engine"),
        ("--moe-router-fusion", "--moe-router-fusion needs the package transformer_engine"),
        ("--moe-latent-size 16", "--moe-latent-size needs the package transformer_engine"),
        ("--moe-token-dispatcher-type flex", "flex needs the package deep_ep"),
        ("--tensor-model-parallel-size 2", "above 1 needs --sequence-parallel; add it"),
        ("--num-experts 3 --expert-model-parallel-size 2", "--num-experts 3 cannot be spread"),
        ("--moe-router-topk 5", "--moe-router-topk 5 is above --num-experts 4"),
        ("--moe-layer-freq [0]+[1]*26", "lists 27 layers, but --num-layers is 4"),
        (
            "--expert-model-parallel-size 2 --use-cpu-initialization",
            "--use-cpu-initialization gives the experts of every",
        ),
        ("--moe-router-load-balancing-type word", "type word is unknown; give aux_loss, seq_aux"),
        ("--moe-router-load-balancing-type aux_loss Sinkhorn", "type Sinkhorn is unknown; give"),
        (
            "--expert-tensor-parallel-size 4",
            "--expert-tensor-parallel-size 4 x --expert-model-parallel-size 1 does not divide",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
            "--expert-tensor-parallel-size 2 (as --tensor-model-parallel-size) x",
        ),
        ("--expert-tensor-parallel-size 0", "--expert-tensor-parallel-size 0 is too small"),
        (
            "--moe-shared-expert-intermediate-size 64 --add-bias-linear",
            "--moe-shared-expert-intermediate-size needs --disable-bias-linear",
        ),
        ("--num-query-groups 2", "--num-query-groups 2 contradicts --multi-latent-attention"),
        ("--qk-clip", "--qk-clip does nothing here: the optimizers here do not"),
        ("--cache-mla-latents", "--cache-mla-latents does nothing here: it is for inference"),
        (
            "--recompute-granularity selective --recompute-modules layernorm",
            "--recompute-modules layernorm needs Transformer Engine",
        ),
    ],
)
def test_a_refusal_names_the_flag(flags, message):
    parse_args([*EXPERTS])
    with pytest.raises(UserError) as refusal:
        parse_args([*EXPERTS, *flags.split()])
    assert message in str(refusal.value)


def test_mla_alone_needs_no_sequence_parallelism():
    assert parse_args([*MLA, *TENSOR]).transformer.tensor_model_parallel_size == 2


def test_queries_are_compressed_only_if_the_flag_says_so():
    """Megatron-LM and DeepSeek-V2-Lite have no compression, but megatron-core's default is 512."""
    run = parse_args([*MLA])
    assert run.transformer.q_lora_rank is None
    assert run.args.q_lora_rank is None
    assert parse_args([*MLA, "--q-lora-rank", "24"]).transformer.q_lora_rank == 24


def test_a_single_optimizer_cannot_be_loaded_where_experts_are_spread():
    saved = vars(parse_args([*MLA]).args) | {"expert_model_parallel_size": 1}
    common = {"has_optim": True, "args": saved, "run": {"type": "fp32"}}
    args = Namespace(**saved | {"expert_model_parallel_size": 2, "num_moe_experts": 4})
    with pytest.raises(UserError, match="--expert-model-parallel-size 1, but this run has 2"):
        check_optimizer(args, common, Path("folder"))
    saved["expert_model_parallel_size"] = 4
    check_optimizer(args, common, Path("folder"))


def flops(**changes):
    """Return the FLOPs per token of DeepSeek-V2-Lite with some arguments changed."""
    args = Namespace(
        num_layers=27,
        hidden_size=2048,
        ffn_hidden_size=10944,
        num_attention_heads=16,
        multi_latent_attention=True,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        num_moe_experts=64,
        moe_layer_freq=[0] + [1] * 26,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816,
        swiglu=True,
        quick_geglu=False,
        seq_length=0,
        padded_vocab_size=102400,
        kv_channels=128,
        num_query_groups=16,
    )
    return flops_per_token(Namespace(**vars(args) | changes))


def test_operations_are_six_a_parameter_that_a_token_meets():
    """DeepSeek-V2's paper states that 2.4B of the Lite model's 15.7B parameters are active."""
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    experts = 3 * 2048 * (6 * 1408 + 2816) + 2048 * 64
    parameters = 27 * attention + 3 * 2048 * 10944 + 26 * experts + 2048 * 102400
    assert flops() == 6 * parameters
    assert 2.4e9 < parameters < 2.5e9
    # Scores sum over 192 features and values have 128; half of the score matrix is unmasked.
    assert flops(seq_length=4096) - flops() == 6 * 27 * 16 * (192 + 128) * 2048


def test_operations_of_other_shapes():
    compressed = 1536 * (2048 + 16 * 192) - 2048 * 16 * 192
    assert flops(q_lora_rank=1536) - flops() == 6 * 27 * compressed
    every_second = flops(moe_layer_freq=2)
    assert every_second == flops(moe_layer_freq=[1, 0] * 13 + [1])
    dense = flops(num_moe_experts=None, multi_latent_attention=False)
    assert dense == 6 * (27 * (4 * 2048 * 2048 + 3 * 2048 * 10944) + 2048 * 102400)
