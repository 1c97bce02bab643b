"""Report flags without effect as errors, because silently ignoring a flag is misleading.

`UNREAD` lists the flags that are not read by any code that this program uses, with the reason. The
local layers are megatron-core's layers without Transformer Engine (`--transformer-impl local`).
`NEEDS` lists the flags that have an effect only together with another flag. A flag that disables
something, or that is set to its default value, is always accepted, because the run then does what
the flag requests.

All other flags are read by some code, which tests/data/option_readers.txt lists.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.training.errors import UserError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TE = "only Transformer Engine's layers read it"
_INFERENCE = "it is for inference"
_SOFTMAX_ONLY = "the local layers have softmax attention only"
_FSDP = "this trainer wraps the model for plain data parallelism, not with FSDP"
_MUON = "the optimizers here are adam and sgd"
_MAMBA = "it is for models with Mamba layers"

#: names of the flags that neither the local layers nor this trainer reads, grouped by reason
_UNREAD_BY_REASON = (
    (
        _TE,
        """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend
        fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 fp8_param_gather keep_fp8_transpose_cache
        reuse_grad_buf_for_mxfp8_param_ag disable_parameter_transpose_cache
        fp4_recipe fp4_param fp4_quantizer_factory
        moe_router_padding_for_fp8 moe_router_padding_for_quantization
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size
        use_te_activation_func use_te_rng_tracker fused_single_qkv_rope symmetric_ar_type
        use_kitchen use_kitchen_attention kitchen_attention_backend batch_invariant_mode
        qk_clip_alpha qk_clip_threshold use_fused_weighted_squared_relu
        delay_wgrad_compute ep_overlap_early_attn_memory_release
        """,
    ),
    (
        _INFERENCE,
        """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill
        """,
    ),
    (
        _SOFTMAX_ONLY,
        """
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads
        """,
    ),
    (
        _FSDP,
        """
        use_megatron_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion
        suggested_communication_unit_size preserve_fp32_weights fsdp_double_buffer
        outer_dp_sharding_strategy fsdp_manual_registration init_model_with_meta_device
        """,
    ),
    (
        _MUON,
        """
        muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        """,
    ),
    (
        _MAMBA,
        """
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        use_mamba_mem_eff_path
        """,
    ),
)

#: reason why each flag is not read, by the name of the flag
UNREAD: dict[str, str] = {
    name: why for why, names in _UNREAD_BY_REASON for name in names.split()
} | {
    "apply_residual_connection_post_layernorm": "no layer of megatron-core reads it",
    "cuda_graph_use_single_mempool": "no code of megatron-core reads it",
    "fp16_lm_cross_entropy": "no code of megatron-core's GPT model reads it",
    "heterogeneous_block_specs": "its per-layer specifications are a JSON file that needs another "
    "configuration class, which this program has no flag for",
    "max_seqlen_per_dp_cp_rank": "it is for hybrid context parallelism, which is refused",
    "moe_enable_routing_replay": "it is for reinforcement learning, whose trainer replays routes",
    "moe_per_layer_logging": "the log shows the mean over the layers",
    "moe_router_topk_limited_devices": "it is deprecated; give --moe-router-num-groups and "
    "--moe-router-group-topk",
    "moe_token_dropping": "megatron-core does not support it; give --moe-expert-capacity-factor",
    "mrope_section": "positions have one dimension here",
}

#: flags that have an effect only on a CUDA device
CUDA_ONLY = _names("""
    enable_autocast autocast_dtype disable_bf16_reduced_precision_matmul enable_cuda_graph
    external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_retain_backward_graph
    cuda_graph_warmup_steps nccl_ub disable_symmetric_registration use_ring_exchange_p2p
    optimizer_cpu_offload
