"""Register quantization as `torch.library` operators, for code that torch traces or transforms.

A compiled kernel needs the address of real memory. Under `torch.compile`, `torch.export`,
`make_fx`, `torch.func`, `FakeTensorMode` and for tensor subclasses there is no such address,
because torch records or transforms the operations instead. In these cases each public function of
this package calls one operator, which has

    a fake rule   returns shape, dtype and strides of the result for tracing, and computes nothing
    a vmap rule   makes one call with one more batch dimension, so that graphs contain no loop
    a gradient    is zero, as in eager mode, because rounding is piecewise constant

An operator's implementation is the code that eager mode runs, so the bits are the same. Eager mode
calls the kernels directly (see `is_direct`), because dispatching an operator takes longer than some
of the kernels.

`batch` is the number of leading dimensions that `vmap` has added. The result is the same as from a
loop over the samples: each sample has its own tensor scale, and random bits depend on a value's
position within its sample. `seeds` is an int64 tensor with one seed per sample, or None for formats
without stochastic rounding. `amax` is a float32 tensor with one number per sample, from which the
scale of the whole sample is computed, or None if it is computed from the sample. Axes are counted
from the end, so that batch dimensions do not shift them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.fake_quant import random_bits, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.format_text import from_text
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.packing_parts import Parts, check_values, empty_parts, packed, unpacked
from megatron.fake_quant.rounding import check_tensor

NAMESPACE = "megatron_fake_quant"
_PLAIN = (Tensor, torch.nn.Parameter)


def is_direct(x: Tensor) -> bool:
    """Return whether `x` is a plain tensor and neither a tracer nor a transform is active.

    The call takes less than a microsecond. It checks, in this order: whether Dynamo traces; whether
    the tensor has a class of its own (FakeTensor, DTensor); whether a transform of `torch.func` or
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


