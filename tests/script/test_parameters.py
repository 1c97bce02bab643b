"""Test that the models of the matrix have the published sizes, by arithmetic and as built."""

from __future__ import annotations

import json
import shlex

import pytest

import train_config
from configs.models import MODELS
from tests import forks
from tests.published import PARAMETERS, PUBLISHED, TOKENS, flags_of
from tests.subprocesses import REPO, environment


def published_parameters(config):
    """Count the parameters from the published shapes, matrix by matrix."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    total = hidden * config["vocab_size"] * (1 if config["tie_word_embeddings"] else 2) + hidden
    for layer in range(config["num_hidden_layers"]):
        total += 2 * hidden  # input_layernorm, post_attention_layernorm
        if "kv_lora_rank" in config:
            rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
            nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
            total += hidden * heads * (nope + rope)  # q_proj
            total += hidden * (rank + rope) + rank  # kv_a_proj_with_mqa, kv_a_layernorm
            total += rank * heads * (nope + value)  # kv_b_proj
            total += heads * value * hidden  # o_proj
        else:
            head = config.get("head_dim", hidden // heads)
            total += 2 * hidden * heads * head  # q_proj, o_proj
            total += 2 * hidden * config["num_key_value_heads"] * head  # k_proj, v_proj
        if layer < config.get("first_k_dense_replace", config["num_hidden_layers"]):
            total += 3 * hidden * config["intermediate_size"]
        else:
            experts = config["n_routed_experts"] + config["n_shared_experts"]
            total += 3 * hidden * config["moe_intermediate_size"] * experts
            total += hidden * config["n_routed_experts"]  # gate
    return total


@pytest.mark.parametrize("model", MODELS)
def test_parameters_by_arithmetic(model):
    assert published_parameters(PUBLISHED[model]) == PARAMETERS[model]
    assert MODELS[model].full.architecture.parameters() == PARAMETERS[model]


def test_parameters_of_the_models_that_megatron_builds(files, capsys, tmp_path):
    request = {}
    for model, tokens in TOKENS.items():
        rank = ["--nproc-per-node", "1", "--tp", "1", "--ep", "1", "--preset", "full", "--dry-run"]
        cell = ["--model", model, "--dataset", "dolma", "--quantization", "bf16"]
        assert train_config.main([*cell, *rank, *files, "--", "--no-initialization"]) == 0
        words = shlex.split(capsys.readouterr().out)
        request[model] = {"vocabulary": tokens, "flags": flags_of(words)}
    (tmp_path / "commands.json").write_text(json.dumps(request))
    worker = REPO / "tests" / "script" / "parameters_worker.py"
    done = forks.run(worker, tmp_path / "commands.json", env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout)
    assert {model: each["parameters"] for model, each in built.items()} == PARAMETERS
    for model, each in built.items():
        assert each["vocabulary"] == PUBLISHED[model]["vocab_size"]


@pytest.mark.parametrize("model", MODELS)
def test_the_vocabulary_is_the_published_one_in_every_layout(model):
    architecture = MODELS[model].full.architecture
    for tp in (1, 2, 4, 8):
        multiple = architecture.vocab_multiple * tp
        assert -(-TOKENS[model] // multiple) * multiple == PUBLISHED[model]["vocab_size"]
