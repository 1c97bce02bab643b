"""Collects the tensors that enter and leave the matmuls of linear and attention layers.

A layer asks `capture(self)` at each forward pass: None means that nothing is collected now, and
then the layer takes the wheel's own path. Otherwise it gets a `Capture`, which remembers the
micro-batch of this forward pass, saves what the layer shows it, and is kept by the autograd graph
until the matching backward pass: under 1F1B that runs while the schedule is already at a later
micro-batch.

The clock (iteration, micro-batch, recomputation) is moved by
`megatron.core.pipeline_parallel.schedules`, so collection works under any trainer built on
megatron-core. A trainer of ours calls `configure` with its flags; under any other, the environment
switches it on: TENSOR_SAVE_ENABLED=true and TENSOR_SAVE_DIR.

Tensors are written at once and by the calling thread: what is on disk is what the matmul saw. A
write that fails stops the collection, says so once and lets training go on; `close` then returns
the message and the process exits non-zero.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core._record_writer import RecordWriter, check_writable
from megatron.core.layer_selection import LayerSelection
from megatron.core.module_identity import ModuleIdentity
from megatron.core.run_card import collect_run_card, rank_coordinates
from megatron.fake_quant import policy
from megatron.fake_quant.formats import Format
from megatron.tensor_record import COMPONENTS, TensorRecord, safe_name

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = "enhanced_tensor_logs"
UNNAMED = ModuleIdentity("", -1)  #: of a layer that stands in no model


@dataclass
class MicroBatch:
    """One forward pass of one micro-batch, and the backward pass that belongs to it."""

    iteration: int
    index: int
    sample_idx: int | None = None


class Clock:
    """Where the schedule is. Moved by `schedules.py`; read when a layer asks for a capture."""

    def __init__(self) -> None:
        self.iteration = 0  #: of the step under way, as the log prints it; 0 before the first
        self.completed = 0  #: training iterations finished since `configure`
        self.micro_batch: MicroBatch | None = None  #: None outside of a training step
        self.recomputing = False  #: inside a backward step a forward pass is a recomputation


clock = Clock()


@dataclass(frozen=True)
class Settings:
    """What to collect and where."""

    directory: Path
    quant_type: str
    control_iter: int
    collect_micro_batches: int
    layers: LayerSelection


class TensorSaver:
    """Decides what is collected, numbers it and hands it to the writer."""

    def __init__(self, settings: Settings, run_id: str, card: dict[str, Any]):
        self.settings = settings
        self.error: str | None = None
        self.coordinates = rank_coordinates()
        self._counter = 0
        self._run_id = run_id
        self._card = card
        self._writer = RecordWriter(settings.directory, run_id, self.coordinates["world"])
        self._write_card("running")

    def wants(self, identity: ModuleIdentity) -> bool:
        """Whether a layer's tensors are collected at this moment."""
        if self.error is not None or clock.micro_batch is None or identity.is_lm_head:
            return False
        done = self.settings.control_iter and clock.completed >= self.settings.control_iter
        limit = self.settings.collect_micro_batches
        late = limit and clock.micro_batch.index >= limit
        return not done and not late and identity.layer_idx in self.settings.layers

    def save(self, tensor: torch.Tensor, **fields: Any) -> None:
        """Write one tensor; a failure ends the collection, not the training."""
        if self.error is not None:
            return
        try:
            self._write(tensor, fields)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch's writer reports a full disk as RuntimeError
            self.error = (
                f"collection stopped after {self._writer.records} tensors: cannot write to "
                f"{self.settings.directory}: {error}; free space or name another --tensor-save-dir"
            )
            logger.error(self.error)

    def _write(self, tensor: torch.Tensor, fields: dict[str, Any]) -> None:
        while True:
            self._counter += 1
            now = time.time()
            record = TensorRecord(
                run_id=self._run_id,
                counter=self._counter,
                timestamp=time.strftime("%Y%m%d_%H%M%S", time.localtime(now)),
                wall_time=now,
                quant_type=self.settings.quant_type,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                rank=self.coordinates,
                **fields,
            )
            try:
                self._writer.write(tensor, record)
                return
            except FileExistsError:  # another run in this folder; the next number is free
                continue

    def close(self) -> str | None:
        """End the collection; returns what went wrong, if anything did."""
        try:
            self._write_card("failed" if self.error else "finished")
            self._writer.close()
        except OSError as error:
            self.error = self.error or f"the run card in {self.settings.directory}: {error}"
        return self.error

    def _write_card(self, status: str) -> None:
        if self.coordinates["world"] == 0:
            outcome = {"status": status, "error": self.error, "iterations": clock.completed}
            self._writer.write_run_card(self._card | outcome)