def compute(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize a non-empty tensor with the fastest available kernel."""
    kernel = dispatch.find(x, fmt) or reference.fake_quantize
    return kernel(x, fmt, layout, seed, amax=amax)


# Seeds


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
def derive_seed(seed: Tensor, slot: str) -> Tensor:
    """Return seeds for the operand `slot` of a matmul, one per element of `seed`.

    See `random_bits.derive_seed`.
    """
    derived = [random_bits.derive_seed(each, slot) for each in seed.flatten().tolist()]
    return torch.tensor(derived, dtype=torch.int64, device=seed.device).view(seed.shape)


@derive_seed.register_fake
def _(seed: Tensor, slot: str) -> Tensor:
    return seed.new_empty(seed.shape)


@derive_seed.register_vmap
def _(info: Any, in_dims: Any, seed: Tensor, slot: str) -> tuple[Tensor, int]:
    return derive_seed(seed, slot), in_dims[0]


# Batches


def _alone(fmt: Format, seeds: Tensor | None) -> bool:
    """Return whether samples need separate calls, because of their seeds or their tensor scales."""
    return seeds is not None or fmt.has_tensor_scale or fmt.one_block


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


def with_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return `x` with its `vmap` dimension first; if `dim` is None, add one of size `size`."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _checked(x: Tensor, fmt: str, axis: int, batch: int) -> tuple[Format, BlockLayout]:
    """Return the format and the block layout of a sample; errors are those of `fake_quantize`."""
    check_tensor(x, "quantize")
    known = from_text(fmt)
    return known, BlockLayout.of(tuple(x.shape[batch:]), known, axis)


def constant(ctx: Any, inputs: Any, output: Any) -> None:
    """Tell autograd that the results of an operator are not differentiable."""
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


# Operators that quantize and dequantize a tensor in one step


@torch.library.custom_op(f"{NAMESPACE}::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize `x`; see `megatron.fake_quant.fake_quantize`.

    The module's docstring explains the arguments.
    """
    known, layout = _checked(x, fmt, axis, batch)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if batch and not _alone(known, seeds):
        layout = BlockLayout.of(tuple(x.shape), known, axis)
        return compute(x, known, layout, None)
    results = [
        compute(sample, known, layout, seed, amax=of_sample)
        for sample, seed, of_sample in samples(x, seeds, batch, amax)
    ]
    return out.copy_(stacked(results, x, batch)) if batch else results[0]


@fake_quantize.register_fake
def _(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> Tensor:
    _checked(x, fmt, axis, batch)
    return torch.empty_like(x)


@fake_quantize.register_vmap
def _(
    info: Any,
    in_dims: Any,
    x: Tensor,
    fmt: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[Tensor, int]:
    x = with_batch(x, in_dims[0], info.batch_size)
    if seeds is not None:
        seeds = with_batch(seeds, in_dims[3], info.batch_size)
    if amax is not None:
        amax = with_batch(amax, in_dims[5], info.batch_size)
    return fake_quantize(x, fmt, axis, seeds, batch + 1, amax), 0


fake_quantize.register_autograd(lambda ctx, grad: (None,) * 6, setup_context=constant)


# Operators that convert a tensor to codes and scales, and back; see `packing_parts.py`


@torch.library.custom_op(f"{NAMESPACE}::quantize", mutates_args=())
def quantize(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, the block scales and the tensor scales of `x`; see `packing.quantize`."""
    known, layout = _checked(x, fmt, axis, batch)
    check_values(layout.shape, known)
    if x.numel() == 0:
        return empty_parts(x, known, layout, tuple(x.shape[:batch]))
    if batch and not _alone(known, seeds):
        return packed(x, known, BlockLayout.of(tuple(x.shape), known, axis), None)
    results = [
        packed(sample, known, layout, seed, amax=of_sample)
        for sample, seed, of_sample in samples(x, seeds, batch, amax)
    ]
    if not batch:
        return results[0]
    codes, blocks, whole = zip(*results, strict=True)
    return (
        stacked(codes, x, batch),
        stacked(blocks, x, batch) if known.block_size is not None else blocks[0],
        stacked(whole, x, batch) if known.has_outer_scale else whole[0],
    )


@quantize.register_fake
def _(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    known, layout = _checked(x, fmt, axis, batch)
    return empty_parts(x, known, layout, tuple(x.shape[:batch]))


@quantize.register_vmap
def _(
    info: Any,
    in_dims: Any,
    x: Tensor,
    fmt: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[Parts, tuple[int | None, ...]]:
    x = with_batch(x, in_dims[0], info.batch_size)
    if seeds is not None:
        seeds = with_batch(seeds, in_dims[3], info.batch_size)
    if amax is not None:
        amax = with_batch(amax, in_dims[5], info.batch_size)
    known = from_text(fmt)
    out_dims = (
        0,
        0 if known.block_size is not None else None,
        0 if known.has_outer_scale else None,
    )
    return quantize(x, fmt, axis, seeds, batch + 1, amax), out_dims


quantize.register_autograd(lambda ctx, *grads: (None,) * 6, setup_context=constant)


@torch.library.custom_op(f"{NAMESPACE}::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    blocks: Tensor,
    whole: Tensor,
    fmt: str,
    shape: Sequence[int],
    axis: int,
    dtype: torch.dtype,
    batch: int,
) -> Tensor:
    """Return the tensor that the codes and scales stand for; see `packing.dequantize`.

    `shape` is the shape of one sample.
    """
    known, front = from_text(fmt), tuple(codes.shape[:batch])
    if not batch or not _alone(known, None):
        layout = BlockLayout.of((*front, *shape), known, axis)
        return unpacked((codes, blocks, whole), known, layout, dtype)
    layout = BlockLayout.of(tuple(shape), known, axis)
    all_codes = codes.flatten(0, batch - 1).unbind(0)
    of_tensor = whole.flatten().unbind(0) if known.has_outer_scale else [whole] * len(all_codes)
    of_blocks = (
        blocks.flatten(0, batch - 1).unbind(0)
        if known.block_size is not None
        else [blocks] * len(all_codes)
    )
    samples = zip(all_codes, of_blocks, of_tensor, strict=True)
    results = [unpacked(parts, known, layout, dtype) for parts in samples]
    return torch.stack(results).view(*front, *shape)


@dequantize.register_fake
def _(
    codes: Tensor,
    blocks: Tensor,
    whole: Tensor,
    fmt: str,
    shape: Sequence[int],
    axis: int,
    dtype: torch.dtype,
    batch: int,
) -> Tensor:
    return codes.new_empty((*codes.shape[:batch], *shape), dtype=dtype)


@dequantize.register_vmap
def _(
    info: Any,
    in_dims: Any,
    codes: Tensor,
    blocks: Tensor,
    whole: Tensor,
    fmt: str,
    shape: Sequence[int],
    axis: int,
    dtype: torch.dtype,
    batch: int,
) -> tuple[Tensor, int]:
    known, size = from_text(fmt), info.batch_size
    codes = with_batch(codes, in_dims[0], size)
    blocks = with_batch(blocks, in_dims[1], size) if known.block_size is not None else blocks
    whole = with_batch(whole, in_dims[2], size) if known.has_outer_scale else whole
    return dequantize(codes, blocks, whole, fmt, shape, axis, dtype, batch + 1), 0


dequantize.register_autograd(lambda ctx, grad: (None,) * 8, setup_context=constant)
