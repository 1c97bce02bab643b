"""`--load-hf` fills in a command line; flags that contradict it or `--save-hf` are refused."""

import json
from argparse import Namespace

import pytest
import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.training.arguments.parse_args import build_parser, parse_args
from megatron.training.errors import UserError
from megatron.training.hf import architectures, flags, rope
from tests.published import PARAMETERS, PUBLISHED
from tests.training.hf.command_lines import folder_of, parse
from tests.training.hf.hf_models import LLAMA3_ROPE, YARN, deepseek_configuration
from tests.training.runs import DEEPSEEK as DEEPSEEK_FLAGS
from tests.training.runs import MINIMAL, without_split


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models_have_their_published_size(tmp_path, name):
    run = parse(folder_of(tmp_path, name))
    count = sum(torch.Size(source.shape).numel() for source in run.hf.sources.values())
    assert count == PARAMETERS[name]


def test_the_flags_of_the_architecture_are_filled_in(tmp_path):
    run = parse(folder_of(tmp_path, "llama32-1b"), "--num-layers", "16", "--seq-length", "4096")
    args, config = run.args, run.transformer
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (16, 2048, 8192)
    assert (config.num_query_groups, config.kv_channels) == (8, 64)
    assert config.activation_func is torch.nn.functional.silu
    assert config.gated_linear_unit
    assert not config.add_bias_linear
    assert (config.normalization, config.layernorm_epsilon) == ("RMSNorm", 1e-5)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert (args.use_rope_scaling, args.rope_scaling_factor, args.rotary_base) == (True, 32, 5e5)
    assert not args.untie_embeddings_and_output_weights
    assert (args.max_position_embeddings, args.seq_length) == (131072, 4096)
    (note,) = [note for note in run.notes if note.startswith("--load-hf ")]
    assert "--num-layers" not in note, "the command line sets it"
    for shown in ("--hidden-size 2048", "--swiglu", "--no-add-bias-linear", "--hidden-dropout 0.0"):
        assert f" {shown} " in note
    assert "rotary-percent" not in note, "the checkpoint's value is the default"


def test_deepseeks_routing_and_yarn(tmp_path):
    config = parse(folder_of(tmp_path, "deepseek2_lite")).transformer
    assert config.moe_layer_freq == [0] + [1] * 26
    assert (config.num_moe_experts, config.moe_router_topk) == (64, 6)
    assert config.moe_router_pre_softmax
    assert config.moe_router_topk_scaling_factor is None
    assert config.moe_router_dtype == "fp32"
    assert config.moe_shared_expert_intermediate_size == 2 * 1408
    assert (config.rope_type, config.rotary_scaling_factor) == ("yarn", 40)
    assert (config.mscale, config.mscale_all_dim) == (0.707, 0.707)
    assert (config.q_lora_rank, config.kv_lora_rank) == (None, 512)


def test_dropout_may_be_chosen(tmp_path):
    run = parse(folder_of(tmp_path, "llama32-1b"), "--hidden-dropout", "0.2")
    assert run.transformer.hidden_dropout == 0.2


def test_every_flag_that_is_checked_is_an_option():
    known = {action.dest for action in build_parser()._actions}
    for config in PUBLISHED.values():
        model = architectures.Model(
            next(a for a in architectures.ARCHITECTURES if [a.name] == config["architectures"]),
            config,
        )
        assert set(architectures.flags_of(model, ".")) <= known


