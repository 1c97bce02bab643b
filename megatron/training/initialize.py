"""Initialization of torch.distributed, the process groups and the random number generators."""

import argparse
import os
import random
import resource
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.timers import Timers
from megatron.training import device
from megatron.training.errors import UserError
from megatron.training.printing import print_rank_0

#: number of open files that a rank needs regardless of the number of ranks; 90 to 99 were
#: measured with one and two ranks
OPEN_FILES = 128
#: number of further open files that a rank needs for each rank of the run, for gloo's sockets;
#: with four ranks, a rank needed 7 more files than with two
OPEN_FILES_PER_RANK = 4
MOST_OPEN_FILES = 1 << 16  #: maximum value to which the soft limit on open files is raised


def initialize(args: argparse.Namespace) -> Timers:
    """Initialize torch.distributed, the process groups and the random number generators.

    Returns:
        The timers of the run.

    Raises:
        UserError: if the backend needs CUDA and there is none, the limit on open files is too low,
            or the environment or the parallel sizes are invalid.
    """
    _check_open_files(args)
    _start_processes(args)
    try:
        _create_process_groups(args)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"the ranks cannot be divided into groups: {' '.join(str(error).split())}; change the "
            "flags of the parallel sizes"
        ) from error
    set_seeds(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    print_rank_0(f"> device: {device.describe()}; {args.distributed_backend}")
    print_rank_0(
        f"> ranks: {args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
        f"{args.data_parallel_size}"
        + (", sequence parallel" if args.sequence_parallel else "")
        + (f", experts {args.expert_model_parallel_size}" if args.num_moe_experts else "")
    )
    return Timers(args.timing_log_level, args.timing_log_option)


def _check_open_files(args: argparse.Namespace) -> None:
    """Raise the soft limit on open files if it is low, and check that the limit is sufficient.

    Without this check, gloo would fail with a traceback.

    Raises:
        UserError: if the limit is too low.
    """
    soft, hard = (
        MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * args.world_size
    if soft < min(hard, MOST_OPEN_FILES) and soft < 4 * needed:
        soft = min(hard, MOST_OPEN_FILES)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    if soft < needed:
        raise UserError(
            f"only {soft} files may be open at a time (ulimit -n), and each of "
            f"{args.world_size} rank(s) needs at least {needed}; run "
            f"`ulimit -n {max(4096, needed)}` in a new shell first, or ask the administrator to "
            "raise the hard limit (ulimit -Hn)"
        )


def _create_process_groups(args: argparse.Namespace) -> None:
    """Create megatron-core's process groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=not args.disable_gloo_process_groups,
    )


def _start_processes(args: argparse.Namespace) -> None:
    """Initialize torch.distributed for the ranks that torchrun started, or for a single rank.

    Raises:
        UserError: if the backend needs CUDA and there is none, or if the environment variables
            of torchrun are incomplete.
    """
    if args.distributed_backend == "nccl":
        if not torch.cuda.is_available():
            raise UserError(
                "--distributed-backend nccl needs CUDA, which this machine does not have; remove "
                "the flag or give gloo"
            )
        torch.cuda.set_device(args.local_rank)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    # MASTER_ADDR without WORLD_SIZE may be left over from another job in the same shell.
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ:
        if "MASTER_PORT" not in os.environ:
            raise UserError(
                "MASTER_ADDR and WORLD_SIZE are set but MASTER_PORT is not; start the ranks with "
                "`torchrun --nproc-per-node N pretrain_gpt.py ...`, or set MASTER_PORT"
            )
        dist.init_process_group(
            args.distributed_backend,
            rank=args.rank,
            world_size=args.world_size,
            timeout=timeout,
        )
        return
    if args.world_size > 1:
        raise UserError(
            "WORLD_SIZE is set but MASTER_ADDR is not; start the ranks with "
            "`torchrun --nproc-per-node N pretrain_gpt.py ...`"
        )
    # `python pretrain_gpt.py` runs a single rank. This rank opens no port, because another run on
    # the same machine could already use the default port.
    dist.init_process_group(
        args.distributed_backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout
    )


def set_seeds(args: argparse.Namespace) -> None:
    """Seed the random number generators of Python, NumPy and torch.

    The seed depends on the pipeline stage; tensor-parallel and expert-parallel ranks differ only
    in megatron-core's generators.
    """
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=bool(args.use_te_rng_tracker),
        inference_rng_tracker=bool(args.inference_rng_tracker),
    )


def finalize() -> None:
    """Destroy the process groups, because torch warns about groups that remain at exit.

    Before torch 2.8, a group is destroyed while the global interpreter lock is held. A thread of
    gloo needs this lock to free the tensors of the last collective, and would wait forever.
    """
    if dist.is_initialized():
        time.sleep(0.05)  # releases the lock
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
