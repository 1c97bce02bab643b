"""Log lines in Megatron-LM's format, and the same values for TensorBoard.

The norm of the parameters and the number of FLOPs per token are also computed here.
"""

import argparse
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from megatron.training.printing import is_last_rank, stamp
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


def event_folder_problem(args: argparse.Namespace) -> str | None:
    """Return why this rank cannot write to `--tensorboard-dir`, or None if there is no problem.

    Return None also if this rank writes no event files.
    """
    if args.tensorboard_dir is None or not is_last_rank():
        return None
    folder = Path(args.tensorboard_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        return (
            f"--tensorboard-dir {folder} cannot be written ({error.strerror}); free disk space, "
            "choose another folder, or remove the flag"
        )
    return None


#: values that Megatron-LM does not write over the number of consumed samples
BY_ITERATION_ONLY = ("iteration-time", "throughput", "consumed-samples", "max_attention_logit")


class TensorBoard:
    """A TensorBoard writer for the values of each iteration, under the names of Megatron-LM.

    Only the last rank, which also prints the losses, writes event files. If writing fails,
    training continues, and the run ends with an error.
    """

    def __init__(self, args: argparse.Namespace):
        self.failure: str | None = None  #: why the event files are incomplete, or None
        self._writer: Any = None
        self._folder = args.tensorboard_dir
        self._interval = args.tensorboard_log_interval
        if args.tensorboard_dir is not None and is_last_rank():
            from torch.utils.tensorboard import SummaryWriter  # this import takes a second

            _silence_event_threads()
            with self._failures("the start"):
                Path(args.tensorboard_dir).mkdir(parents=True, exist_ok=True)
                self._writer = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=1000)

    def write(self, iteration: int, scalars: dict[str, float | None]) -> None:
        """Write the values that are not None, once per `--tensorboard-log-interval` iterations.

        As in Megatron-LM, most values are also written over the number of consumed samples.
        """
        if iteration % self._interval:
            return
        values = {name: value for name, value in scalars.items() if value is not None}
        self._add(iteration, values)
        by_samples = {
            f"{name} vs samples": value
            for name, value in values.items()
            if name not in BY_ITERATION_ONLY
        }
        self._add(int(values["consumed-samples"]), by_samples)

    def write_operands(self, iteration: int, scalars: dict[str, float]) -> None:
        """Write the statistics of the matmul operands, regardless of the log interval."""
        self._add(iteration, scalars)

    def write_evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        """Write the validation losses, regardless of `--tensorboard-log-interval`."""
        self._add(iteration, {f"{name} validation": loss for name, loss in losses.items()})

    def close(self) -> None:
        """Write the queued values and close the event file."""
        if self._writer is not None:
            with self._failures("the end"):
                self._writer.flush()  # also raises an error that occurred in the writing thread
                self._writer.close()

    def _add(self, iteration: int, scalars: dict[str, float]) -> None:
        if self._writer is not None:
            with self._failures(f"iteration {iteration}"):
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, iteration)

    @contextmanager
    def _failures(self, where: str) -> Iterator[None]:
        """Catch an `OSError` in the `with` block, print a warning, and stop writing event files."""
        try:
            yield
        except OSError as error:
            self._writer = None
            reason = error.strerror or str(error)
            self.failure = f"cannot write event files to {self._folder} at {where} ({reason})"
            sys.stderr.write(f"[WARNING] {self.failure}: training continues without TensorBoard\n")
            sys.stderr.flush()


def _silence_event_threads() -> None:
    """Suppress the traceback of a TensorBoard thread that fails to write event files.

    The thread keeps its exception, and the next call to the writer raises it.
    """
    previous = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        from_tensorboard = type(failed.thread).__module__.startswith("tensorboard.")
        if not (from_tensorboard and issubclass(failed.exc_type, OSError)):
            previous(failed)

    threading.excepthook = hook


def scalars(progress: TrainingProgress, step: StepResult, numbers: LogValues) -> dict[str, Any]:
    """Return the values of one iteration by their names in TensorBoard."""
    return {
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
