"""Log lines in Megatron-LM's format, and the same values for TensorBoard and other services.

The norm of the parameters and the number of FLOPs per token are also computed here.
"""

import argparse
import math
import os
import resource
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.collection.loss_spikes import Levels
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.training import device
from megatron.training.printing import stamp
from megatron.training.train_step import StepResult


@dataclass
class TrainingProgress:
    """The progress of a run, which is saved in its checkpoints."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    #: number of iterations skipped since iteration 0, as in Megatron-LM's checkpoints
    skipped_iterations: int = 0
    #: recent normal losses and gradient norms, with which new values are compared to detect spikes
    levels: Levels = field(default_factory=dict)


@dataclass
class LogInterval:
    """Sums of losses, and counts of iterations, since the last log line."""

    #: time at which the interval started, from `time.perf_counter`, in seconds
    started: float = field(default_factory=time.perf_counter)
    iterations: int = 0  #: number of iterations in the interval
    skipped: int = 0  #: number of iterations that were skipped because gradients overflowed
    nan: int = 0  #: number of iterations with a loss that is not finite
    losses: dict[str, float] = field(default_factory=dict)  #: sum of each loss over the iterations

    def add(self, step: StepResult) -> None:
        """Add the losses of one iteration to the sums, and count the iteration.

        If a loss is not finite, the mean of this loss is not finite either.
        """
        self.iterations += 1
        self.skipped += step.skipped
        self.nan += any(not math.isfinite(loss) for loss in step.losses.values())
        for name, loss in step.losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss

    def mean_losses(self) -> dict[str, float]:
        """Return the mean of each loss over the iterations of the interval."""
        return {name: loss / self.iterations for name, loss in self.losses.items()}


@dataclass(frozen=True)
class LogValues:
    """Values of a log line that are not accumulated in `LogInterval`."""

    learning_rate: float
    loss_scale: float
    params_norm: float | None
    seconds: float  #: duration of an iteration, in seconds
    throughput: float | None = None  #: TFLOP/s per device; None without `--log-throughput`
    memory: dict[str, int] | None = None  #: see `memory_scalars`; None if it is not logged


class TimeLeft:
    """Estimate of the remaining training time, which is printed after a log line."""

    PERIOD = 60.0  #: minimum number of seconds between two estimates

    def __init__(self) -> None:
        self._last = time.monotonic()

    def line(self, done: int, total: int, seconds: float) -> str | None:
        """Return a line with the time left, or None if the last line is recent or training is done.

        Args:
            done: number of completed iterations.
            total: number of iterations of the whole run.
            seconds: mean duration of an iteration, in seconds.
        """
        now = time.monotonic()
        if now - self._last < self.PERIOD or done >= total:
            return None
        self._last = now
        left = timedelta(seconds=round((total - done) * seconds))
        return f"> about {left} (hours:minutes:seconds) left for {total - done} iterations"


def log_line(
    args: argparse.Namespace,
    progress: TrainingProgress,
    interval: LogInterval,
    step: StepResult,
    numbers: LogValues,
) -> str:
    """Return the log line in exactly the format of Megatron-LM, because tools parse it."""
    parts = [
        f" [{stamp()}] iteration {progress.iteration:8d}/{args.train_iters:8d}",
        f" consumed samples: {progress.consumed_train_samples:12d}",
        f" elapsed time per iteration (ms): {numbers.seconds * 1000:.1f}",
    ]
    if args.log_throughput:
        flops = throughput(args, numbers.seconds)
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {flops:.1f}")
    parts += [
        f" learning rate: {numbers.learning_rate:.6E}",
        f" global batch size: {get_current_global_batch_size():5d}",
        *(f" {name}: {loss:.6E}" for name, loss in interval.mean_losses().items()),
        f" loss scale: {numbers.loss_scale:.1f}",
    ]
    if step.grad_norm is not None:
        parts.append(f" grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f" num zeros: {step.num_zeros}")
    if numbers.params_norm is not None:
        parts.append(f" params norm: {numbers.params_norm:.3f}")
    if step.max_attention_logit is not None:
        parts.append(f" max_attention_logit: {step.max_attention_logit:.3f}")
    parts += [
        f" number of skipped iterations: {interval.skipped:3d}",
        f" number of nan iterations: {interval.nan:3d}",
    ]
    return " |".join(parts) + " |"


def throughput(args: argparse.Namespace, seconds: float) -> float:
    """Return the TFLOP/s per device of an iteration that takes `seconds`."""
    iteration = flops_per_token(args) * args.seq_length * get_current_global_batch_size()
    return iteration / seconds / args.world_size / 1e12


def scalars(progress: TrainingProgress, step: StepResult, numbers: LogValues) -> dict[str, Any]:
    """Return the values of one iteration by their names in TensorBoard."""
    return (numbers.memory or {}) | {
        "learning-rate": numbers.learning_rate,
        "batch-size": get_current_global_batch_size(),
        **step.losses,
        "loss-scale": numbers.loss_scale,
        "grad-norm": step.grad_norm,
        "num-zeros": step.num_zeros,
        "params-norm": numbers.params_norm,
        "max_attention_logit": step.max_attention_logit,
        "iteration-time": numbers.seconds,
        "throughput": numbers.throughput,
        "consumed-samples": progress.consumed_train_samples,
    }


def memory_scalars() -> dict[str, int]:
    """Return how much memory this process uses, under the names that Megatron-LM logs.

    Without a CUDA device, these are the resident memory of the process and its maximum, in bytes.
    """
    if torch.cuda.is_available():
        statistics = torch.cuda.memory_stats()
        return {
            "mem-reserved-bytes": statistics["reserved_bytes.all.current"],
            "mem-allocated-bytes": statistics["allocated_bytes.all.current"],
            "mem-max-allocated-bytes": statistics["allocated_bytes.all.peak"],
            "mem-allocated-count": statistics["allocation.all.current"],
        }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "mem-allocated-bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "mem-max-allocated-bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def params_norm(model: list[torch.nn.Module]) -> float:
    """Return the L2 norm of all parameters of the model. Must be called on all ranks.

    A parameter that several ranks or pipeline stages hold is counted once.
    """
    dense = torch.zeros(1, dtype=torch.float64, device=device.current())
    experts = torch.zeros_like(dense)
    for chunk in model:
        for parameter in chunk.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total = dense if getattr(parameter, "allreduce", True) else experts
                total += parameter.detach().double().square().sum()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return (dense + experts).sqrt().item()


def flops_per_token(args: argparse.Namespace) -> float:
    """Return the number of matmul FLOPs per token, for the forward and backward passes.

    The backward pass counts as two forward passes. The matmuls are the projections, Q K^T and P V
    under a causal mask (half of the attention matrix), the MLP or the experts that a token is
    routed to, the shared experts, the routers, and the output layer.
    """
    multiplications = args.hidden_size * args.padded_vocab_size
    for has_experts in _expert_layers(args):
        multiplications += _attention(args) + (_experts(args) if has_experts else _mlp(args))
    return 3 * 2 * multiplications


def _expert_layers(args: argparse.Namespace) -> list[int]:
    """Return one number per layer: 1 if it has experts, 0 if it has a dense MLP."""
    frequency = args.moe_layer_freq
    if not args.num_moe_experts:
        return [0] * args.num_layers
    if isinstance(frequency, list):
        return frequency
    return [int(layer % frequency == 0) for layer in range(args.num_layers)]


def _attention(args: argparse.Namespace) -> float:
    """Return the number of multiplications per token in an attention layer."""
    s, h, heads = args.seq_length, args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        query, key = heads * args.kv_channels, args.num_query_groups * args.kv_channels
        return h * (query + 2 * key) + query * h + s * query
    qk_head_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
    rank, q_rank = args.kv_lora_rank, args.q_lora_rank
    query = heads * qk_head_dim
    projections = h * query if q_rank is None else q_rank * (h + query)
    projections += h * (rank + args.qk_pos_emb_head_dim)
    projections += rank * heads * (args.qk_head_dim + args.v_head_dim)
    projections += heads * args.v_head_dim * h
    return projections + s / 2 * heads * (qk_head_dim + args.v_head_dim)


def _mlp(args: argparse.Namespace) -> float:
    return _mlp_matrices(args) * args.hidden_size * args.ffn_hidden_size


def _experts(args: argparse.Namespace) -> float:
    features = args.moe_router_topk * args.moe_ffn_hidden_size
    features += args.moe_shared_expert_intermediate_size or 0
    return args.hidden_size * (_mlp_matrices(args) * features + args.num_moe_experts)


def _mlp_matrices(args: argparse.Namespace) -> int:
    """Return the number of weight matrices in an MLP."""
    return 3 if args.swiglu or args.quick_geglu else 2