""")


@dataclass(frozen=True)
class Need:
    """A condition that must be met for some flags to have an effect."""

    what: str  #: text that describes the condition in the error message, usually a flag
    met: Callable[[argparse.Namespace], object]  #: function that tests the condition
    flags: frozenset[str]  #: names of the flags that have an effect only under this condition


def _need(what: str, met: Callable[[argparse.Namespace], object], flags: str) -> Need:
    return Need(what, met, _names(flags))


def _has_rope(args: argparse.Namespace) -> bool:
    return args.position_embedding_type == "rope" or args.use_rotary_position_embeddings


NEEDS = (
    _need(
        "--num-experts",
        lambda args: args.num_moe_experts,
        """
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        moe_layer_freq moe_ffn_hidden_size moe_router_load_balancing_type moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing
        moe_grouped_gemm moe_use_legacy_grouped_gemm moe_aux_loss_coeff moe_z_loss_coeff
        moe_input_jitter_eps moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_token_drop_policy moe_layer_recompute moe_permute_fusion moe_router_fusion
        moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms
        overlap_moe_expert_parallel_comm expert_model_parallel_size expert_tensor_parallel_size
        """,
    ),
    _need(
        "--multi-latent-attention",
        lambda args: args.multi_latent_attention,
        """
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
        rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale
        mscale_all_dim
        """,
    ),
    _need(
        "an attention without --multi-latent-attention",
        lambda args: not args.multi_latent_attention,
        """
        add_qkv_bias softmax_scale no_rope_freq use_rope_scaling rotary_interleaved qk_l2_norm
        rotary_seq_len_interpolation_factor attention_output_gate
        """,
    ),
    _need(
        "--position-embedding-type rope or --multi-latent-attention",
        lambda args: _has_rope(args) or args.multi_latent_attention,
        """
        rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor
        use_rope_scaling no_rope_freq apply_rope_fusion
        """,
    ),
    _need("--use-rope-scaling", lambda args: args.use_rope_scaling, "rope_scaling_factor"),
    _need(
        "--rope-type yarn (the default)",
        lambda args: args.rope_type in (None, "yarn"),
        "original_max_position_embeddings beta_fast beta_slow mscale",
    ),
    _need("--window-size", lambda args: args.window_size, "window_attn_skip_freq"),
    _need("--mtp-num-layers", lambda args: args.mtp_num_layers, "mtp_loss_scaling_factor"),
    _need(
        "--recompute-granularity full",
        lambda args: args.recompute_granularity == "full",
        "recompute_method recompute_num_layers distribute_saved_activations",
    ),
    _need(
        "--recompute-granularity selective",
        lambda args: args.recompute_granularity == "selective",
        "recompute_modules",
    ),
    _need(
        "--moe-token-dispatcher-type flex",
        lambda args: args.moe_token_dispatcher_type == "flex",
        "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms",
    ),
    _need("--moe-grouped-gemm", lambda args: args.moe_grouped_gemm, "moe_use_legacy_grouped_gemm"),
    _need(
        "--moe-expert-capacity-factor",
        lambda args: args.moe_expert_capacity_factor,
        "moe_token_drop_policy moe_pad_expert_input_to_capacity",
    ),
    _need(
        "--moe-router-enable-expert-bias",
        lambda args: args.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate",
    ),
    _need(
        "--moe-router-group-topk", lambda args: args.moe_router_group_topk, "moe_router_num_groups"
    ),
    _need(
        "--moe-shared-expert-intermediate-size",
        lambda args: args.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate moe_shared_expert_overlap",
    ),
    _need(
        "--moe-router-load-balancing-type with a loss",
        lambda args: args.moe_router_load_balancing_type not in ("none", "sinkhorn"),
        "moe_aux_loss_coeff",
    ),
    _need(
        "--bias-activation-fusion",
        lambda args: args.bias_activation_fusion or torch.cuda.is_available(),
        "activation_func_fp8_input_store",
    ),
    _need(
        "--cross-entropy-loss-fusion",
        lambda args: args.cross_entropy_loss_fusion,
        "cross_entropy_fusion_impl",
    ),
    _need("--enable-autocast", lambda args: args.enable_autocast, "autocast_dtype"),
    _need(
        "--defer-embedding-wgrad-compute",
        lambda args: args.defer_embedding_wgrad_compute,
        "wgrad_deferral_limit",
    ),
    _need(
        "--fp16",
        lambda args: args.fp16,
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    _need("--fp16 or --bf16", lambda args: args.fp16 or args.bf16, "loss_scale"),
    _need("--bf16", lambda args: args.bf16, "disable_bf16_reduced_precision_matmul"),
    _need("--decoupled-lr", lambda args: args.decoupled_lr, "decoupled_min_lr"),
    _need("--optimizer sgd", lambda args: args.optimizer == "sgd", "sgd_momentum"),
    _need(
        "--optimizer adam (the default)",
        lambda args: args.optimizer in (None, "adam"),
        "adam_beta1 adam_beta2 adam_eps",
    ),
    _need(
        "--use-precision-aware-optimizer",
        lambda args: args.use_precision_aware_optimizer,
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
    ),
    _need(
        "--optimizer-cpu-offload",
        lambda args: args.optimizer_cpu_offload,
        """
        optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
        """,
    ),
    _need(
        "--overlap-grad-reduce",
        lambda args: args.overlap_grad_reduce or args.overlap_param_gather,
        "bucket_size",
    ),
    _need("--overlap-param-gather", lambda args: args.overlap_param_gather, "align_param_gather"),
    _need(
        "--use-distributed-optimizer",
        lambda args: args.use_distributed_optimizer,
        "pad_buckets_for_high_nccl_busbw",
    ),
    _need(
        "--lr-decay-style WSD",
        lambda args: args.lr_decay_style == "WSD",
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    ),
    _need(
        "--tensorboard-dir, --wandb-project or --mlflow-experiment",
        lambda args: (
            (args.tensorboard_dir, args.wandb_project, args.mlflow_experiment) != (None, None, None)
        ),
        "tensorboard_log_interval log_memory_to_tensorboard",
    ),
    _need(
        "--wandb-project",
        lambda args: args.wandb_project is not None,
        "wandb_exp_name wandb_save_dir wandb_entity",
    ),
    _need(
        "--mlflow-experiment",
        lambda args: args.mlflow_experiment is not None,
        "mlflow_run_name mlflow_tracking_uri",
    ),
    _need("--timing-log-level above 0", lambda args: args.timing_log_level, "timing_log_option"),
    _need(
        "--cuda-graph-impl none (the default), because a graph replays only kernels",
        lambda args: args.cuda_graph_impl in (None, "none") and not args.enable_cuda_graph,
        "log_max_attention_logit",
    ),
    _need("--data-path", lambda args: not args.mock_data, "data_cache_path"),
    _need(
        "--data-path",
        lambda args: args.data_path is not None or args.train_iters == 0,  # as in a conversion
        "split",
    ),
    _need(
        "--valid-data-path or --test-data-path",
        lambda args: args.train_data_path is None or args.valid_data_path or args.test_data_path,
        "eval_iters",
    ),
    _need(
        "--valid-data-path",
        lambda args: args.train_data_path is None or args.valid_data_path,
        "eval_interval",
    ),
    _need(
        "--position-embedding-type learned_absolute",
        lambda args: args.position_embedding_type == "learned_absolute" and not _has_rope(args),
        "reset_position_ids",
    ),
    _need(
        "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
        lambda args: args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction,
        "lr_warmup_init",
    ),
    _need(
        "--load",
        lambda args: args.load is not None,
        "allow_changed_run override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    ),
)


def check_effects(
    args: argparse.Namespace, given: set[str], default_of: Callable[[str], object]
) -> None:
    """Check that every flag on the command line has an effect.

    Args:
        args: all flags, including those set by a Hugging Face checkpoint.
        given: names of the flags on the command line.
        default_of: function that returns the default value of a flag.

    Raises:
        UserError: if a flag would have no effect; the message gives the reason and a remedy.
    """
    local = args.transformer_impl in (None, "local")
    for name in sorted(given):
        value = getattr(args, name)
        if value == "" or value == [""]:
            raise UserError(f"--{name.replace('_', '-')} is empty; give it a value, or remove it")
        if value in (None, False) or value == default_of(name):
            continue
        flag = "--" + name.replace("_", "-")
        if name in UNREAD and (local or UNREAD[name] != _TE):
            raise UserError(f"{flag} does nothing here: {UNREAD[name]}; remove it")
        for need in NEEDS:
            if name in need.flags and not need.met(args):
                raise UserError(f"{flag} acts only with {need.what}; add that, or remove {flag}")
        if name in CUDA_ONLY and not torch.cuda.is_available():
            raise UserError(f"{flag} acts only on a CUDA device, and there is none; remove it")
