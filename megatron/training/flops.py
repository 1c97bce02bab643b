"""Floating-point operations of a training iteration, for --log-throughput."""

import argparse


def flops_per_token(args: argparse.Namespace) -> float:
    """Those of the matmuls, forward once and backward twice that, a token.

    Projections, Q K^T and P V with a causal mask (half of the square), MLP or the experts that a
    token is sent to, routers, and the output layer.
    """
    multiplications = args.hidden_size * args.padded_vocab_size
    for has_experts in _layers(args):
        multiplications += _attention(args) + (_experts(args) if has_experts else _mlp(args))
    return 3 * 2 * multiplications


def _layers(args: argparse.Namespace) -> list[int]:
    """For each layer, whether it has experts."""
    every = args.moe_layer_freq
    if not args.num_moe_experts:
        return [0] * args.num_layers
    if isinstance(every, list):
        return every
    return [int(layer % every == 0) for layer in range(args.num_layers)]


def _attention(args: argparse.Namespace) -> float:
    s, h, heads = args.seq_length, args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        head, keys = heads * args.kv_channels, args.num_query_groups * args.kv_channels
        return h * (head + 2 * keys) + head * h + s * head
    of_scores = args.qk_head_dim + args.qk_pos_emb_head_dim
    rank, q_rank = args.kv_lora_rank, args.q_lora_rank
    query = heads * of_scores
    projections = h * query if q_rank is None else q_rank * (h + query)
    projections += h * (rank + args.qk_pos_emb_head_dim)
    projections += rank * heads * (args.qk_head_dim + args.v_head_dim)
    projections += heads * args.v_head_dim * h
    return projections + s / 2 * heads * (of_scores + args.v_head_dim)


def _mlp(args: argparse.Namespace) -> float:
    return _gates(args) * args.hidden_size * args.ffn_hidden_size


def _experts(args: argparse.Namespace) -> float:
    features = args.moe_router_topk * args.moe_ffn_hidden_size
    features += args.moe_shared_expert_intermediate_size or 0
    return args.hidden_size * (_gates(args) * features + args.num_moe_experts)


def _gates(args: argparse.Namespace) -> int:
    """Matrices of an MLP."""
    return 3 if args.swiglu or args.quick_geglu else 2
