"""Defaults that depend on other flags, on the device and on the installed packages.

Megatron-LM requires the user to set some of these flags, such as `--no-masked-softmax-fusion` if
Apex is not installed. Here they are derived, and a flag is needed only to choose another value. A
given flag is kept unless it contradicts another one. For example, sequence parallelism without
tensor parallelism is turned off, with a note in the log.
"""

import argparse
import os
from importlib.util import find_spec

import torch

from megatron.training.errors import UserError

#: defaults of the flags that are read before megatron-core's configuration objects are built
_BASICS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "sequence_parallel": False,
    "fp16": False,
    "bf16": False,
    "multi_latent_attention": False,
    "use_distributed_optimizer": False,
    "overlap_param_gather": False,
    "overlap_grad_reduce": False,
    "calculate_per_token_loss": False,
    "transformer_impl": "local",
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "min_lr": 0.0,
}


def installed(module: str) -> bool:
    """Return whether a module is installed, without importing it.

    A folder without Python files, such as `wandb` for local files, does not count.
    """
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def derive(args: argparse.Namespace) -> list[str]:
    """Set the flags that were not given, and return log messages about changed flags."""
    for name, value in _BASICS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    notes: list[str] = []
    _derive_ranks(args, notes)
    _derive_model(args)
    _derive_precision(args)
    _derive_fusions(args)
    _derive_schedule(args)
    return notes


def _default(args: argparse.Namespace, name: str, value) -> None:
    if getattr(args, name) is None:
        setattr(args, name, value)


def _derive_ranks(args: argparse.Namespace, notes: list[str]) -> None:
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.rank = int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    _default(args, "distributed_backend", "nccl" if cuda else "gloo")
    _default(args, "num_workers", 2 if cuda else 0)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
        notes.append("sequence parallelism is off: it needs --tensor-model-parallel-size above 1")
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    args.data_parallel_size = max(args.world_size // model, 1)
    args.virtual_pipeline_model_parallel_size = _virtual_stages(args)
    _derive_p2p(args)


def _derive_p2p(args: argparse.Namespace) -> None:
    """Set the flags that control the communication between pipeline stages.

    As in Megatron-LM, the interleaved schedule overlaps messages with computation by default. With
    two pipeline ranks, this is the only correct choice: the previous rank is also the next one, and
    batched messages to it are matched by their order, so it would receive activations as gradients.
    """
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    _default(args, "overlap_p2p_comm", interleaved)
    if interleaved and not args.overlap_p2p_comm and args.pipeline_model_parallel_size == 2:
        raise UserError(
            "the interleaved schedule over 2 pipeline ranks needs overlapped messages; remove "
            "--no-overlap-p2p-communication or use more pipeline ranks"
        )
    _default(args, "batch_p2p_comm", not args.overlap_p2p_comm)
    # `deallocate_pipeline_outputs` frees the memory of a stage's output as soon as the send is
    # posted. This is safe with NCCL, because its operations are ordered on a CUDA stream. gloo,
    # however, may still be reading the memory, and would send data that has been overwritten.
    freed_too_early = args.overlap_p2p_comm and args.distributed_backend == "gloo"
    _default(args, "deallocate_pipeline_outputs", not freed_too_early)
    if freed_too_early and args.deallocate_pipeline_outputs:
        raise UserError(
            "--deallocate-pipeline-outputs frees tensors that gloo is still sending in the "
            "interleaved schedule; remove it"
        )


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Return the number of virtual stages per pipeline rank in the interleaved schedule.

    Return None if the schedule is not interleaved.
    """
    layers, stages = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    if layers is None and stages is None:
        return None
    if layers is not None and stages is not None:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "were both given, but they set the same value; give one"
        )
    if args.pipeline_model_parallel_size == 1:
        raise UserError(
            "the interleaved schedule needs --pipeline-model-parallel-size above 1; raise it or "
            "remove --num-layers-per-virtual-pipeline-stage"
        )
    if stages is None:
        per_rank, rest = divmod(args.num_layers or 0, args.pipeline_model_parallel_size)
        if layers < 1 or rest or per_rank % layers or per_rank == 0:
            raise UserError(
                f"--num-layers {args.num_layers} over {args.pipeline_model_parallel_size} pipeline "
                f"ranks cannot be cut into stages of {layers} layers; choose "
                "--num-layers-per-virtual-pipeline-stage so that it divides the layers per rank"
            )
        stages = per_rank // layers
    return None if stages == 1 else stages


def _derive_model(args: argparse.Namespace) -> None:
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.group_query_attention and args.num_query_groups is None:
        args.num_query_groups = 1  # Megatron-LM's default of --num-query-groups
    _default(args, "max_position_embeddings", args.seq_length)
    _default(args, "create_attention_mask_in_dataloader", args.reset_attention_mask)
    if args.split is None and args.data_path is not None:
        args.split = "969,30,1"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        args.recompute_method = "uniform"
    if args.recompute_method is not None:
        _default(args, "recompute_num_layers", 1)


def _derive_precision(args: argparse.Namespace) -> None:
    if args.bf16:
        _default(args, "grad_reduce_in_fp32", True)


def _derive_fusions(args: argparse.Namespace) -> None:
    """Set the defaults of the bias fusions, and check the packages that other fusions need.

    The bias fusions are enabled on CUDA devices. On the CPU, fused functions bring no speedup and
    take time to compile.

    Raises:
        UserError: if a fusion is requested whose package is not installed.
    """
    cuda = torch.cuda.is_available()
    _default(args, "bias_dropout_fusion", cuda)
    biased_gelu = not (args.squared_relu or args.quick_geglu) and args.add_bias_linear is not False
    _default(args, "bias_activation_fusion", cuda and (args.swiglu or biased_gelu))
    for name, module, package in (
        ("masked_softmax_fusion", "scaled_masked_softmax_cuda", "NVIDIA's apex"),
        ("gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda", "NVIDIA's apex"),
        ("apply_rope_fusion", "transformer_engine", "Transformer Engine"),
        ("persist_layer_norm", "apex", "NVIDIA's apex"),
    ):
        if getattr(args, name) and not installed(module):
            flag = name.replace("_", "-").replace("apply-", "")
            raise UserError(
                f"{name} needs {package}, which is not installed; "
                f"remove its flag or give --no-{flag}"
            )


def _derive_schedule(args: argparse.Namespace) -> None:
    _default(args, "start_weight_decay", args.weight_decay)
    _default(args, "end_weight_decay", args.weight_decay)
    if args.micro_batch_size is not None:
        _default(args, "global_batch_size", args.micro_batch_size * args.data_parallel_size)
