"""Check the flags for mixtures of experts and multi-latent attention.

A model that cannot be built here, or a flag that would be ignored, causes an error.
"""

import argparse

from megatron.training.arguments.defaults import installed
from megatron.training.errors import UserError

#: name of the package that each flag requires, by the name of the flag
_PACKAGES = {
    "moe_permute_fusion": "transformer_engine",
    "moe_router_fusion": "transformer_engine",
    "moe_latent_size": "transformer_engine",
}
#: load balancing types that megatron-core's router supports
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
#: flags that this trainer does not read, each with the reason
_UNREAD = {
    "cache_mla_latents": "it is for inference",
    "qk_clip": "the optimizers here do not clip the weights of queries and keys",
}


def check_experts(args: argparse.Namespace) -> None:
    """Check that a mixture of experts can be built and trained as the flags request.

    Raises:
        UserError: if a flag is invalid or needs another flag or package.
    """
    if not args.num_moe_experts:
        return
    local = args.transformer_impl == "local"
    for name, package in _PACKAGES.items():
        if local and getattr(args, name) and not installed(package):
            raise UserError(
                f"--{name.replace('_', '-')} needs the package {package}, which is not installed; "
                "remove it"
            )
    if args.moe_token_dispatcher_type == "flex" and not installed("deep_ep"):
        raise UserError(
            "--moe-token-dispatcher-type flex needs the package deep_ep, which is not installed; "
            "give alltoall or allgather"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UserError(
            "--num-experts with --tensor-model-parallel-size above 1 needs --sequence-parallel; "
            "add it"
        )
    if local and args.moe_grouped_gemm:
        _check_grouped(args)
    _check_expert_sizes(args)
    _check_balancing(args)
    if args.expert_model_parallel_size > 1 and args.use_cpu_initialization:
        raise UserError(
            "--use-cpu-initialization gives the experts of every expert-parallel rank the same "
            "weights; remove it: each expert then gets its own weights, even on a CPU"
        )


def _check_grouped(args: argparse.Namespace) -> None:
    """Check that the local layers can group the experts.

    Raises:
        UserError: if this megatron-core has no grouped experts, or if they need other flags.
    """
    from megatron.core.transformer.moe import experts  # its import takes seconds

    if not hasattr(experts, "GroupedMLP"):
        raise UserError(
            "--moe-grouped-gemm does nothing here: since release 0.17, megatron-core has no "
            "grouped experts among the local layers; remove it"
        )
    needed = {"--bf16": args.bf16, "--disable-bias-linear": args.add_bias_linear is False}
    if missing := [flag for flag, given in needed.items() if not given]:
        raise UserError(f"--moe-grouped-gemm needs {' and '.join(missing)}; add the latter")


def _check_expert_sizes(args: argparse.Namespace) -> None:
    experts, ranks = args.num_moe_experts, args.expert_model_parallel_size
    if experts % ranks:
        raise UserError(
            f"--num-experts {experts} cannot be spread evenly over --expert-model-parallel-size "
            f"{ranks}; make it a multiple of {ranks}"
        )
    topk = args.moe_router_topk
    if topk is not None and topk > experts:
        raise UserError(
            f"--moe-router-topk {topk} is above --num-experts {experts}; lower the former"
        )
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise UserError(
            f"--moe-layer-freq lists {len(pattern)} layers, but --num-layers is {args.num_layers}; "
            "give a 0 (dense) or a 1 (experts) for each, as in [0]+[1]*26"
        )
    if args.moe_shared_expert_intermediate_size and args.add_bias_linear is not False:
        raise UserError(
            "--moe-shared-expert-intermediate-size needs --disable-bias-linear, because "
            "megatron-core's shared experts have no biases; add --disable-bias-linear"
        )


def _check_balancing(args: argparse.Namespace) -> None:
    """Raise `UserError` for an unknown load balancing type, which megatron-core would ignore."""
    kinds = args.moe_router_load_balancing_type or []
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in BALANCING:
            raise UserError(
                f"--moe-router-load-balancing-type {kind} is unknown; give "
                f"{', '.join(BALANCING[:-1])} or {BALANCING[-1]}"
            )


def check_mla(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags that the layers ignore or that contradict multi-latent attention.

    The check applies to the local layers, which are megatron-core's layers without Transformer
    Engine.

    Raises:
        UserError: if there is such a flag; the message names the flag and the reason.
    """
    if args.transformer_impl != "local":
        return
    for name, why in _UNREAD.items():
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} does nothing here: {why}; remove it")
    if "layernorm" in (args.recompute_modules or ()) and not installed("transformer_engine"):
        raise UserError(
            "--recompute-modules layernorm needs Transformer Engine, which is not installed; leave "
            "layernorm out"
        )
    if not args.multi_latent_attention:
        return
    groups = args.num_query_groups
    if groups is not None and groups != args.num_attention_heads:
        raise UserError(
            f"--num-query-groups {groups} contradicts --multi-latent-attention, where every head "
            "has a key and a value of its own; remove it"
        )
