"""Multiply operands of a GEMM whose values are not rounded to the dtype of the tensors.

`matmul` and `matmul_then_scale` multiply plain tensors. `multiply` calls one of them, unless an
operand has values that are not rounded to its dtype.

`unrounded.py` explains how these operands are represented. The product of two operands is rounded
once, to the dtype of the tensors, after all scales and the factor alpha have been applied to the
float32 sums. There are three ways to do this:

- On a CPU, oneDNN multiplies each float32 sum by one factor before rounding: alpha times the scales
  of both tensors.
- On a GPU, the matmul returns the float32 sums, and the factors are applied to them.
- If an operand is in float32, or if a scale runs along the reduction axis, the product is computed
  in float32. It is several times slower: on one core with AVX-512, 100 instead of 450 GFLOP/s.
  Where torch is slow in shorter dtypes, every product is computed in float32; see `cpu_matmul.py`.

Products of bfloat16 parts of a float32 operand would not be better. Two parts hold 16 of its 24
significant bits, so the product would be less exact. Three parts hold all of them, but six to nine
products of such parts take longer than one product in float32.

Autocast is off in these products, because it would round float32 operands.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.matmul.autocast import autocast_of, no_autocast
from megatron.fake_quant.matmul.mean_split import SplitMatrix
from megatron.fake_quant.operator_rules import (
    NAMESPACE,
    batch_first,
    is_direct,
    stacked,
    without_gradient,
)

#: Function that returns a factor times the product of two tensors of the same dtype.
Matmul = Callable[[Tensor, Tensor, float], Tensor]
_FLOAT32 = torch.finfo(torch.float32)


def multiply(a: SplitMatrix, b: SplitMatrix, alpha: float, plain: Matmul) -> Tensor:
    """Return `alpha` times the product of the first parts of `a` and `b`, in their dtype.

    `plain` multiplies operands whose values are rounded to their dtype.
    """
    if not (a.is_unrounded() or b.is_unrounded()):
        return plain(a.values, b.values, alpha)
    dtype = product_dtype(a, b)
    with no_autocast(a.values.device.type):
        a, b = _without_scales_along(a, -1), _without_scales_along(b, -2)
        values = a.values, b.values
        if torch.float32 in (values[0].dtype, values[1].dtype):
            return _wide(*values, a.scale, b.scale, alpha).to(dtype)
        if is_direct(values[0]) and is_direct(values[1]):
            return _scaled(*values, a.scale, b.scale, alpha)
        result: Tensor = _scaled_product(*values, a.scale, b.scale, alpha, 0)
        return result


def product_dtype(a: SplitMatrix, b: SplitMatrix) -> torch.dtype:
    """Return the dtype of a product, which is the one that `torch.matmul` would choose."""
    autocast = autocast_of(a.values.device.type)
    if autocast is not None and autocast[0]:
        return autocast[1]
    return torch.promote_types(a.dtype or a.values.dtype, b.dtype or b.values.dtype)


def _without_scales_along(matrix: SplitMatrix, axis: int) -> SplitMatrix:
    """Multiply the values by scales that differ along the reduction axis `axis`, in float32."""
    scale = matrix.scale
    if scale is None or scale.dim() == 0 or scale.shape[axis] == 1:
        return matrix
    return matrix._replace(values=matrix.scaled(), scale=None)


def _wide(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, alpha: float
) -> Tensor:
    """Return the product of two tensors in float32, times the scales and `alpha`."""
    return _times(torch.matmul(a.float(), b.float()), alpha, scale_a, scale_b)


def _times(sums: Tensor, alpha: float, *scales: Tensor | None) -> Tensor:
    for scale in scales:
        sums = sums if scale is None else sums * scale
    return sums if alpha == 1.0 else sums * alpha


def _scaled(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, alpha: float
) -> Tensor:
    """Return the product of bfloat16 or float16 values, times the scales and `alpha`."""
    dtype = a.dtype
    a3, b3 = (x.flatten(0, -3) if x.dim() > 3 else x for x in (a, b))
    if a.is_cuda:
        multiply = torch.bmm if a3.dim() == 3 else torch.mm
        sums = multiply(a3, b3, out_dtype=torch.float32).view(*a.shape[:-1], b.shape[-1])
        if (scaled := dispatch.find_scaling(sums, scale_a, scale_b)) is not None:
            return scaled(sums, alpha, scale_a, scale_b, dtype)
        return _times(sums, alpha, scale_a, scale_b).to(dtype)
    scales = [scale for scale in (scale_a, scale_b) if scale is not None]
    factor = alpha
    for scale in scales:
        factor *= scale.item() if scale.dim() == 0 else torch.nan
    if not _FLOAT32.tiny <= abs(factor) <= _FLOAT32.max:  # or a scale is not a scalar
        return _wide(a, b, scale_a, scale_b, alpha).to(dtype)
    add = cpu_matmul.baddbmm if a3.dim() == 3 else cpu_matmul.addmm
    none = a.new_empty((1,) * a3.dim())  # ignored, because beta is 0
    return add(none, a3, b3, beta=0.0, alpha=factor).view(*a.shape[:-1], b.shape[-1])


def matmul(a_MK: Tensor, bt_KN: Tensor, alpha: float) -> Tensor:
    """Return `alpha * a_MK @ bt_KN`.

    For 3-D operands, alpha is applied to the accumulator, as in megatron-core's attention.
    """
    if alpha == 1.0 or a_MK.dim() != 3:
        return _times(cpu_matmul.matmul(a_MK, bt_KN), alpha)
    out = a_MK.new_empty(a_MK.shape[0], a_MK.shape[1], bt_KN.shape[2])
    return cpu_matmul.baddbmm(out, a_MK, bt_KN, beta=0.0, alpha=alpha)


def matmul_then_scale(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """Return `left @ right`, rounded to its dtype and then multiplied by `alpha`."""
    return _times(cpu_matmul.matmul(left, right), alpha)


@torch.library.custom_op(f"{NAMESPACE}::scaled_product", mutates_args=())
def _scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    batch: int,
) -> Tensor:
    """Return what `_scaled` returns, for each sample of a batch; see `operator_rules.py`."""
    if not batch:
        return _scaled(a, b, scale_a, scale_b, alpha)
    count = math.prod(a.shape[:batch])
    samples: list[Any] = [
        [None] * count if part is None else part.flatten(0, batch - 1).unbind(0)
        for part in (a, b, scale_a, scale_b)
    ]
    results = [_scaled(x, y, s, t, alpha) for x, y, s, t in zip(*samples, strict=True)]
    return stacked(results, a, batch)


@_scaled_product.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    batch: int,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@_scaled_product.register_vmap
def _(
    info: Any,
    in_dims: Any,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float,
    batch: int,
) -> tuple[Tensor, int]:
    parts = batch_first(info, in_dims, {0: a, 1: b, 2: scale_a, 3: scale_b})
    return _scaled_product(*parts, alpha, batch + 1), 0


without_gradient(_scaled_product)
