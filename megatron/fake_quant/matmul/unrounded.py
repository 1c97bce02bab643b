"""Quantize the operand of a GEMM without rounding its values to the dtype of the tensors.

A tensor core multiplies codes and applies their scales. It never rounds a code times its scale.
`fake_quantize` does: its result has the dtype of the tensor, and in bfloat16 or float16 the values
of every format whose scales are not powers of two are rounded a second time. Products of operands
avoid this second rounding. There are three kinds of operands:

    exact   The dtype represents every quantized value, as with MX formats. Nothing changes.
    apart   The dtype represents every element times its block scale. The scale of the tensor (or of
            its rows) is kept apart, and `products.py` applies it to the accumulated product. This
            is how tensor cores compute with NVFP4 and per-tensor FP8. The product stays fast.
    wide    The dtype represents neither. The values are in float32, and so is the product.

Operands in float32 are exact. Some operands that could be kept apart are wide instead. On a CPU,
these are operands with scales of rows, because torch's matmul can apply only one factor to the
accumulator, and float16 tensors, because torch's float16 matmul is slower than its float32 matmul.
On every device, these are operands in MS-EDEN, whose kernel returns whole values.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.elements import Cast, ElementFormat
from megatron.fake_quant.format_text import from_text, to_text
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.mean_split import SplitMatrix
from megatron.fake_quant.operator_rules import (
    NAMESPACE,
    batch_first,
    is_direct,
    samples,
    stacked,
    without_gradient,
)
from megatron.fake_quant.operators import amax_of, compute
from megatron.fake_quant.packing import QuantizedTensor, dequantize
from megatron.fake_quant.quantize import checked, fake_quantize, seed_for, seeds_for
from megatron.fake_quant.scalings import target
from megatron.fake_quant.scalings.float8_types import FLOAT8
from megatron.fake_quant.scalings.tensor_scale import divide_by, encode_scale
from megatron.fake_quant.special_scalings import GroupScaling, PairScaling, TensorScaling

Kind = Literal["exact", "apart", "wide"]

_SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11}
_HALF_SMALLEST, _HALF_MAX = math.ldexp(1, -24), 65504.0  #: range of float16


def kind_of(fmt: Format, dtype: torch.dtype, device: str) -> Kind:
    """Return how the operand of a GEMM is represented; see the module's docstring.

    Args:
        fmt: format of the operand.
        dtype: dtype of the tensor.
        device: device type of the tensor.
    """
    if dtype == torch.float32 or _is_exact(fmt, dtype):
        return "exact"
    # A product of float16 elements can exceed the range of float16 before the scale is applied, so
    # the matmul must return float32, which it does only on GPUs.
    if not (device == "cuda" or dtype == torch.bfloat16):
        return "wide"
    scaling = fmt.scaling
    if isinstance(scaling, TensorScaling):
        return "apart" if _fits(fmt, dtype) else "wide"
    if not isinstance(scaling, BlockScaling) or fmt.corrects_scales:
        return "wide"
    if scaling.scale == "e4m3" and scaling.outer == "tensor":
        return "apart" if _fits(fmt, dtype) else "wide"
    rows = scaling.scale == "fp32" and scaling.size == WHOLE_AXIS
    return "apart" if rows and device == "cuda" and _fits(fmt, dtype) else "wide"


def _is_exact(fmt: Format, dtype: torch.dtype) -> bool:
    """Return whether `dtype` represents every quantized value of tensors in `dtype` exactly.

    `dtype` is bfloat16 or float16.
    """
    scaling = fmt.scaling
    if scaling is None or isinstance(scaling, PairScaling | GroupScaling):
        return True
    if isinstance(scaling, TensorScaling):
        return scaling.power_of_two
    if not isinstance(scaling, BlockScaling):
        return False
    if scaling.scale == "e8m0":
        return scaling.headroom == "1"
    return scaling.scale != "fp32" and scaling.outer == "none" and _fits(fmt, dtype)


def _fits(fmt: Format, dtype: torch.dtype) -> bool:
    """Return whether every product of an element and an 8-bit block scale is exact in `dtype`."""
    element = fmt.element
    if not isinstance(element, ElementFormat):
        return not fmt.is_cast and not element.is_table  # HiFloat8 has 4 significant bits.
    parts = [element]
    if isinstance(fmt.scaling, BlockScaling) and fmt.scaling.scale in FLOAT8:
        parts.append(FLOAT8[fmt.scaling.scale].element)
    if sum(part.mantissa_bits + 1 for part in parts) > _SIGNIFICANT_BITS[dtype]:
        return False
    if dtype == torch.bfloat16:
        return True
    smallest = math.prod(math.ldexp(part.smallest_normal, -part.mantissa_bits) for part in parts)
    return smallest >= _HALF_SMALLEST and math.prod(part.max for part in parts) <= _HALF_MAX


def quantize_parts(
    parts: SplitMatrix,
    fmt: Format,
    axis: int,
    *,
    seed: int | Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> SplitMatrix:
    """Quantize an operand as `fake_quantize` does, but do not round its values to a shorter dtype.

    Args:
        parts: the operand; the mean of its rows, if split off, stays as it is.
        fmt: format of the operand.
        axis: reduction axis.
        seed: see `fake_quantize`.
        amax: see `fake_quantize`.
        dtype: dtype of the tensors that the GEMM multiplies; by default, that of the values.
            The values may be in float32 if they are the unrounded copy of another operand.
    """
    x = parts.values
    dtype = dtype or x.dtype
    kind = kind_of(fmt, dtype, x.device.type) if x.numel() else "exact"
    if kind == "wide":
        values = fake_quantize(x.float(), fmt, axis, seed=seed, amax=amax)
        return parts._replace(values=values, dtype=dtype)
    if kind == "exact":
        values = fake_quantize(x, fmt, axis, seed=seed, amax=amax)
        if x.dtype != dtype and _narrows(fmt, dtype):
            values = values.to(dtype)
        return parts._replace(values=values, dtype=dtype)
    fmt, layout = checked(x, fmt, axis, amax)
    x = x.detach()
    if is_direct(x):
        values, scale = values_and_scale(x, fmt, layout, seed_for(fmt, None, seed), amax)
    else:
        seeds = seeds_for(fmt, None, seed)
        values, scale = _quantize_apart(x, to_text(fmt), layout.from_end, seeds, 0, amax)
    return parts._replace(values=values.to(dtype), scale=scale, dtype=dtype)


def unpacked_parts(quantized: QuantizedTensor, dtype: torch.dtype) -> SplitMatrix:
    """Return the operand that codes and scales represent, in the form of `quantize_parts`.

    `dtype` is the dtype of the tensors that the GEMM multiplies.
    """
    fmt, scales = quantized.format, quantized.scales
    kind = kind_of(fmt, dtype, quantized.codes.device.type)
    if kind == "exact" and (quantized.dtype == dtype or not _narrows(fmt, dtype)):
        return SplitMatrix(dequantize(quantized), dtype=dtype)
    if kind != "apart":
        values = dequantize(replace(quantized, dtype=torch.float32))
        return SplitMatrix(values if kind == "wide" else values.to(dtype), dtype=dtype)
    scale = scales.whole() if fmt.has_tensor_scale else scales.block().movedim(-1, quantized.axis)
    apart = replace(quantized, format=fmt.with_scale_apart(), dtype=dtype)
    return SplitMatrix(dequantize(apart), scale=scale, dtype=dtype)


def _narrows(fmt: Format, dtype: torch.dtype) -> bool:
    """Return whether `dtype` represents the quantized values of every float32 tensor.

    The format must be exact for tensors of `dtype`.
    """
    return dtype == torch.bfloat16 and _is_short(fmt)


def _is_short(fmt: Format) -> bool:
    """Return whether the elements of a format have no more significant bits than bfloat16."""
    if isinstance(fmt.element, Cast):
        return fmt.element.dtype == torch.bfloat16
    return not isinstance(fmt.element, ElementFormat) or fmt.element.mantissa_bits < 8


def values_and_scale(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `x`, quantized but without its tensor or row scale, and this scale in float32."""
    if fmt.has_tensor_scale:
        amax = amax_of(x) if amax is None else amax.to(x.device)
        if isinstance(fmt.scaling, TensorScaling):
            scale = encode_scale(amax, fmt.scaling).reciprocal()
        else:
            number = target(fmt)
            assert number is not None
            scale = divide_by(amax, number).reciprocal()
    else:
        scale = _row_scale(x, fmt, layout.axis)
    return compute(x, fmt.with_scale_apart(), layout, seed, amax=amax), scale


