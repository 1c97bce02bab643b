"""Check that the parallel sizes divide the ranks and the model evenly."""

import argparse

from megatron.training.errors import UserError


def check_layout(args: argparse.Namespace) -> None:
    """Check that the parallel sizes divide the ranks and the model evenly.

    Raises:
        UserError: if they do not; the message names the flags.
    """
    _check_ranks(args)
    _check_widths(args)


def _check_ranks(args: argparse.Namespace) -> None:
    tp, pp, cp, ep = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    if args.world_size % (tp * pp * cp):
        raise UserError(
            f"{args.world_size} process(es) cannot be cut into tensor x pipeline x context = "
            f"{tp} x {pp} x {cp}; start a multiple of {tp * pp * cp} with "
            f"`torchrun --nproc-per-node {tp * pp * cp} pretrain_gpt.py ...`"
        )
    if args.world_size % (ep * pp):
        raise UserError(
            f"--expert-model-parallel-size {ep} does not divide the {args.world_size // pp} ranks "
            "of a pipeline stage; choose a divisor"
        )
    etp = args.expert_tensor_parallel_size or tp
    if args.world_size % (etp * ep * pp):
        origin = "" if args.expert_tensor_parallel_size else " (as --tensor-model-parallel-size)"
        raise UserError(
            f"--expert-tensor-parallel-size {etp}{origin} x --expert-model-parallel-size {ep} does "
            f"not divide the {args.world_size // pp} rank(s) of a pipeline stage; lower one, or "
            f"start a multiple of {etp * ep * pp} ranks"
        )
    if args.use_distributed_optimizer is False and args.overlap_param_gather:
        raise UserError(
            "--overlap-param-gather needs --use-distributed-optimizer; add it or remove the former"
        )
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise UserError("--overlap-param-gather needs --overlap-grad-reduce; add it")


def _check_widths(args: argparse.Namespace) -> None:
    """Check that tensor parallelism divides the hidden sizes of MLPs and experts evenly.

    megatron-core itself checks the sizes of attention.

    Raises:
        UserError: if a size cannot be divided evenly.
    """
    tp = args.tensor_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    for flag, width, ranks in (
        ("--ffn-hidden-size", args.ffn_hidden_size, tp),
        ("--moe-ffn-hidden-size", args.moe_ffn_hidden_size, etp),
        ("--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size, tp),
    ):
        if width is not None and width % ranks:
            raise UserError(
                f"{flag} {width} cannot be cut into {ranks} equal parts, as tensor parallelism "
                f"needs; make it a multiple of {ranks}"
            )