def test_every_contradiction_is_named(tmp_path):
    folder = folder_of(tmp_path, "deepseek2_lite")
    with pytest.raises(UserError) as refusal:
        parse(folder, "--num-layers", "4", "--qk-head-dim", "128", "--moe-layer-freq", "1")
    text = str(refusal.value)
    assert "--num-layers is 4 here and 27 there" in text
    assert f"--moe-layer-freq is 1 here and [0,{'1,' * 25}1] there" in text
    assert "--qk-head-dim" not in text, "it equals the checkpoint's value"
    assert "Leave these flags out" in text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama31-8b", ("--position-embedding-type", "learned_absolute"), "rope there"),
        ("llama31-8b", ("--rotary-base", "10000"), "--rotary-base is 10000.0 here and 500000.0"),
        ("llama31-8b", ("--num-experts", "8"), "--num-moe-experts is 8 here and None there"),
        ("llama31-8b", ("--qk-layernorm",), "--qk-layernorm is True here and False there"),
        (
            "llama32-1b",
            ("--untie-embeddings-and-output-weights",),
            "--untie-embeddings-and-output-weights is True here and False there",
        ),
        ("llama31-8b", ("--load", "x", "--finetune"), "both name the weights to start from"),
        ("llama31-8b", ("--save", "x", "--save-hf", "y", "--train-iters", "0"), "remove --save"),
        ("llama31-8b", ("--transformer-impl", "transformer_engine"), "only the local layers"),
    ],
)
def test_what_contradicts_a_checkpoint_is_refused(tmp_path, name, options, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        parse(folder_of(tmp_path, name), *options)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama31-8b", {"architectures": ["MistralForCausalLM"]}, "names MistralForCausalLM; --lo"),
        ("llama31-8b", {"architectures": None}, "names no architecture"),
        ("llama31-8b", {"attention_bias": True}, "attention_bias; here the projections"),
        ("llama31-8b", {"hidden_act": "gelu"}, "hidden_act 'gelu'; here it is silu"),
        ("llama31-8b", {"quantization_config": {"bits": 4}}, "give the weights in bf16"),
        ("llama31-8b", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "scaling 'dynamic'"),
        (
            "llama31-8b",
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            "low_freq_factor 2.0; megatron-core computes 1.0",
        ),
        ("deepseek2_lite", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek2_lite", {"norm_topk_prob": True}, "norm_topk_prob True; here it is False"),
        ("deepseek2_lite", {"rope_scaling": YARN | {"mscale": 0}}, "and no mscale"),
        ("deepseek2_lite", {"rope_scaling": YARN | {"truncate": False}}, "YaRN with truncate"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message):
        parse(folder_of(tmp_path, name, **changes))


def test_a_config_that_is_missing_or_broken_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json; name a folder"):
        parse(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        parse(str(tmp_path))
    short = dict(PUBLISHED["llama31-8b"])
    del short["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(short))
    with pytest.raises(UserError, match="has no hidden_size"):
        parse(str(tmp_path))


def test_an_epsilon_that_transformers_would_ignore_is_said(tmp_path):
    run = parse(folder_of(tmp_path, "deepseek2_lite", rms_norm_eps=1e-5))
    assert any("epsilon of 1e-05 here and of 1e-06 in transformers" in note for note in run.notes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_command_line_is_described_as_the_config_it_came_from(tmp_path, name):
    """The config.json that `--save-hf` writes for a command line results in the same flags."""
    run = parse(folder_of(tmp_path, name))
    model = flags.describe(run.args)
    again = architectures.flags_of(model, "described")
    assert again == architectures.flags_of(run.hf, "published")
    assert model.config["architectures"] == PUBLISHED[name]["architectures"]


def test_what_transformers_cannot_hold_is_refused_before_training():
    with pytest.raises(UserError) as refusal:
        parse_args([*MINIMAL, "--save-hf", "out"])
    text = str(refusal.value)
    assert text.startswith("--save-hf writes a LlamaForCausalLM, which cannot express this model: ")
    assert "--normalization is LayerNorm and must be RMSNorm" in text
    assert "--position-embedding-type is learned_absolute and must be rope" in text
    options = [*without_split(DEEPSEEK_FLAGS), "--save-hf", "out", "--mock-data"]
    parse_args(options)
    with pytest.raises(UserError, match="intermediate-size is 96 and must be 64"):
        parse_args([*options, "--moe-shared-expert-intermediate-size", "96"])
    with pytest.raises(UserError, match="none were given; give --load or --load-hf"):
        parse_args([*MINIMAL, "--save-hf", "out", "--train-iters", "0"])


def test_a_vocabulary_that_does_not_fit_is_refused():
    model = architectures.Model(architectures.LLAMA, {"vocab_size": 120})
    args = Namespace(load_hf="folder")
    assert flags.check_vocabulary(args, model, 100) == 120, "the checkpoint's rows all stay"
    with pytest.raises(UserError, match="has 121 ids, but the vocabulary of --load-hf folder has"):
        flags.check_vocabulary(args, model, 121)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_those_of_transformers(factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    published = PUBLISHED["llama31-8b"] | {"head_dim": 128}
    published["rope_scaling"] = published["rope_scaling"] | {"factor": factor}
    theirs, scale = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**published), "cpu")
    found = rope.llama3_flags(published)
    ours = RotaryEmbedding(
        128,
        1.0,
        rotary_base=found["rotary_base"],
        rope_scaling=found["use_rope_scaling"],
        rope_scaling_factor=found["rope_scaling_factor"],
        use_cpu_initialization=True,
    )
    assert scale == 1.0
    torch.testing.assert_close(ours.inv_freq, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"beta_fast": 4},
    ],
)
def test_yarn_is_that_of_transformers(changes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    published = dict(PUBLISHED["deepseek2_lite"])
    published["rope_scaling"] = published["rope_scaling"] | changes
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](deepseek_configuration(**published), "cpu")
    found = rope.yarn_flags(published)
    ours = YarnRotaryEmbedding(
        64,
        rotary_base=found["rotary_base"],
        scaling_factor=found["rotary_scaling_factor"],
        use_cpu_initialization=True,
        **{
            name: found[name]
            for name in (
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
            )
        },
    )
    angles, concentration = ours.get_emb(1000)
    torch.testing.assert_close(angles[1, 0, 0, :32], theirs, rtol=1e-6, atol=0)
    assert concentration == pytest.approx(factor, rel=1e-12)
