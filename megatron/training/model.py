"""Build the model, its optimizer and the learning rate scheduler.

The pipeline stages of this rank are wrapped for mixed precision and data parallelism.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.context_parallel import COMM_TYPE
from megatron.core.transformer.module import Float16Module
from megatron.training import device
from megatron.training.arguments.schedule import schedule_of
from megatron.training.arguments.validation import RunConfig
from megatron.training.errors import UserError
from megatron.training.printing import print_rank_0

#: Layers whose weights are split between tensor-parallel ranks, and the dimension that is split.
SPLIT = (
    (tensor_parallel.ColumnParallelLinear, 0),
    (tensor_parallel.RowParallelLinear, 1),
    (tensor_parallel.VocabParallelEmbedding, 0),
)


def check_buildable(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags that the local layers of the megatron-core wheel do not support.

    Raises:
        UserError: if such a flag is given without `--transformer-impl transformer_engine`.
    """
    if args.transformer_impl != "local":
        return
    for flag, given in (
        (
            "--hierarchical-context-parallel-sizes",
            args.hierarchical_context_parallel_sizes is not None,
        ),
        ("--hybrid-context-parallel", args.hybrid_context_parallel),
        (
            f"--cp-comm-type {args.cp_comm_type} (the layers gather keys and values: {COMM_TYPE})",
            args.context_parallel_size > 1 and args.cp_comm_type not in (None, COMM_TYPE),
        ),
    ):
        if given:
            raise UserError(
                f"{flag} does not run on the local layers of megatron-core; leave it out "
                "(with Transformer Engine installed: --transformer-impl transformer_engine, which "
                "takes neither a format nor --save-tensors)"
            )
    with_biases = args.num_moe_experts and args.add_bias_linear is not False
    if with_biases and args.expert_model_parallel_size == 1:
        raise UserError(
            f"--num-experts {args.num_moe_experts} with biases does not run on the local layers: "
            "the experts of megatron-core add their biases in place, and autograd does "
            "not allow this on one expert-parallel rank; give --disable-bias-linear"
        )


def padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """Return the vocabulary size, padded to a multiple that suits tensor parallelism."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    padded = -(-vocab_size // multiple) * multiple
    print_rank_0(f"> vocabulary: {vocab_size} tokens, padded to {padded}")
    return padded


def _layer_spec(run: RunConfig, vp_stage: int | None):
    args, config = run.args, run.transformer
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    common = {
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "qk_l2_norm": config.qk_l2_norm,
    }
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(**common)
    return get_gpt_layer_local_spec(**common, normalization=config.normalization)


def _checked_stage(run: RunConfig, vocab_size: int, vp_stage: int | None) -> GPTModel:
    """Build a pipeline stage, and convert megatron-core's errors to `UserError`.

    Raises:
        UserError: if megatron-core rejects the configuration. The error includes megatron-core's
            message, which names the fields of the configuration.
    """
    try:
        return build_stage(run, vocab_size, vp_stage)
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        reason = " ".join(str(error).split()).split(" when instantiating ")[0]
        raise UserError(
            f"megatron-core cannot build this model: {reason or type(error).__name__}; change the "
            "flags with the same names (field a_b is --a-b)"
        ) from error


def build_stage(run: RunConfig, vocab_size: int, vp_stage: int | None = None) -> GPTModel:
    """Build one pipeline stage; without pipeline parallelism, this is the whole model."""
    args = run.args
    spec = _layer_spec(run, vp_stage)
    mtp_spec = None
    if args.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(
            run.transformer, spec, args.transformer_impl == "transformer_engine", vp_stage=vp_stage
        )
    return GPTModel(
        config=run.transformer,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
    )


def build_chunks(run: RunConfig, vocab_size: int) -> list[torch.nn.Module]:
    """Build this rank's pipeline stages: one, or several if the schedule is interleaved."""
    stages = run.args.virtual_pipeline_model_parallel_size
    chunks = [
        _checked_stage(run, vocab_size, vp_stage)
        for vp_stage in (range(stages) if stages is not None else (None,))
    ]
    for chunk in chunks:
        _mark_shards(chunk)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    _print_size(chunks)
    chunks = [chunk.to(device.current()) for chunk in chunks]
    if run.transformer.fp16 or run.transformer.bf16:
        chunks = [Float16Module(run.transformer, chunk) for chunk in chunks]
    return chunks


