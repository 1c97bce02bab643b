"""Map DeepSeek-V2-Lite (DeepseekV2ForCausalLM) to this program's flags and model tensors.

In the positional part of queries and keys, transformers rotates pairs of neighboring rows as
complex numbers. megatron-core's multi-latent attention first moves the rows of each pair into two
halves, in queries and keys alike. The dot product of a query and a key therefore has the same
terms, and the conversion keeps the order of the rows.

In transformers, the norm of a latent vector has an epsilon of 1e-6, and all other norms use
`rms_norm_eps`. In this program, all norms use `--norm-epsilon`. In the published models,
`rms_norm_eps` is also 1e-6.
"""

import argparse
from typing import Any

from megatron.training.hf.layouts import Layout, Source, columns, rows, whole
from megatron.training.hf.llama import BLOCKS, check_blocks, gated, norms, outside_of_layers
from megatron.training.hf.rope import Unsupported, yarn_flags

LATENT_NORM_EPSILON = 1e-6  #: epsilon of the latent vector's norm; transformers hard-codes it


def flags(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the flags that describe the model of this config.json.

    Raises:
        Unsupported: if the config.json requires a feature that this program lacks.
    """
    check_blocks(config)
    _check_attention(config)
    _check_routing(config)
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    return (
        BLOCKS
        | {
            "num_layers": layers,
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": config["num_attention_heads"],
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": config.get("q_lora_rank"),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "num_moe_experts": config["n_routed_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": _shared_size(config),
            "moe_shared_expert_gate": False,
            "moe_layer_freq": [0] * dense + [1] * (layers - dense),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": _scaling(config.get("routed_scaling_factor")),
            "moe_router_enable_expert_bias": False,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "use_rope_scaling": False,
        }
        | yarn_flags(config)
    )


def _check_attention(config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    if (config.get("num_key_value_heads") or heads) != heads:
        raise Unsupported(
            f"num_key_value_heads {config['num_key_value_heads']}; here it is {heads}"
        )


def _check_routing(config: dict[str, Any]) -> None:
    """Raise `Unsupported` for routing settings that this program does not implement.

    They are an error even if transformers 5 ignores them, because they would change the output.
    """
    for name, supported, why in (
        ("topk_method", "greedy", "megatron-core ranks groups of experts by a different sum"),
        ("scoring_func", "softmax", "DeepSeek-V2 scores experts by a softmax"),
        ("norm_topk_prob", False, "the weights of the chosen experts are not normalized"),
        ("moe_layer_freq", 1, "every layer after the dense ones has experts"),
    ):
        value = config.get(name)
        if value is not None and value != supported:
            raise Unsupported(f"{name} {value!r}; here it is {supported!r}: {why}")
    if not config.get("n_routed_experts") or not config.get("n_shared_experts"):
        raise Unsupported("no routed or no shared experts; DeepSeek-V2 has both")
    if config.get("first_k_dense_replace", 0) >= config["num_hidden_layers"]:
        raise Unsupported("only dense layers; DeepSeek-V2 has layers with experts")


def _shared_size(config: dict[str, Any]) -> int:
    return config["n_shared_experts"] * config["moe_intermediate_size"]


def _scaling(factor: float | None) -> float | None:
    """Return the router's scaling factor for megatron-core, where None stands for a factor of 1."""
    return None if factor in (None, 1) else float(factor)


def config(args: argparse.Namespace) -> dict[str, Any]:
    """Return most entries of the config.json of a model trained with `args`.

    Callers add the other entries, such as `model_type` and `vocab_size`.
    """
    inner, shared = args.moe_ffn_hidden_size, args.moe_shared_expert_intermediate_size
    pattern = layer_pattern(args.moe_layer_freq, args.num_layers)
    settings: dict[str, Any] = {
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_attention_heads,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "max_position_embeddings": args.max_position_embeddings,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_routed_experts": args.num_moe_experts,
        "n_shared_experts": (shared or 0) // inner if inner else 0,
        "num_experts_per_tok": args.moe_router_topk,
        "moe_intermediate_size": inner,
        "moe_layer_freq": 1,
        "first_k_dense_replace": [*pattern, 1].index(1),
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "rope_theta": float(args.rotary_base),
    }
    if args.rope_type == "yarn":
        settings["rope_scaling"] = {
            "type": "yarn",
            "factor": args.rotary_scaling_factor,
            "original_max_position_embeddings": args.original_max_position_embeddings,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale_all_dim,
        }
    return settings


def layer_pattern(pattern: int | list[int], layers: int) -> list[int]:
    """Return `--moe-layer-freq` as one number per layer: 1 for a layer with experts, else 0."""
    if isinstance(pattern, int):
        return [int(index % pattern == 0) for index in range(layers)]
    return list(pattern)


def tensors(config: dict[str, Any]) -> dict[str, Layout]:
    """Return how each model tensor is assembled from tensors of a Hugging Face checkpoint.

    The keys are the names of the model tensors in the unpartitioned model.
    """
    layouts = outside_of_layers(config)
    hidden = config["hidden_size"]
    for index in range(config["num_hidden_layers"]):
        target, source = f"decoder.layers.{index}.", f"model.layers.{index}."
        layouts |= norms(target, source, hidden)
        layouts |= _attention(target + "self_attention.", source + "self_attn.", config)
        target, source = target + "mlp.", source + "mlp."
        if index < config.get("first_k_dense_replace", 0):
            layouts |= gated(target, source, hidden, config["intermediate_size"])
        else:
            layouts |= _experts(target, source, config)
    return layouts


def _attention(target: str, source: str, config: dict[str, Any]) -> dict[str, Layout]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    latent, rank = config["kv_lora_rank"], config.get("q_lora_rank")
    plain, rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    queries, values = heads * (plain + rotary), config["v_head_dim"]

    def source_of(name: str, *shape: int) -> Source:
        return Source(f"{source}{name}.weight", shape)

    layouts = {
        "linear_kv_down_proj": rows(source_of("kv_a_proj_with_mqa", latent + rotary, hidden)),
        "kv_layernorm": whole(source_of("kv_a_layernorm", latent)),
        "linear_kv_up_proj": rows(source_of("kv_b_proj", heads * (plain + values), latent)),
        "linear_proj": columns(source_of("o_proj", hidden, heads * values)),
    }
    if rank is None:
        layouts["linear_q_proj"] = rows(source_of("q_proj", queries, hidden))
    else:
        layouts["linear_q_down_proj"] = rows(source_of("q_a_proj", rank, hidden))
        layouts["q_layernorm"] = whole(source_of("q_a_layernorm", rank))
        layouts["linear_q_up_proj"] = rows(source_of("q_b_proj", queries, rank))
    return {f"{target}{name}.weight": layout for name, layout in layouts.items()}


def _experts(target: str, source: str, config: dict[str, Any]) -> dict[str, Layout]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    number = config["n_routed_experts"]
    layouts = {f"{target}router.weight": whole(Source(f"{source}gate.weight", (number, hidden)))}
    for expert in range(number):
        names = f"{target}experts.local_experts.{expert}.", f"{source}experts.{expert}."
        layouts |= gated(*names, hidden, inner)
    names = f"{target}shared_experts.", f"{source}shared_experts."
    return layouts | gated(*names, hidden, _shared_size(config))
