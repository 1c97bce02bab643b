"""Train a tiny DeepSeek-V2-Lite (MLA, a dense layer, then experts) for one iteration.

The tests run it in a process of its own. It is the counterpart of `gpt_worker.py` and prints the
same report. Like a trainer, it wraps the model for data parallelism and reduces the gradients over
all ranks. `--plain` runs on the wheel alone, with the minimal fixes that this model needs there
(`patch_the_wheel`). These fixes are independent of our overlay, which is compared with them.

    torchrun deepseek_worker.py --tp 2 --sequence-parallel [--ep 2] [--dispatcher allgather] ...
"""

import argparse
import importlib
import json
import os
from pathlib import Path

import gpt_worker
import torch
from gpt_worker import BATCH, SEQ, VOCAB, digest

LAYERS = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="patch the plain wheel")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--etp", type=int, default=None)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--dense", action="store_true", help="MLA without experts")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--q-lora-rank", type=int, default=None)
    parser.add_argument("--fused", action="store_true", help="one layer projects q and kv down")
    parser.add_argument("--dispatcher", default="alltoall")
    parser.add_argument("--recompute", choices=["full", "core_attn", "moe", "mla_up_proj"])
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--micro-batches", type=int, default=2)
    return parser.parse_args(arguments)


def patch_the_wheel() -> None:
    """Fix what keeps the plain wheel from running this model without Transformer Engine."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import (
        dot_product_attention,
        multi_latent_attention,
        torch_norm,
    )
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False

    attention = dot_product_attention.DotProductAttention
    init = attention.__init__

    def without_channels(self, *args, k_channels=None, v_channels=None, **kwargs):
        init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = without_channels

    def norm(cls, config, hidden_size, eps, **kwargs):
        module = torch.nn.RMSNorm(hidden_size, eps)
        module.weight.sequence_parallel = config.sequence_parallel
        return module

    torch_norm.WrappedTorchNorm.__new__ = norm

    rope, reduce = multi_latent_attention.apply_rotary_pos_emb, mappings._reduce

    def with_summed_gradient(tensor, *args, **kwargs):
        """Sum the gradient of the only key head over the ranks; each has the part of its heads."""
        if tensor.shape[-2] == 1:
            tensor = mappings.copy_to_tensor_model_parallel_region(tensor)
        return rope(tensor, *args, **kwargs)

    multi_latent_attention.apply_rotary_pos_emb = with_summed_gradient
    mappings._reduce = lambda tensor, group: reduce(tensor.contiguous(), group)

    latent = multi_latent_attention.MLASelfAttention
    resolve = getattr(latent, "_resolve_qk_norm_config", None)

    def as_specified(self, submodules):
        """Use the specified layers; without compressed queries, 0.19 accepts only fused norms."""
        if self.config.q_lora_rank is not None:
            return resolve(self, submodules)
        used = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        return {name: getattr(submodules, name) for name in used}

    if resolve is not None:
        latent._resolve_qk_norm_config = as_specified

    exchange = mappings._AllToAll.forward

    def with_lists(ctx, group, input, *splits):
        splits = [s.tolist() if torch.is_tensor(s) else s for s in splits]
        return exchange(ctx, group, input, *splits)

    mappings._AllToAll.forward = staticmethod(with_lists)

    scatter = mappings._reduce_scatter_along_first_dim

    def of_unequal_parts(tensor, group, sizes=None, use_global_buffer=False):
        """Reduce-scatter parts of unequal size, which gloo does not support in torch 2.6."""
        if sizes is None:
            return scatter(tensor, group, sizes, use_global_buffer)
        whole = mappings._reduce(tensor.clone(), group)
        return whole.split(sizes)[torch.distributed.get_rank(group)].contiguous()

    mappings._reduce_scatter_along_first_dim = of_unequal_parts


def config_of(options: argparse.Namespace):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    experts = {
        "num_moe_experts": options.experts,
        "moe_router_topk": options.topk,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "moe_token_dispatcher_type": options.dispatcher,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_pre_softmax": True,
    }
    recompute = {}
    if options.recompute == "full":
        recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    elif options.recompute:
        recompute = {"granularity": "selective", "modules": [options.recompute]}
    return MLATransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        q_lora_rank=options.q_lora_rank,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=12,
        qk_layernorm=True,
        rope_type="yarn",
        rotary_scaling_factor=40,
        mscale=0.707,
        mscale_all_dim=0.707,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=options.attention_dropout,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bf16=options.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        num_layers_in_first_pipeline_stage=1 if options.pp > 1 else None,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.etp,
        sequence_parallel=options.sequence_parallel,
        **({} if options.dense else experts),
        **{f"recompute_{name}": value for name, value in recompute.items()},
    )


def build(options: argparse.Namespace) -> torch.nn.Module:
    """Return the pipeline stage of this rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    config = config_of(options)
    if options.dense:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm"
        )
        if options.fused:
            fuse_down_projections(spec.submodules.self_attention)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = model.to(config.params_dtype)  # as a trainer does
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def fuse_down_projections(attention) -> None:
    """Change a specification of MLA to a variant that has tensor parallelism since 0.19."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention

    attention.module = FusedMLASelfAttention
    attention.submodules.linear_qkv_down_proj = ColumnParallelLinear


def start(options: argparse.Namespace) -> None:
    """Set up device, process groups and seeds."""
    gpt_worker.start_processes()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        options.tp,
        options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    if options.plain:
        patch_the_wheel()


def main() -> None:
    options = parse()
    start(options)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build(options)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()
    data = gpt_worker.batches(7 + parallel_state.get_data_parallel_rank())
    results = get_forward_backward_func()(
        forward_step_func=gpt_worker.forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=options.micro_batches,
        seq_length=SEQ,
        micro_batch_size=BATCH,
    )
    modules = ("tensor_parallel.layers", "transformer.dot_product_attention")
    files = [importlib.import_module(f"megatron.core.{name}").__file__ for name in modules]
    report = {
        "losses": [float(result["loss"]).hex() for result in results],
        "grads": {name: digest(p.main_grad) for name, p in model.module.named_parameters()},
        "layers": files[0],
        "attention": files[1],
        "rng": digest(torch.get_rng_state()),
        "tracker": {
            name: digest(state)
            for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }
    Path(os.environ["REPORT_DIR"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # a rank that left first could abort the other
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