def build_model(run: RunConfig, vocab_size: int) -> list[torch.nn.Module]:
    """Build the pipeline stages of this rank and wrap them in `DistributedDataParallel`."""
    chunks = build_chunks(run, vocab_size)
    wrapped = [
        DistributedDataParallel(
            config=run.transformer,
            ddp_config=run.ddp,
            module=chunk,
            # Even without buckets, the gradient reduction of every model chunk except the first
            # overlaps with computation.
            disable_bucketing=index > 0 or bool(run.args.overlap_param_gather_with_optimizer_step),
        )
        for index, chunk in enumerate(chunks)
    ]
    if run.args.data_parallel_size > 1 and not run.args.use_cpu_initialization:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def _mark_shards(chunk: torch.nn.Module) -> None:
    """Mark weights that are split between tensor-parallel ranks, unless they are marked already.

    megatron-core marks the weights when it initializes them, which `--load-hf` and
    `--no-initialization` skip. An unmarked shard would count as a copy of rank 0's shard, and would
    be missing from the gradient norm.
    """
    for module in chunk.modules():
        split = [("weight", dim) for kind, dim in SPLIT if isinstance(module, kind)]
        if type(module).__name__ == "GroupedMLP":  # newer releases of megatron-core lack the class
            split = [("weight1", 1), ("weight2", 0)]
        for name, dim in split:
            weight = getattr(module, name)
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _print_size(chunks: list[torch.nn.Module]) -> None:
    """Print the number of parameters per model-parallel rank, as Megatron-LM does, and in total.

    The numbers per rank do not add up to the total, because every tensor-parallel rank holds the
    norms, and each line counts the experts of only one expert-parallel rank.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        count = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        print(
            f" > number of parameters on (tensor, pipeline) model parallel rank "
            f"({parallel_state.get_tensor_model_parallel_rank()}, "
            f"{parallel_state.get_pipeline_model_parallel_rank()}): {count}\n",
            end="",
            flush=True,
        )
    own = sum(p.numel() for chunk in chunks for p in _without_copies(chunk))
    total = torch.tensor(own, dtype=torch.int64, device=device.current())
    torch.distributed.all_reduce(total)
    print_rank_0(f" > number of parameters of the model: {int(total)}")


def _without_copies(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield parameters so that all ranks together yield each parameter of the model once."""
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            replica = parallel_state.get_expert_data_parallel_rank()
            shard = parallel_state.get_expert_tensor_parallel_rank()
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            shard = parallel_state.get_tensor_model_parallel_rank()
        is_split = parameter.tensor_model_parallel
        is_shared = getattr(parameter, "shared", False)  # the copy on the last pipeline stage
        if replica == 0 and (is_split or shard == 0) and not is_shared:
            yield parameter


def build_optimizer(run: RunConfig, model: list[torch.nn.Module]) -> MegatronOptimizer:
    """Build megatron-core's optimizer, without weight decay for biases and norms.

    megatron-core does not mark the parameters that have a separate learning rate (--decoupled-lr).
    Without the mark, it would confuse the settings of these and the other parameters when it loads
    a checkpoint.
    """
    overrides: dict[Any, Any] = get_standard_config_overrides(run.optimizer)
    for override in overrides.values():
        if "max_lr" in override:
            override["is_decoupled_lr"] = True
    return get_megatron_optimizer(
        config=run.optimizer,
        model_chunks=model,
        config_overrides=overrides,
        use_gloo_process_groups=not run.args.disable_gloo_process_groups,
    )


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Build the learning rate and weight decay scheduler, whose progress is counted in samples."""
    schedule = schedule_of(args)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=schedule.warmup if schedule.whole else 0,
        lr_decay_steps=max(schedule.decay, 1),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=max(schedule.whole, 1),
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=schedule.wsd_decay,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
