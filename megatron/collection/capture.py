"""Capture the tensors of one layer in one micro-batch.

The forward pass creates a `Capture`, which remembers its micro-batch. The autograd graph keeps the
`Capture` alive until the matching backward pass. Under the 1F1B schedule, other micro-batches have
started by then.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.statistics.history import TensorStatistics
from megatron.collection.training_clock import clock
from megatron.fake_quant.matmul.gemm import Observer
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import AS_IT_IS, Operand
from megatron.fake_quant.packing import quantize
from megatron.fake_quant.packing_parts import UnstorableError
from megatron.tensor_record import CODES, COMPONENTS, operation_of


class Sink(Protocol):
    """Part of the `Collector` interface that `Capture` uses."""

    coordinates: dict[str, int]

    def selects(self, tensor_name: str) -> bool:
        """Return whether any rank collects tensors with this name."""

    def takes(self, tensor_name: str) -> bool:
        """Return whether this rank writes tensors with this name."""

    def save(
        self, tensor: torch.Tensor, *, scales: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> None:
        """Write one tensor; if it contains quantized codes, also write their scales.

        The layer provides `fields`, its part of the record.
        """

    def give_up(self, why: str) -> None:
        """Stop the collection on this rank for the reason `why`."""


#: Advice for an error message about a lack of memory.
MEMORY_ADVICE = "select less, or lower --collect-max-host-gib"


class NoSink:
    """A sink that takes no tensors, for a capture that only measures statistics."""

    def __init__(self, coordinates: dict[str, int]):
        self.coordinates = coordinates

    def selects(self, tensor_name: str) -> bool:
        """Return False."""
        return False

    def takes(self, tensor_name: str) -> bool:
        """Return False."""
        return False

    def save(
        self, tensor: torch.Tensor, *, scales: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> None:
        """Raise AssertionError, because the caller must call `takes` first."""
        raise AssertionError("this sink takes no tensors")

    def give_up(self, why: str) -> None:
        """Raise AssertionError, because this sink has no collection to stop."""
        raise AssertionError("this sink has no collection to stop")


class Capture:
    """Recorder of one layer's tensors in the forward pass and, through hooks, the backward pass."""

    def __init__(
        self,
        sink: Sink,
        identity: ModuleIdentity,
        layer_type: str,
        *,
        statistics: TensorStatistics | None = None,
        implementation: str | None = None,
    ):
        """Create the recorder of one forward pass and its backward pass.

        Args:
            sink: receiver of the tensors.
            identity: name and layer number of the module.
            layer_type: "attention" or "linear".
            statistics: statistics that measure the operands; None if this pass is not measured.
            implementation: field `implementation` of the records; None for the local layers.
        """
        assert clock.micro_batch is not None, "a capture exists only within a training step"
        self._sink = sink
        self._statistics = statistics
        self._micro_batch = clock.micro_batch
        self._amaxes: dict[str, float] = {}  #: amaxes received so far, by operation and slot
        self._accumulators: dict[str, str] = {}  #: names of accumulators, by operation and GEMM
        self._fields = {
            "layer_type": layer_type,
            "component": COMPONENTS[layer_type],
            "layer_idx": identity.layer_idx,
            "module": identity.name,
            "recomputed": clock.recomputing,
            "implementation": implementation,
        }

    def note_accumulators(self, **formats: GemmFormats | None) -> None:
        """Add the accumulators of this layer's matmuls to the records of all tensors saved later.

        Args:
            formats: formats of each operation (linear, qk or pv).
        """
        for operation, known in formats.items():
            for gemm, accumulator in ({} if known is None else known.accumulators).items():
                self._accumulators[f"{operation}_{gemm}"] = accumulator.name

    def wants(self, *tensor_names: str) -> bool:
        """Return whether any rank collects any of these tensors. All ranks return the same value.

        Use it for decisions that all ranks must make alike, such as running a collective operation.
        """
        return any(map(self._sink.selects, tensor_names))

    def save(
        self,
        tensor_name: str,
        tensor: torch.Tensor,
        *,
        dims: str,
        operation: str = "forward",
        phase: str = "pre",
        format: str | None = None,
    ) -> None:
        """Save one tensor of this layer and micro-batch.

        Args:
            tensor_name: one of `megatron.tensor_record.TENSOR_NAMES`.
            tensor: values of the tensor before quantization.
            dims: one letter per dimension, followed by the parallel group that shards it, as in
                `s b h[tp]`. If the tensor is a partial sum, the groups to sum over follow a bar, as
                in `s b h | partial[tp]`. This method adds the sharding of `s` by context
                parallelism.
            operation: "forward" or "backward".
            phase: "pre" for an input of the matmul, "post" for its output.
            format: name of the format that this operand is quantized to, if any.
        """
        if self._measures(operation=operation, phase=phase, format=format):
            assert self._statistics is not None
            self._statistics.add_tensor(
                self._where, self._fields["layer_type"], tensor_name, tensor
            )
        if not self._sink.takes(tensor_name):
            return
        dims = over_context(dims, self._sink.coordinates)
        self._save(
            tensor,
            tensor_name=tensor_name,
            operation=operation,
            phase=phase,
            format=format,
            dims=dims,
            global_shape=global_shape(list(tensor.shape), dims, self._sink.coordinates),
        )

    @property
    def _where(self) -> tuple[int, str]:
        """Layer number and name of the module."""
        return self._fields["layer_idx"], self._fields["module"]

    def _measures(self, *, operation: str, phase: str, format: str | None) -> bool:
        """Return whether `save` measures a tensor; `observer` measures quantized operands.

        A forward pass that is recomputed has been measured before.
        """
        return (
            self._statistics is not None
            and phase == "pre"
            and format in (None, str(AS_IT_IS))
            and not (self._fields["recomputed"] and operation == "forward")
        )

    def _save(self, tensor: torch.Tensor, **fields: Any) -> None:
        self._sink.save(
            tensor,
            iteration=self._micro_batch.iteration,
            micro_batch=self._micro_batch.index,
            sample_idx=self._micro_batch.sample_idx,
            amax=dict(self._amaxes) or None,
            accumulate=dict(self._accumulators) or None,
            **fields,
            **self._fields,
        )

    def observer(self, operation: str) -> Observer:
        """Return a callback that measures a matmul's operands and saves their quantized codes.

        `quantize` computes the codes from the same tensor and random bits as the matmul's
        `fake_quantize`, so the decoded values are bit-identical to the operands of the matmul. The
        observer also adds each amax that it receives to the records of the tensors that are saved
        later.

        Args:
            operation: "linear", "qk" or "pv".
        """
        names = dict(zip(SLOTS, CODES[operation], strict=True))

        def observe(
            slot: str,
            x: torch.Tensor,
            operand: Operand,
            axis: int,
            seed: int | None,
            amax: torch.Tensor | None,
        ) -> None:
            repeated = self._fields["recomputed"] and slot.startswith("fprop")
            if self._statistics is not None and operand.format is not None and not repeated:
                how = {"axis": axis, "seed": seed, "amax": amax}
                self._statistics.add_operand(self._where, operation, slot, x, operand, **how)
            if amax is not None:
                self._amaxes[f"{operation}_{slot}"] = float(amax)
            if not self._sink.takes(names[slot]) or operand.format is None or not x.numel():
                return
            try:
                packed = quantize(x, operand.format, axis, seed=seed, amax=amax)
            except torch.OutOfMemoryError as error:
                # The device has no memory left for the codes, but training can continue.
                self._sink.give_up(
                    f"no memory on the device for {names[slot]}: {error}; {MEMORY_ADVICE}"
                )
                return
            except UnstorableError as error:
                self._sink.give_up(f"no codes for {names[slot]}: {error}")
                return
            self._save(
                packed.codes,
                scales=packed.scales.parts(),
                tensor_name=names[slot],
                operation=operation_of(names[slot]),
                phase="pre",
                format=str(operand),
                dims=" ".join("nmk"[-packed.codes.dim() :]),
                global_shape=list(packed.codes.shape),
                codes={
                    "shape": list(packed.shape),
                    "dtype": str(packed.dtype).removeprefix("torch."),
                    "axis": packed.axis,
                    "rounding": operand.format.rounding,
                },
            )

        return observe

    def watch_operand(self, tensor: torch.Tensor, tensor_name: str, **how: Any) -> torch.Tensor:
        """Return a view of `tensor`, and save the gradient of this view in the backward pass.

        Gradients from other uses of `tensor` are not included. If there is nothing to save, return
        `tensor` itself.
        """
        if not (_has_gradient(tensor) and self._sink.takes(tensor_name)):
            return tensor
        return watch(tensor, self._hook(tensor_name, how))

    def watch_result(self, tensor: torch.Tensor, tensor_name: str, **how: Any) -> None:
        """Save the gradient of `tensor`, summed over all uses of the tensor, in the backward pass.

        A tensor hook is used instead of an autograd node, because later code may modify the result
        in place. Autograd forbids that for the view that a node would return.
        """
        measured = self._measures(
            operation="backward", phase=how.get("phase", "pre"), format=how.get("format")
        )
        if _has_gradient(tensor) and (measured or self._sink.takes(tensor_name)):
            tensor.register_hook(self._hook(tensor_name, how))

    def _hook(self, tensor_name: str, how: dict[str, Any]) -> Callable[[torch.Tensor], None]:
        def save(grad: torch.Tensor) -> None:
            self.save(tensor_name, grad, operation="backward", **how)

        return save


