"""Support operators of `torch.library`, which replace this package's code when torch traces it.

A compiled kernel needs the address of real memory. Under `torch.compile`, `torch.export`,
`make_fx`, `torch.func`, `FakeTensorMode` and for tensor subclasses there is no such address,
because torch records or transforms the operations instead. In these cases each public function of
this package calls one operator, which has

    a fake rule   returns shape, dtype and strides of the result for tracing, and computes nothing
    a vmap rule   makes one call with one more batch dimension, so that graphs contain no loop
    a gradient    is zero, as in eager mode, because rounding is piecewise constant

An operator's implementation is the code that eager mode runs, so results are bit-identical. Eager
mode calls the kernels directly (see `is_direct`), because dispatching an operator takes longer than
some of the kernels.

All operators have these arguments in common. `batch` is the number of leading dimensions that
`vmap` has added. The result is the same as from a loop over the samples: each sample has its own
tensor scale, and random bits depend on a value's position within its sample. `seeds` is an int64
tensor with one seed per sample, or None for formats without stochastic rounding. `amax` is a
float32 tensor with one number per sample, from which the scale of the whole sample is computed, or
None if it is computed from the sample. Axes are counted from the end, so that batch dimensions do
not shift them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.fake_quant import random_bits

NAMESPACE = "megatron_fake_quant"
_PLAIN = (Tensor, torch.nn.Parameter)


def is_direct(x: Tensor) -> bool:
    """Return whether `x` is a plain tensor and neither a tracer nor a transform is active.

    The call takes less than a microsecond. It checks, in this order: whether Dynamo traces; whether
    the tensor is of a subclass (FakeTensor, DTensor); whether a transform of `torch.func` or
    a dispatch mode (FakeTensorMode, make_fx, selective checkpointing) is active; whether
    `torch.jit.trace` records; whether the tensor is a lazy negation or has no memory (meta).
    """
    if torch.compiler.is_compiling() or type(x) not in _PLAIN:
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return False  # make_fx and export keep their pre-dispatch tracing modes on another stack
    return not (torch._C._get_tracing_state() or x.is_neg() or x.is_meta)


def seed_tensor(seed: int | Tensor) -> Tensor:
    """Convert a seed to the form that operators take: an int64 tensor without dimensions."""
    random_bits.check_seed(seed)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device="cpu")


def drawn(generator: torch.Generator | None) -> Tensor:
    """Draw a seed as a tensor; `vmap`'s argument `randomness` decides whether samples share it."""
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randint(0, 1 << 62, (), generator=generator, device=device)


@torch.library.custom_op(f"{NAMESPACE}::derive_seed", mutates_args=())
def derive_seeds(seed: Tensor, slot: str) -> Tensor:
    """Return seeds for the operand `slot` of a matmul, one per element of `seed`.

    See `random_bits.derive_seed`.
    """
    derived = [random_bits.derive_seed(each, slot) for each in seed.flatten().tolist()]
    return torch.tensor(derived, dtype=torch.int64, device=seed.device).view(seed.shape)


@derive_seeds.register_fake
def _(seed: Tensor, slot: str) -> Tensor:
    return seed.new_empty(seed.shape)


@derive_seeds.register_vmap
def _(info: Any, in_dims: Any, seed: Tensor, slot: str) -> tuple[Tensor, int]:
    return derive_seeds(seed, slot), in_dims[0]


def samples(
    x: Tensor, seeds: Tensor | None, batch: int, amax: Tensor | None
) -> list[tuple[Tensor, int | None, Tensor | None]]:
    """Return each sample of a batch with its seed and its amax; either is None if not given."""
    samples = x.flatten(0, batch - 1).unbind(0) if batch else (x,)
    none = [None] * len(samples)
    each_seed = none if seeds is None else seeds.flatten().tolist()
    each_amax = none if amax is None else amax.flatten().unbind(0)
    return list(zip(samples, each_seed, each_amax, strict=True))


def stacked(parts: Sequence[Tensor], x: Tensor, batch: int) -> Tensor:
    """Stack the results of the samples along the batch dimensions of `x`."""
    return torch.stack(list(parts)).view(*x.shape[:batch], *parts[0].shape) if batch else parts[0]


def batch_first(
    info: Any, in_dims: Sequence[int | None], parts: Mapping[int, Tensor | None]
) -> list[Any]:
    """Return tensor arguments of a `vmap` rule with their batch dimension first.

    A tensor without a batch dimension gets one, and None stays None.

    Args:
        info: first argument of the rule.
        in_dims: second argument of the rule, the batch dimension of each of the other arguments.
        parts: the tensors, by their positions among the other arguments.
    """
    return [
        None if part is None else _with_batch(part, in_dims[place], info.batch_size)
        for place, part in parts.items()
    ]


def _with_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def without_gradient(operator: Any) -> None:
    """Register the results of an operator as not differentiable."""
    operator.register_autograd(_no_gradients, setup_context=_mark_constant)


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.gradients = (None,) * len(inputs)
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _no_gradients(ctx: Any, *_: Any) -> Any:
    return ctx.gradients