class Capture:
    """What one layer shows of one micro-batch: saved at once in the forward pass, by hooks in the
    backward pass.
    """

    def __init__(self, saver: TensorSaver, identity: ModuleIdentity, layer_type: str):
        assert clock.micro_batch is not None, "a capture exists within a training step only"
        self._saver = saver
        self._micro_batch = clock.micro_batch
        self._fields = {
            "layer_type": layer_type,
            "component": COMPONENTS[layer_type],
            "layer_idx": identity.layer_idx,
            "module": identity.name,
            "recomputed": clock.recomputing,
        }

    def save(
        self,
        tensor_name: str,
        tensor: torch.Tensor,
        *,
        dims: str,
        operation: str = "forward",
        phase: str = "pre",
        format: Format | None = None,
    ) -> None:
        """Save one tensor of this layer and micro-batch.

        Args:
            dims: a letter a dimension and the group that shards it, `s b h[tp]`; after a bar the
                groups over which the
                tensor is a partial sum, `s b h | partial[tp]`.
            format: what this operand is quantized to; the tensor itself is saved as it was before.
        """
        self._saver.save(
            tensor,
            tensor_name=tensor_name,
            operation=operation,
            phase=phase,
            format=None if format is None else format.name,
            iteration=self._micro_batch.iteration,
            micro_batch=self._micro_batch.index,
            sample_idx=self._micro_batch.sample_idx,
            dims=dims,
            global_shape=global_shape(list(tensor.shape), dims, self._saver.coordinates),
            **self._fields,
        )

    def watch(self, tensor: torch.Tensor, tensor_name: str, **how: Any) -> torch.Tensor:
        """The same tensor; its gradient is saved as `tensor_name` when the backward pass reaches
        this point.
        """
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        save = lambda grad: self.save(tensor_name, grad, operation="backward", **how)  # noqa: E731
        return _Watch.apply(tensor, save)


