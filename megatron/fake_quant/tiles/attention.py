"""Compute attention with quantized operands tile by tile, as flash-attention kernels do.

`gemm.py` multiplies whole matrices. A kernel never has whole matrices of scores: it visits the keys
tile by tile and keeps a running maximum m and a running sum l per query (online softmax). This
changes what is rounded, because P is quantized while m is still the running maximum. With
unnormalized probabilities, the forward pass is, for each tile in the order of `Tiling`:

    S  = coefficient * (scale * Q K^T), masked          m' = max(m, max of S)
    e  = exp(S - m')            P = Q(e * static scale)
    l  = l * exp(m - m') + sum of e, or of P            O  = O * exp(m - m') + P V

The output is O / l. With normalized probabilities, a first pass over the tiles computes m and l,
and a second one multiplies P = exp(S - m) / l by V. The backward pass recomputes S and the
normalized P with the final m and l, from the same quantized Q and K (arXiv 2603.00040):

    dV = P^T dO        dP = dO V^T        D = sum of P * dP over all keys
    dS = P * (dP - D)  dQ = dS K          dK = dS^T Q

D needs all tiles, so dP is computed twice. Kernels take D = dO * O instead, which equals the sum
only if O is exactly P V; arXiv 2603.00040 reports that this fails in four bits, and computes O once
more in high precision for this purpose.

Which values share a scale:

    Q, K, V, dO  exist before the kernel runs. They are quantized as a whole and then cut.
    P and dS     are quantized tile by tile. A scale for the whole tensor belongs to one tile, with
                 the queries of all heads. For the unnormalized P, this scale is constant: it is
                 computed from the largest possible value, 1, or it is 1 with a static scale.

If a GEMM has an accumulator, each of its products is summed as the matrix unit does. The sums begin
and end as in FlashAttention-3 (arXiv 2407.08608):

    S and dP   one sum over the head dimension per value
    O          one sum over all keys: the register keeps O, which is multiplied by exp(m - m') in
               float32 and is the addend C of the next tile's product, D = A B + C. With promotion,
               the second sum is O, and the running sum begins with zero in each tile. Scales that
               the unit does not apply multiply O after the last tile. If P has such a scale of its
               own in each tile, no register can continue the sum. Each tile then begins a new one,
               and O is added up in float32, as in SageAttention2 (arXiv 2411.10958).
    dV and dK  one sum over all queries per value
    dQ         one sum per tile; the tiles are added up in float32, as in memory

All other arithmetic is float32, whatever the dtype of Q, K and V, because the intermediate values
stay in a kernel's registers. A unit reads an operand without a format in the dtype of Q, K and V.
The result and the gradients are rounded to this dtype at the end. With one tile, they are
bit-identical to those of attention with whole matrices in float32. For tile 0, counted from the
first key, stochastic rounding draws the same random bits as for whole matrices; every other tile
has its own.

Shape suffixes: B for batch times heads, M for queries, N for keys, D for the head dimension: that
of V in `value_BND` and in the output, otherwise that of Q and K. `vt` is V^T.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.tiles.backward import Backward
from megatron.fake_quant.tiles.checks import misfits
from megatron.fake_quant.tiles.forward import Rows, TiledAttention
from megatron.fake_quant.tiles.tiling import WHOLE_PAIRS, Tiling


class _TiledAttention(torch.autograd.Function):
    """Autograd function behind `tiled_attention`; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BMD: Tensor,
        key_BND: Tensor,
        value_BND: Tensor,
        attention: TiledAttention,
    ) -> Tensor:
        attention = attention.prepared(query_BMD.dtype)
        operands = (query_BMD, key_BND, value_BND)
        with torch.autocast(query_BMD.device.type, enabled=False):
            out_BMD, rows = attention.forward(*(x.float() for x in operands))
        if attention.watch is not None:
            attention.watch(rows.largest)
        ctx.save_for_backward(*operands, *rows)
        ctx.attention = attention
        return out_BMD.to(query_BMD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BMD: Tensor) -> tuple[Tensor | None, ...]:
        *operands, largest, total = ctx.saved_tensors
        with torch.autocast(grad_BMD.device.type, enabled=False):
            wide = tuple(x.float() for x in operands)
            backward = Backward(ctx.attention, wide, grad_BMD.float())
            grads = backward.gradients(Rows(largest, total))
        pairs = zip(operands, grads, ctx.needs_input_grad, strict=False)
        return *(grad.to(x.dtype) if needed else None for x, grad, needed in pairs), None


def default_tiling(
    matmuls: Mapping[str, GemmFormats | None], queries: int, keys: int
) -> tuple[Tiling | None, str]:
    """Return the tiles to use, if any, when the recipe sets none, and the reason as text.

    The decision depends on the sequence and the formats only, so that it is the same on all
    devices, for all batch sizes and on all tensor-parallel ranks.

    Args:
        matmuls: formats of "qk" and "pv"; None for high precision.
        queries: number of queries of a head.
        keys: number of keys of a head.

    Returns:
        The tiles, or None for whole matrices, and the reason as text. The text is empty if whole
        matrices are small or no matmul has a format.
    """
    pairs = queries * keys
    if pairs <= WHOLE_PAIRS or all(formats is None for formats in matmuls.values()):
        return None, ""
    size = (
        f"whole matrices of {queries} queries and {keys} keys take "
        f"{pairs * 4 / (1 << 20):.0f} MiB per head and copy in float32, more than "
        f"{WHOLE_PAIRS * 4 >> 20} MiB"
    )
    tiling = Tiling()
    for operation, formats in matmuls.items():
        if formats is not None:
            operands = {slot: getattr(formats, slot) for slot in SLOTS}
            for message in misfits(operation, operands, tiling.tile):
                return None, f"{size}, but {operation}: {message}"
    return tiling, size


# `torch.compiler.disable` does the same, but imports torch's compiler here, which takes a second.
@torch._disable_dynamo  # type: ignore[attr-defined]
def tiled_attention(
    query_BMD: Tensor, key_BND: Tensor, value_BND: Tensor, *, attention: TiledAttention
) -> Tensor:
    """Return the output of attention `[B, M, D]`, computed tile by tile.

    Args:
        query_BMD: queries of all heads.
        key_BND: keys, repeated for the heads that share them.
        value_BND: values, repeated in the same way; D may differ from that of the keys.
        attention: formats and settings.

    Returns:
        The output in the dtype of the queries.

    Raises:
        ValueError: if the shapes do not fit.
    """
    shapes = [tuple(x.shape) for x in (query_BMD, key_BND, value_BND)]
    (batch, _, size), _, _ = shapes if all(len(shape) == 3 for shape in shapes) else [(0, 0, 0)] * 3
    if not batch or shapes[1] != (batch, shapes[2][1], size) or shapes[2][0] != batch:
        raise ValueError(
            f"Q {shapes[0]}, K {shapes[1]} and V {shapes[2]} do not fit; give Q as [B, queries, d] "
            "and K and V as [B, keys, ...], with the same d for Q and K"
        )
    result: Tensor = _TiledAttention.apply(query_BMD, key_BND, value_BND, attention)  # type: ignore[no-untyped-call]
    return result
