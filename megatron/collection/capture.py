"""What one layer shows of one micro-batch.

A `Capture` is made in the forward pass and remembers its micro-batch; the autograd graph keeps it
until the matching backward pass, which under 1F1B runs while the schedule is already at a later
micro-batch.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.training_clock import clock
from megatron.fake_quant.gemm import SLOTS, Observer, Operand
from megatron.fake_quant.packing import quantize
from megatron.tensor_record import CODES, COMPONENTS, operation_of


class Saver(Protocol):
    """Who numbers and writes what a capture shows."""

    coordinates: dict[str, int]

    def selects(self, tensor_name: str) -> bool:
        """Whether tensors of that name are collected, by any rank."""

    def takes(self, tensor_name: str) -> bool:
        """Whether this rank writes tensors of that name."""

    def save(
        self, tensor: torch.Tensor, *, scales: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> None:
        """Write one tensor, and the scales of codes, with the fields of its record that only the
        layer knows.
        """

    def give_up(self, why: str) -> None:
        """Collect nothing more on this rank."""


class Capture:
    """Saves tensors at once in the forward pass, and by hooks in the backward pass."""

    def __init__(self, saver: Saver, identity: ModuleIdentity, layer_type: str):
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

    def wants(self, *tensor_names: str) -> bool:
        """Whether any of these is collected; the same on every rank, for what must be alike."""
        return any(map(self._saver.selects, tensor_names))

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
            tensor: as it was before quantization.
            dims: a letter a dimension and the group that shards it, `s b h[tp]`; after a bar the
                groups over which the tensor is a partial sum, `s b h | partial[tp]`. What context
                parallelism does to `s` is added here.
            operation: forward or backward.
            phase: pre (enters the matmul) or post (leaves it).
            format: what this operand is quantized to, by name.
        """
        if not self._saver.takes(tensor_name):
            return
        dims = over_context(dims, self._saver.coordinates)
        self._save(
            tensor,
            tensor_name=tensor_name,
            operation=operation,
            phase=phase,
            format=format,
            dims=dims,
            global_shape=global_shape(list(tensor.shape), dims, self._saver.coordinates),
        )

    def _save(self, tensor: torch.Tensor, **fields: Any) -> None:
        self._saver.save(
            tensor,
            iteration=self._micro_batch.iteration,
            micro_batch=self._micro_batch.index,
            sample_idx=self._micro_batch.sample_idx,
            **fields,
            **self._fields,
        )

    def codes(self, operation: str) -> Observer | None:
        """What shows the operands of a matmul that are quantized, if codes are collected.

        They are made a second time, by `quantize`, of the tensor and with the random bits that the
        matmul has: it and `fake_quantize` give the same values bit for bit.

        Args:
            operation: linear, qk or pv.
        """
        names = dict(zip(SLOTS, CODES[operation], strict=True))
        if not any(map(self._saver.takes, names.values())):
            return None

        def observe(
            slot: str, x: torch.Tensor, operand: Operand, axis: int, seed: int | None
        ) -> None:
            if not self._saver.takes(names[slot]) or operand.format is None or not x.numel():
                return
            try:
                packed = quantize(x, operand.format, axis, seed=seed)
            except torch.OutOfMemoryError as error:  # of the device, which training fits
                self._saver.give_up(f"no memory on the device for {names[slot]}: {error}")
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
        """The same tensor; its gradient is saved when the backward pass has reached this point."""
        if not (_has_gradient(tensor) and self._saver.takes(tensor_name)):
            return tensor
        return _Watch.apply(tensor, self._hook(tensor_name, how))

    def watch_result(self, tensor: torch.Tensor, tensor_name: str, **how: Any) -> None:
        """Save the gradient of `tensor`, which all of its users together give.

        A hook, not a node: what follows may change a result in place, which a view would forbid.
        """
        if _has_gradient(tensor) and self._saver.takes(tensor_name):
            tensor.register_hook(self._hook(tensor_name, how))

    def _hook(self, tensor_name: str, how: dict[str, Any]) -> Callable[[torch.Tensor], None]:
        def save(grad: torch.Tensor) -> None:
            self.save(tensor_name, grad, operation="backward", **how)

        return save


def _has_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class _Watch(torch.autograd.Function):
    """Identity that shows the gradient passing through.

    Not `Tensor.register_hook`: that sees the sum over all users of an operand, this only what comes
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


def over_context(dims: str, coordinates: dict[str, int]) -> str:
    """`dims` with `s[cp:zigzag]` for `s` where there is context parallelism: it cuts every sequence
    of a transformer layer into 2 * cp chunks, and rank r has the chunks r and 2 * cp - 1 - r.
    """
    if coordinates["cp_size"] == 1:
        return dims
    return " ".join("s[cp:zigzag]" if letter == "s" else letter for letter in dims.split())


def global_shape(shape: list[int], dims: str, coordinates: dict[str, int]) -> list[int]:
    """The shape over all shards: a dimension marked `[tp]` is that much larger, one marked `[tp:2]`
    half as much.
    """
    letters = dims.partition("|")[0].split()
    assert len(letters) == len(shape), f"dims {dims!r} do not describe a tensor of shape {shape}"
    sizes = []
    for size, letter in zip(shape, letters, strict=True):
        group, _, how = letter.partition("[")[2].rstrip("]").partition(":")
        copies = int(how) if how.isdigit() else 1
        sizes.append(size * coordinates[f"{group}_size"] // copies if group else size)
    return sizes
