"""Register quantization as operators that torch can trace and transform.

`operator_rules.py` explains when they are called, and their arguments `batch`, `seeds` and `amax`.
"""

import typing
from typing import Any

import torch
from torch import Tensor

from megatron.fake_quant import reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.format_text import from_text
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.operator_rules import (
    NAMESPACE,
    batch_first,
    samples,
    stacked,
    without_gradient,
)
from megatron.fake_quant.packing_parts import Parts, check_values, empty_parts, packed, unpacked
from megatron.fake_quant.rounding import check_tensor
from megatron.fake_quant.scalings.tensor_scale import local_amax


def compute(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize a non-empty tensor with the fastest available kernel."""
    kernel = dispatch.find(x, fmt) or reference.fake_quantize
    return kernel(x, fmt, layout, seed, amax=amax)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest finite magnitude in a plain tensor; see `tensor_scale.local_amax`."""
    return (dispatch.find_amax(x) or local_amax)(x)


def _alone(fmt: Format, seeds: Tensor | None) -> bool:
    """Return whether samples need separate calls, because of their seeds or their tensor scales."""
    return seeds is not None or fmt.has_tensor_scale or fmt.one_block


def _checked(x: Tensor, fmt: str, axis: int, batch: int) -> tuple[Format, BlockLayout]:
    """Return the format and block layout of a sample; raise the same errors as `fake_quantize`."""
    check_tensor(x, "quantize")
    known = from_text(fmt)
    return known, BlockLayout.of(tuple(x.shape[batch:]), known, axis)


# Operators that quantize and dequantize a tensor in one step


@torch.library.custom_op(f"{NAMESPACE}::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize `x`; see `megatron.fake_quant.fake_quantize`."""
    known, layout = _checked(x, fmt, axis, batch)
    if x.numel() == 0:
        return torch.empty_like(x)
    if batch and not _alone(known, seeds):
        layout = BlockLayout.of(tuple(x.shape), known, axis)
        return compute(x, known, layout, None)
    results = [
        compute(sample, known, layout, seed, amax=of_sample)
        for sample, seed, of_sample in samples(x, seeds, batch, amax)
    ]
    return torch.empty_like(x).copy_(stacked(results, x, batch)) if batch else results[0]


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
    x, seeds, amax = batch_first(info, in_dims, {0: x, 3: seeds, 5: amax})
    return fake_quantize(x, fmt, axis, seeds, batch + 1, amax), 0


without_gradient(fake_quantize)


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
    x, seeds, amax = batch_first(info, in_dims, {0: x, 3: seeds, 5: amax})
    known = from_text(fmt)
    out_dims = (
        0,
        0 if known.block_size is not None else None,
        0 if known.has_outer_scale else None,
    )
    return quantize(x, fmt, axis, seeds, batch + 1, amax), out_dims


without_gradient(quantize)


@torch.library.custom_op(f"{NAMESPACE}::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    blocks: Tensor,
    whole: Tensor,
    fmt: str,
    shape: typing.Sequence[int],  # torch 2.6 derives no schema from collections.abc
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
    shape: typing.Sequence[int],
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
    shape: typing.Sequence[int],
    axis: int,
    dtype: torch.dtype,
    batch: int,
) -> tuple[Tensor, int]:
    known = from_text(fmt)
    parts = {
        0: codes,
        1: blocks if known.block_size is not None else None,
        2: whole if known.has_outer_scale else None,
    }
    codes, batched_blocks, batched_whole = batch_first(info, in_dims, parts)
    blocks = blocks if batched_blocks is None else batched_blocks
    whole = whole if batched_whole is None else batched_whole
    return dequantize(codes, blocks, whole, fmt, shape, axis, dtype, batch + 1), 0


without_gradient(dequantize)