def _has_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def watch(tensor: torch.Tensor, save: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a view of `tensor`, and pass the gradient of this view to `save`."""
    return _Watch.apply(tensor, save)  # type: ignore[no-any-return]


class _Watch(torch.autograd.Function):
    """Identity function whose backward pass saves the gradient.

    A hook on the operand would receive the sum of the gradients over all its uses. This node
    receives only the gradient from the operation that uses its output.
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


def over_context(dims: str, coordinates: dict[str, int]) -> str:
    """Mark the sequence dimension in `dims` as `s[cp:zigzag]` if context parallelism is used.

    Context parallelism splits every sequence into 2 * cp chunks; rank r holds the chunks r and
    2 * cp - 1 - r.
    """
    if coordinates["cp_size"] == 1:
        return dims
    return " ".join("s[cp:zigzag]" if letter == "s" else letter for letter in dims.split())


def global_shape(shape: list[int], dims: str, coordinates: dict[str, int]) -> list[int]:
    """Return the shape of the unsharded tensor, given the shape of one shard.

    A dimension marked `[tp]` is multiplied by the size of the group. The suffix `[tp:2]` means that
    each shard exists twice in the group, so the factor is half as large.
    """
    letters = dims.partition("|")[0].split()
    assert len(letters) == len(shape), f"dims {dims!r} do not describe a tensor of shape {shape}"
    sizes = []
    for size, letter in zip(shape, letters, strict=True):
        group, _, how = letter.partition("[")[2].rstrip("]").partition(":")
        copies = int(how) if how.isdigit() else 1
        sizes.append(size * coordinates[f"{group}_size"] // copies if group else size)
    return sizes