class _Watch(torch.autograd.Function):
    """Identity that shows the gradient passing through.

    Not `Tensor.register_hook`: that sees the sum over all users of the tensor, this only what comes
    from behind this point.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, save: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.save = save
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.save(grads[0])
        return grads[0], None


def global_shape(shape: list[int], dims: str, coordinates: dict[str, int]) -> list[int]:
    """The shape over all shards: a dimension marked `[tp]` is that much larger."""
    letters = dims.partition("|")[0].split()
    assert len(letters) == len(shape), f"dims {dims!r} do not describe a tensor of shape {shape}"
    sizes = []
    for size, letter in zip(shape, letters, strict=True):
        group = letter.partition("[")[2].rstrip("]")
        sizes.append(size * coordinates[f"{group}_size"] if group else size)
    return sizes


_saver: TensorSaver | None = None
_configured = False


def configure(
    args: dict[str, Any] | None = None,
    *,
    save_tensors: bool = False,
    save_dir: str | None = None,
    control_iter: int = 1,
    collect_micro_batches: int = 1,
    collect_layers: str = "all",
    iteration: int = 0,
) -> None:
    """Fix what this run collects; collective over all ranks once the process groups exist.

    Args:
        args: the run's arguments, for the run card; `num_layers` bounds `collect_layers`.
            save_tensors: or TENSOR_SAVE_ENABLED=true. save_dir: used as it is; else
            TENSOR_SAVE_DIR, else `enhanced_tensor_logs/<quantization type>`. control_iter:
            iterations to collect, 0 for all. collect_micro_batches: of each iteration the first so
            many, 0 for all. collect_layers: `all`, or e.g. `first,last` or `0,2-4`. iteration:
            iterations done before this run (it resumes a checkpoint).

    Raises:
        ValueError: the user's mistake, on all ranks alike.
    """
    global _saver, _configured
    _configured = True
    _saver = None
    clock.iteration, clock.completed, clock.micro_batch = iteration, 0, None
    if not (save_tensors or _enabled_by_environment()):
        return
    args = {} if args is None else args
    current = policy.current()
    default = Path(DEFAULT_DIRECTORY, safe_name(current.quant_type))
    settings = Settings(
        directory=Path(save_dir or os.environ.get("TENSOR_SAVE_DIR") or default),
        quant_type=current.quant_type,
        control_iter=_not_negative("--control-iter", control_iter),
        collect_micro_batches=_not_negative("--collect-micro-batches", collect_micro_batches),
        layers=LayerSelection.parse(collect_layers, args.get("num_layers")),
    )
    _raise_together(_failure(check_writable, settings.directory))
    run_id = _from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    _saver = TensorSaver(settings, run_id, collect_run_card(run_id, args, current))
    if _saver.coordinates["world"] == 0:
        logger.info("saving tensors to %s (run %s)", settings.directory, run_id)


def _enabled_by_environment() -> bool:
    value = os.environ.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ValueError(
            f"environment variable TENSOR_SAVE_ENABLED is {value!r}; use true or false"
        )
    return value in ("1", "true", "yes", "on")


def _not_negative(flag: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{flag} is {value}; give 0 for no limit or a positive number")
    return value


def _failure(check: Callable[..., None], *arguments: Any) -> str | None:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _raise_together(failure: str | None) -> None:
    """Raise on every rank what failed on any: a rank that went on alone would hang in its next
    collective.
    """
    failures = [failure]
    if _distributed():
        failures = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(failures, failure)
    if first := next((f for f in failures if f is not None), None):
        raise ValueError(first)


def _from_first_rank(value: str) -> str:
    values = [value]
    if _distributed():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def begin_iteration() -> None:
    """The schedule starts a training iteration. Configures from the environment under a trainer
    that never did.
    """
    if not _configured:
        configure()
    clock.iteration += 1


def end_iteration() -> None:
    """The schedule has finished a training iteration."""
    clock.completed += 1
    clock.micro_batch = None


def set_sample_idx(sample_idx: int) -> None:
    """The trainer says which sample the micro-batch under way begins with; without it records carry
    null.
    """
    if clock.micro_batch is not None:
        clock.micro_batch.sample_idx = sample_idx


def capture(identity: ModuleIdentity | None, layer_type: str) -> Capture | None:
    """A layer's way in: None if nothing of it is collected now."""
    identity = identity or UNNAMED
    if _saver is None or not _saver.wants(identity):
        return None
    return Capture(_saver, identity, layer_type)


def save_tensor(
    tensor: torch.Tensor, tensor_name: str, *, layer_type: str, dims: str, **how: Any
) -> None:
    """Save one tensor from code outside of our layers, if something is being collected now.

    Args:
        tensor_name, layer_type: as in `megatron.tensor_record.TENSOR_NAMES`.
        dims, **how: see `Capture.save`.
    """
    if (found := capture(how.pop("identity", None), layer_type)) is not None:
        found.save(tensor_name, tensor, dims=dims, **how)


def enabled() -> bool:
    """Whether this run collects at all."""
    return _saver is not None


def finished() -> bool:
    """Whether as many iterations as `control_iter` says are collected; the same on every rank."""
    return (
        _saver is not None
        and _saver.settings.control_iter > 0
        and clock.completed >= _saver.settings.control_iter
    )


def close() -> str | None:
    """End the collection; returns what went wrong on this rank, or None."""
    global _saver
    saver, _saver = _saver, None
    return None if saver is None else saver.close()
