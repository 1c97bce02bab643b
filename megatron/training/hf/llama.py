"""Map Llama 2 and 3 (LlamaForCausalLM) to this program's flags and model tensors.

transformers and megatron-core both rotate pairs of rows that are half a head apart. The rows are
therefore reordered only to form query groups.
"""

import argparse
from typing import Any

from megatron.training.hf.layouts import Layout, Source, columns, query_groups, rows, vocabulary
from megatron.training.hf.layouts import whole as same
from megatron.training.hf.rope import LLAMA3, Unsupported, llama3_flags

#: Flag values that all models with Llama's blocks share; any other value would change the logits.
#: A test of hf/fields.py, which classifies all configuration fields, ensures that none is missing.
BLOCKS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "quick_geglu": False,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "window_size": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "mtp_num_layers": None,
    "window_attn_skip_freq": None,
    "mrope_section": None,
    "heterogeneous_block_specs": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "moe_apply_probs_on_input": False,
    "moe_expert_capacity_factor": None,
    "moe_input_jitter_eps": None,  # megatron-core adds this noise even in evaluation
    "moe_latent_size": None,
    "moe_router_force_load_balancing": False,
    "moe_router_load_balancing_type": "aux_loss",  # every kind in LOSSES_ONLY is accepted
    "moe_router_topk_limited_devices": None,
}

#: Types of load balancing that may add to the loss, but do not affect the choice of experts.
LOSSES_ONLY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def flags(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the flags that describe the model of this config.json.

    Raises:
        Unsupported: if the config.json requires a feature that this program lacks.
    """
    check_blocks(config)
    heads = config["num_attention_heads"]
    return (
        BLOCKS
        | {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "qk_layernorm": False,
            "num_moe_experts": None,
            "multi_latent_attention": False,
        }
        | llama3_flags(config)
    )


def check_blocks(config: dict[str, Any]) -> None:
    """Raise `Unsupported` for features that this program's Llama and DeepSeek blocks lack."""
    if config.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"hidden_act {config['hidden_act']!r}; here it is silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise Unsupported(f"{name}; here the projections have no biases")
    if config.get("quantization_config"):
        raise Unsupported("quantization_config; give the weights in bf16, fp16 or fp32")


def config(args: argparse.Namespace) -> dict[str, Any]:
    """Return most entries of the config.json of a model trained with `args`.

    Callers add the other entries, such as `model_type` and `vocab_size`.
    """
    settings: dict[str, Any] = {
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups,
        "head_dim": args.kv_channels,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "rope_theta": float(args.rotary_base),
        "max_position_embeddings": args.max_position_embeddings,
    }
    if args.use_rope_scaling:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": args.rope_scaling_factor,
            **LLAMA3,
        }
    return settings


def tensors(config: dict[str, Any]) -> dict[str, Layout]:
    """Return how each model tensor is assembled from tensors of a Hugging Face checkpoint.

    The keys are the names of the model tensors in the unpartitioned model.
    """
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    layouts = outside_of_layers(config)
    for index in range(config["num_hidden_layers"]):
        target, source = f"decoder.layers.{index}.", f"model.layers.{index}."
        query, key, value = (
            Source(f"{source}self_attn.{name}_proj.weight", (count * width, hidden))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        output = Source(f"{source}self_attn.o_proj.weight", (hidden, heads * width))
        layouts |= norms(target, source, hidden)
        layouts |= {
            f"{target}self_attention.linear_qkv.weight": query_groups(
                query, key, value, groups=groups
            ),
            f"{target}self_attention.linear_proj.weight": columns(output),
        }
        layouts |= gated(target + "mlp.", source + "mlp.", hidden, config["intermediate_size"])
    return layouts


def outside_of_layers(config: dict[str, Any]) -> dict[str, Layout]:
    """Return how the embedding, the final norm and the output layer map to checkpoint tensors.

    A tied output layer maps to the embedding of the checkpoint. The model holds a copy of the
    embedding only if the last pipeline stage is not also the first.
    """
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    embedding = vocabulary(Source("model.embed_tokens.weight", (vocab, hidden)))
    tied = config.get("tie_word_embeddings", False)
    head = embedding if tied else vocabulary(Source("lm_head.weight", (vocab, hidden)))
    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": same(Source("model.norm.weight", (hidden,))),
        "output_layer.weight": head,
    }


def norms(target: str, source: str, hidden: int) -> dict[str, Layout]:
    """Return how the weights of a layer's norms map to checkpoint tensors.

    One norm precedes attention; the other precedes the MLP.
    """
    return {
        f"{target}{ours}.weight": same(Source(f"{source}{theirs}.weight", (hidden,)))
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        )
    }


def gated(target: str, source: str, hidden: int, inner: int) -> dict[str, Layout]:
    """Return how the weights of a gated MLP map to checkpoint tensors.

    The gate and up projections form one model tensor.
    """
    gate, up = (Source(f"{source}{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    down = Source(f"{source}down_proj.weight", (hidden, inner))
    return {
        f"{target}linear_fc1.weight": rows(gate, up),
        f"{target}linear_fc2.weight": columns(down),
    }
