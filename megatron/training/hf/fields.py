"""Classify the fields of the model configuration by how a Hugging Face checkpoint expresses them.

A checkpoint consists of weights and a config.json. A flag that changes the logits must therefore
either be expressed in config.json or have the one value that transformers supports. Every field of
megatron-core's model configuration and every model flag is in exactly one of the classes below,
which a test compares with megatron-core's dataclasses. The classification is based on
megatron-core's code.
"""

from megatron.training.hf.llama import BLOCKS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Configuration fields for which an architecture of transformers supports only one value; any
#: other value is an error.
FIXED = frozenset(BLOCKS) | _names("""
    activation_func gated_linear_unit
    moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups
    moe_router_pre_softmax moe_router_score_function moe_shared_expert_gate
    qk_layernorm
""")

#: Configuration fields that the config.json of at least one architecture expresses.
EXPRESSED = _names("""
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    layernorm_epsilon multi_latent_attention
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size
    moe_layer_freq moe_router_topk_scaling_factor
    rotary_base rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow
    mscale mscale_all_dim use_rope_scaling rope_scaling_factor max_position_embeddings
    untie_embeddings_and_output_weights
""")

#: Configuration fields that change training or initialization, but not the logits in evaluation.
TRAINING = _names("""
    attention_dropout hidden_dropout calculate_per_token_loss mtp_loss_scaling_factor
    perform_initialization use_cpu_initialization init_method init_method_std
    output_layer_init_method embedding_init_method embedding_init_method_std
    init_model_with_meta_device is_hybrid_model
    init_method_xavier_uniform fp16_lm_cross_entropy cross_entropy_loss_fusion
    cross_entropy_fusion_impl grad_scale_func finalize_model_grads_func no_sync_func grad_sync_func
    param_sync_func
    moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate moe_per_layer_logging
    moe_token_drop_policy moe_token_dropping moe_pad_expert_input_to_capacity
    log_max_attention_logit qk_clip qk_clip_alpha qk_clip_threshold timers config_logger_dir
    barrier_with_L1_time use_mcore_models
""")

#: Configuration fields that choose dtypes, kernels or an order of summation; they affect results
#: only by rounding.
NUMERICS = _names("""
    fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype deterministic_mode
    batch_invariant_mode fp32_residual_connection attention_softmax_in_fp32
    apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul attention_backend
    transformer_impl use_te_activation_func use_te_rng_tracker
    bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm
    memory_efficient_layer_norm apply_rope_fusion fused_single_qkv_rope
    use_fused_weighted_squared_relu gradient_accumulation_fusion activation_func_fp8_input_store
    moe_router_dtype moe_permute_fusion moe_router_fusion moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_router_padding_for_fp8 moe_router_padding_for_quantization
    fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
    tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    fp4 fp4_recipe fp4_param fp4_quantizer_factory
    use_kitchen use_kitchen_attention kitchen_attention_backend quant_recipe
    disable_parameter_transpose_cache
""")

#: Configuration fields that partition the model among ranks, schedule its work or save memory.
LAYOUT = _names("""
    tensor_model_parallel_size pipeline_model_parallel_comm_backend pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size sequence_parallel context_parallel_size
    hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
    cp_comm_type expert_model_parallel_size expert_tensor_parallel_size moe_extended_tp
    num_microbatches_with_partial_activation_checkpoints async_tensor_model_parallel_allreduce
    tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
    overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
    variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p
    deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
    overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split
    cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering
    recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
    recompute_modules moe_layer_recompute fine_grained_activation_offloading offload_modules
    min_offloaded_tensor_size
    moe_shared_expert_overlap moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
    clone_scatter_output_in_embedding symmetric_ar_type hetereogenous_dist_checkpoint
    make_vocab_size_divisible_by moe_enable_routing_replay
""")

#: Configuration fields that no code of a GPT model reads in training or evaluation.
ELSEWHERE = (
    _names("""
    apply_residual_connection_post_layernorm
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
    flash_decode cache_mla_latents inference_rng_tracker inference_sampling_seed
    use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill
    group_query_attention use_rotary_position_embeddings test_mode
""")
    - FIXED
)

CLASSES = {
    "FIXED": FIXED,
    "EXPRESSED": EXPRESSED,
    "TRAINING": TRAINING,
    "NUMERICS": NUMERICS,
    "LAYOUT": LAYOUT,
    "ELSEWHERE": ELSEWHERE,
}
