"""List the configuration fields in which later releases of megatron-core differ from 0.16.1.

The flags of this program correspond to the fields of 0.16.1. A command line therefore has the same
meaning with every supported release, and a flag that the installed release lacks is an error.
"""

#: fields that a release adds; they have no flag and keep megatron-core's defaults
_ADDED = {
    "0.17": """
        cpu_offloading_retain_pinned_cpu_buffers fp4_param_gather
        fsdp_all_gather_in_start_param_sync fsdp_db_use_persist_buf_on_alloc_fail
        fused_residual_rmsnorm inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels lion_beta1
        lion_beta2 megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_main_params_dtype mla_down_proj_fusion moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_pad_experts_for_cuda_graph_inference
        moe_permute_fusion_into_hybridep moe_router_force_biased mtp_hybrid_override_pattern
        mtp_use_repeated_layer muon_coefficient_type muon_scalar_optimizer
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_width_mult nccl_all_reduce_for_prefill optimizer_cuda_graph
        param_name_patterns_for_fp32_local_accumulation use_mup
    """,
    "0.18": """
        adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method
        cuda_graph_modules fine_grained_offloading_max_inflight_offloads fp8_output_proj
        grad_norm_skip_threshold high_priority_a2a_comm_stream inference_cuda_graph_scope
        inference_moe_token_dispatcher_type megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_use_decoupled_grad
        mlp_chunks_for_training moe_expert_rank_capacity_factor
        moe_hybridep_num_sms_preprocessing moe_mlp_glu_interleave_size moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_page_size moe_single_grouped_bias moe_single_grouped_weight
        muon_nesterov num_buckets overlap_dispatch_backward_with_experts_wgrad
        soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo
        use_grouped_gemm_for_dense_mlp use_layer_wise_distributed_optimizer
        use_transformer_engine_op_fuser
    """,
    "0.19": """
        activation_offload_fraction delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq
        dsa_kernel_backend experimental_attention_variant_loss_scale_func
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        flash_attention_version gtp_weight_remat_size mamba_training_ssm_states_dtype
        megatron_fsdp_max_pool_double_buffer moe_flex_dispatcher_num_sms moe_grad_scale_func
        moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
        mtp_detach_heads mtp_grad_scale_func tensor_parallel_num_weight_shards
        use_grouped_gemm_for_shared_expert
    """,
}
LATER = frozenset(name for names in _ADDED.values() for name in names.split())
#: fields of 0.16.1 that at least one later supported release has removed
REMOVED = frozenset(
    (
        *("async_tensor_model_parallel_allreduce", "moe_extended_tp"),
        *("moe_use_legacy_grouped_gemm", "muon_use_nesterov", "preserve_fp32_weights"),
    )
)
