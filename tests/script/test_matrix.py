"""Test that all commands of the experiment matrix are complete and that training accepts them."""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import train_config
from configs import scripts
from configs.datasets import DATASETS
from configs.models import MODELS
from configs.quantizations import PLACES, QUANTIZATIONS, accepted, places
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.fake_quant import policy
from megatron.fake_quant.quant_type import PREFIXES
from megatron.training.arguments.parse_args import parse_args
from tests.published import PUBLISHED, flags_of
from tests.script.meaning import MEANING
from tests.subprocesses import REPO, environment, run

CELLS = [(model, dataset, q) for model in MODELS for dataset in DATASETS for q in QUANTIZATIONS]


@pytest.fixture(scope="module")
def commands(files, tmp_path_factory):
    """Return what each script prints in a dry run, by model, dataset and quantization."""
    loop = 'while read -r script; do bash "$script" --dry-run --preset full "$@"; done'
    names = {
        cell: REPO / f"script/{cell[0]}/pretrain_{cell[0]}_{cell[1]}_{cell[2]}.sh" for cell in CELLS
    }
    done = subprocess.run(
        ["bash", "-euc", loop, "loop", *files],
        input="".join(f"{path}\n" for path in names.values()),
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=environment(LAB_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(CELLS) == 60
    return dict(zip(CELLS, map(shlex.split, lines), strict=True))


def processes(words):
    if "--nproc-per-node" not in words:
        return 1
    return int(words[words.index("--nproc-per-node") + 1])


@pytest.fixture(scope="module")
def parsed(commands):
    """Return each command as training parses it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for cell, words in commands.items():
            patch.setenv("WORLD_SIZE", str(processes(words)))
            patch.setenv("RANK", "0")
            found[cell] = parse_args(flags_of(words))
    return found


def test_the_scripts_are_the_generated_ones():
    """The scripts are those that `script/train_config.py --write-scripts` makes."""
    wanted = scripts.scripts()
    assert len(wanted) == 60
    assert scripts.generated() == sorted(wanted)
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.name} differs; generate it with --write-scripts"
        assert path.stat().st_mode & 0o111, f"{path.name} cannot be executed"


def test_stale_scripts_go_and_missing_ones_come(tmp_path, monkeypatch):
    for module in ("FOLDER", "REPO"):
        monkeypatch.setattr(scripts, module, tmp_path)
    assert scripts.write_scripts() == "60 scripts: 60 written, 0 removed"
    assert scripts.write_scripts() == "60 scripts: 0 written, 0 removed"
    own = tmp_path / "llama32-1b" / "pretrain_mine.sh"
    own.write_text("echo mine\n")
    monkeypatch.setattr(scripts, "QUANTIZATIONS", ("bf16", *places("nvfp4")))
    assert scripts.write_scripts() == "24 scripts: 18 written, 54 removed"
    assert own.exists()
    path = tmp_path / "llama32-1b" / "pretrain_llama32-1b_dolma_FA_linear_nvfp4.sh"
    assert "--quantization FA_linear_nvfp4" in path.read_text()


def test_quantizations_mean_what_training_means_by_them(parsed):
    assert set(PLACES) == set(PREFIXES) - {""}
    assert set(MEANING) == set(QUANTIZATIONS)
    for (_, _, quantization), training in parsed.items():
        chosen = policy.resolve({"custom_quant_type": training.args.custom_quant_type}, {})
        found = {op: choice.name for op, choice in chosen.choices.items()}
        assert found == dict(zip(("linear", "qk", "pv"), MEANING[quantization], strict=True))
        assert all(choice.source.startswith("flag") for choice in chosen.choices.values())


def test_a_format_alone_is_everywhere_and_its_words_say_so():
    for name in ("mxfp8", "mxfp4", "hifp8"):
        assert train_config.formats_of(name).flags == ("--custom-quant-type", name)
        assert accepted()[name] == f"{name} in linear layers, Q K^T and P V"
        chosen = policy.resolve({"custom_quant_type": name}, {}).choices
        assert [chosen[op].name for op in ("linear", "qk", "pv")] == [name] * 3
    assert accepted()["FA_mxfp4"] == "mxfp4 in Q K^T"


def test_runs_of_a_model_differ_in_nothing_but_the_formats(commands):
    """Only the type differs once the words that name the run are replaced."""
    for model in MODELS:
        seen = set()
        for dataset in DATASETS:
            for quantization in QUANTIZATIONS:
                words = list(commands[model, dataset, quantization])
                words[words.index("--custom-quant-type") + 1] = "TYPE"
                name = f"{model}_{dataset}_{quantization}"
                seen.add(tuple(word.replace(name, "RUN") for word in words))
        assert len(seen) == 1


def test_published_numbers_reach_every_command(parsed):
    for (model, _, _), training in parsed.items():
        published, args, config = PUBLISHED[model], training.args, training.transformer
        same = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
            "rms_norm_eps": config.layernorm_epsilon,
            "rope_theta": args.rotary_base,
            "initializer_range": config.init_method_std,
            "max_position_embeddings": args.max_position_embeddings,
            "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
            "attention_bias": config.add_bias_linear or config.add_qkv_bias,
        }
        assert {name: published[name] for name in same} == same
        assert config.normalization == "RMSNorm"
        assert published["hidden_act"] == "silu"
        assert config.gated_linear_unit
        assert config.activation_func is torch.nn.functional.silu
        assert args.position_embedding_type == "rope"
        assert config.hidden_dropout == config.attention_dropout == 0


def test_llama_s_heads_and_rotary_scaling(parsed):
    constants = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    for (model, _, _), training in parsed.items():
        published, args = PUBLISHED[model], training.args
        if published["model_type"] != "llama":
            continue
        heads = published["hidden_size"] // published["num_attention_heads"]
        assert training.transformer.kv_channels == published.get("head_dim", heads)
        scaling = dict(published["rope_scaling"])
        assert scaling.pop("rope_type") == "llama3"
        assert args.use_rope_scaling
        assert scaling.pop("factor") == args.rope_scaling_factor
        assert scaling == {name: constants[name].default for name in scaling}


def test_deepseek_s_attention_and_experts(parsed):
    published = PUBLISHED["deepseek2_lite"]
    yarn = published["rope_scaling"]
    for (model, _, _), training in parsed.items():
        if model != "deepseek2_lite":
            continue
        config = training.transformer
        assert config.multi_latent_attention
        assert config.qk_layernorm, "DeepSeek normalizes the compressed keys and values"
        dense, layers = published["first_k_dense_replace"], published["num_hidden_layers"]
        same = {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_nope_head_dim": config.qk_head_dim,
            "qk_rope_head_dim": config.qk_pos_emb_head_dim,
            "v_head_dim": config.v_head_dim,
            "n_routed_experts": config.num_moe_experts,
            "num_experts_per_tok": config.moe_router_topk,
            "moe_intermediate_size": config.moe_ffn_hidden_size,
            "scoring_func": config.moe_router_score_function,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor,
            "aux_loss_alpha": config.moe_aux_loss_coeff,
            "seq_aux": config.moe_router_load_balancing_type == "seq_aux_loss",
            "norm_topk_prob": not config.moe_router_pre_softmax,
        }
        assert {name: published[name] for name in same} == same
        shared = published["n_shared_experts"] * published["moe_intermediate_size"]
        assert config.moe_shared_expert_intermediate_size == shared
        assert config.moe_layer_freq == [0] * dense + [1] * (layers - dense)
        assert published["topk_method"] == "greedy"
        assert config.moe_router_num_groups is None
        assert {name: yarn[name] for name in yarn} == {
            "type": config.rope_type,
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }


#: Fields that may differ between a model and its tiny preset.
SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "vocab_multiple",
    "latent.kv_lora_rank",
    "latent.qk_nope_head_dim",
    "latent.qk_rope_head_dim",
    "latent.v_head_dim",
    "experts.n_routed_experts",
    "experts.num_experts_per_tok",
    "experts.moe_intermediate_size",
}


def leaves(fields, prefix=""):
    """Return the fields of an architecture and of its parts, with dotted names."""
    found = {}
    for name, value in fields.items():
        found |= leaves(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_tiny_preset_is_the_same_architecture(model):
    full, tiny = MODELS[model].full.architecture, MODELS[model].tiny.architecture
    kept = [
        {name: value for name, value in leaves(asdict(each)).items() if name not in SIZES}
        for each in (full, tiny)
    ]
    assert kept[0] == kept[1]
    if model == "deepseek2_lite":
        assert {"experts.routed_scaling_factor", "experts.aux_loss_alpha"} <= kept[0].keys()
    heads = full.num_attention_heads // full.num_key_value_heads
    assert tiny.num_attention_heads // tiny.num_key_value_heads == heads
    switches = [{word for word in each.flags() if word.startswith("--")} for each in (full, tiny)]
    assert switches[0] == switches[1]


@pytest.mark.parametrize("model", MODELS)
def test_the_flags_are_those_of_the_published_weights(commands, model, tmp_path, monkeypatch):
    """A command must describe the same model as the checkpoint, or `--load-hf` refuses it."""
    pytest.importorskip("megatron.training.hf")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]))
    words = commands[model, "dolma", "linear_mxfp8"]
    monkeypatch.setenv("WORLD_SIZE", str(processes(words)))
    assert parse_args([*flags_of(words), "--load-hf", str(tmp_path)]).args.load_hf == str(tmp_path)


def test_a_script_s_help_is_its_header_and_the_options():
    path = REPO / "script/llama31-8b/pretrain_llama31-8b_wikipedia_FA_mxfp8.sh"
    done = run(["bash", path, "--help"])
    assert done.returncode == 0
    assert done.stdout.startswith("Train Llama 3.1 8B on Wikipedia: mxfp8 in Q K^T.\n")
    assert "set -euo" not in done.stdout
    for option in ("--preset", "--nproc-per-node", "--tp", "--training-config", "--data-path"):
        assert option in done.stdout