def _row_scale(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """Return the float32 scales of `x` for a format whose blocks are whole rows along `axis`."""
    assert isinstance(fmt.scaling, BlockScaling)
    assert isinstance(fmt.element, ElementFormat)
    amax = x.abs().amax(axis, keepdim=True).float()
    encode = divide_by(amax, (fmt.scaling.top or fmt.element.max) * fmt.scaling.share)
    return encode.masked_fill_(~amax.isfinite(), torch.nan).reciprocal()


@torch.library.custom_op(f"{NAMESPACE}::quantize_apart", mutates_args=())
def _quantize_apart(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `values_and_scale` of each sample as a torch operator; see `operator_rules.py`."""
    known = from_text(fmt)
    layout = BlockLayout.of(tuple(x.shape[batch:]), known, axis)
    results = [
        values_and_scale(sample, known, layout, seed, of_sample)
        for sample, seed, of_sample in samples(x, seeds, batch, amax)
    ]
    values, scales = zip(*results, strict=True)
    return stacked(values, x, batch), stacked(scales, x, batch)


@_quantize_apart.register_fake
def _(
    x: Tensor, fmt: str, axis: int, seeds: Tensor | None, batch: int, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape = shape[:batch] if from_text(fmt).has_tensor_scale else shape
    if shape[batch:]:
        shape[axis] = 1
    return torch.empty_like(x), x.new_empty(shape, dtype=torch.float32)


@_quantize_apart.register_vmap
def _(
    info: Any,
    in_dims: Any,
    x: Tensor,
    fmt: str,
    axis: int,
    seeds: Tensor | None,
    batch: int,
    amax: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    x, seeds, amax = batch_first(info, in_dims, {0: x, 3: seeds, 5: amax})
    return _quantize_apart(x, fmt, axis, seeds, batch + 1, amax), (0, 0)


without_gradient(_quantize_apart)
