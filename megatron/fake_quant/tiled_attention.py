"""Compute attention with quantized operands tile by tile, as flash-attention kernels do.

`gemm.py` multiplies whole matrices. A kernel never has whole matrices of scores: it visits the keys
tile by tile and keeps a running maximum m and a running sum l per query (online softmax). This
changes what is rounded, because P has the running maximum when it is quantized. With unnormalized
probabilities, the forward pass is, for each tile in the order of `Tiling`:

    S  = coefficient * (scale * Q K^T), masked          m' = max(m, max of S)
    e  = exp(S - m')            P = Q(e * static scale)
    l  = l * exp(m - m') + sum of e, or of P            O  = O * exp(m - m') + P V

and at the end O / l. With normalized probabilities, a first pass over the tiles computes m and l,
and a second one multiplies P = exp(S - m) / l by V. The backward pass recomputes S and the
normalized P with the final m and l, from the same quantized Q and K (arXiv 2603.00040):

    dV = P^T dO        dP = dO V^T        D = sum of P * dP over all keys
    dS = P * (dP - D)  dQ = dS K          dK = dS^T Q

D needs all tiles, so that dP is computed twice. Kernels take D = dO * O instead, which equals the
sum only if O is exactly P V; arXiv 2603.00040 reports that this fails in four bits, and computes O
once more in high precision for it.

Which values share a scale:

    Q, K, V, dO  exist before the kernel runs. They are quantized whole, and cut afterwards.
    P and dS     are quantized tile by tile. A scale for the whole tensor belongs to one tile, with
                 the queries of all heads. For the unnormalized P, it is constant: that of the
                 largest possible value, 1, or with a static scale S that of S * P, which is 1.

All arithmetic is float32, whatever the dtype of Q, K and V, because the intermediate values stay in
a kernel's registers. The result and the gradients are rounded to this dtype at the end. With one
tile, they have the same bits as attention with whole matrices in float32. Stochastic rounding draws
the bits of tile 0, counted from the first key, as for whole matrices, and others for each of the
other tiles.

Shape suffixes: B batch times heads, M queries, N keys, D head dimension of Q and K, and in
`value_BND` and the output that of V. `vt` is V^T.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.fake_quant import scalings
from megatron.fake_quant.gemm import (
    OF_FORWARD,
    SLOTS,
    GemmFormats,
    Observer,
    matmul,
    matmul_then_scale,
)
from megatron.fake_quant.mean_split import SplitMatrix, with_means
from megatron.fake_quant.operand import Operand
from megatron.fake_quant.products import multiply
from megatron.fake_quant.random_bits import derive_seed, draw_seed
from megatron.fake_quant.tile_checks import misfits, query_step
from megatron.fake_quant.tiling import ALL_VISIBLE, WHOLE_PAIRS, KeyMask, Tiling
from megatron.fake_quant.unrounded import quantize_parts

MASKED = -10000.0  #: score of a hidden key, as in megatron-core


@dataclass(frozen=True, slots=True)
class TiledMatmul:
    """One of the two matmuls of attention, with the two of its gradients."""

    formats: GemmFormats
    alpha: float = 1.0  #: factor of the accumulated products
    #: seed of stochastic rounding and random signs; required if `formats.random`
    seed: int | None = None
    #: function that is called with each operand that is quantized whole, before it is quantized
    observe: Observer | None = None

    @property
    def operands(self) -> dict[str, Operand]:
        """Return the operands by slot."""
        return {slot: getattr(self.formats, slot) for slot in SLOTS}

    def prepared(self) -> "TiledMatmul":
        """Return this matmul with a seed and with the random signs of its transforms drawn."""
        if not self.formats.random:
            return self
        seed = draw_seed(None) if self.seed is None else self.seed
        operands = {
            slot: operand.drawn(derive_seed(seed, slot.partition("_")[0]))
            for slot, operand in self.operands.items()
        }
        formats = replace(self.formats, **operands)  # type: ignore[arg-type]
        return replace(self, formats=formats, seed=seed)

    def quantized(
        self, slot: str, x: Tensor, *, axis: int, tile: int | None = None, amax: float | None = None
    ) -> SplitMatrix:
        """Return an operand as its GEMM multiplies it.

        Args:
            slot: one of `gemm.SLOTS`.
            x: the operand in float32.
            axis: reduction axis of the GEMM.
            tile: number of the tile, or None if `x` is a whole matrix.
            amax: number from which the scale of the whole tensor, if any, is computed.
        """
        operand: Operand = getattr(self.formats, slot)
        parts = operand.prepared(x, axis=axis, fill=slot.startswith("wgrad"))
        if operand.format is None:
            return parts
        seed = None
        if operand.format.stochastic:
            assert self.seed is not None
            seed = derive_seed(self.seed, slot, tile) if tile else derive_seed(self.seed, slot)
        if self.observe is not None and tile is None:
            self.observe(slot, parts.values, operand, axis, seed, None)
        given = None if amax is None else torch.tensor(amax, device=x.device)
        return quantize_parts(parts, operand.format, axis, seed=seed, amax=given)

    def source(self, slot: str, x: Tensor, copy: SplitMatrix) -> Tensor:
        """Return the tensor from which an operand of the backward pass is quantized.

        `copy` is the tensor `x` as the forward pass multiplied it.
        """
        if self.formats.straight_through:
            return copy.dense()
        if getattr(self.formats, slot).source == "dequantized":
            forward: Operand = getattr(self.formats, OF_FORWARD[slot])
            return forward.rotated_back(copy.dense())
        return x

    def product(self, a: SplitMatrix, b: SplitMatrix) -> Tensor:
        """Return `alpha * A @ B^T` for the operands of the forward pass, in float32."""
        result = multiply(a, b.t(), self.alpha, matmul)
        return with_means(result, a, b.t(), self.alpha)

    def gradient(self, left: SplitMatrix, right: SplitMatrix) -> Tensor:
        """Return `alpha * left @ right` for the operands of the backward pass, in float32."""
        grad = multiply(left, right, self.alpha, matmul_then_scale)
        grad = with_means(grad, left, right, self.alpha)
        if not self.formats.straight_through:
            return grad
        return self.formats.fprop_a.rotated_back(grad)  # undo the forward pass's transform


class Tile(NamedTuple):
    """A tile, with the queries that may see any of its keys."""

    number: int  #: number of the tile, counted from the first key
    keys: slice
    queries: slice


class Rows(NamedTuple):
    """Running maximum and running sum of each query's row, `[B, M, 1]`, in float32."""

    largest: Tensor  #: m, the largest score of the keys so far
    total: Tensor  #: l, the sum of exp(S - m); at the end, without a static scale

    @classmethod
    def start(cls, like_BMD: Tensor) -> "Rows":
        """Return the values before the first tile."""
        largest = like_BMD.new_full((*like_BMD.shape[:2], 1), -torch.inf)
        return cls(largest, torch.zeros_like(largest))

    def at(self, queries: slice) -> "Rows":
        """Return views of the values of some queries."""
        return Rows(self.largest[:, queries], self.total[:, queries])

    def advance(self, scores_BMN: Tensor) -> tuple[Tensor, Tensor]:
        """Update the values in place for a tile with these scores.

        Returns:
            The unnormalized P of the tile, and the factor exp(m - m') of earlier sums.
        """
        largest = torch.maximum(self.largest, scores_BMN.amax(-1, keepdim=True))
        e_BMN = (scores_BMN - largest).exp_()
        shrink_BM1 = (self.largest - largest).exp_()
        self.total.mul_(shrink_BM1).add_(e_BMN.sum(-1, keepdim=True))
        self.largest.copy_(largest)
        return e_BMN, shrink_BM1

    def split(self, scores_BMN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized P of a tile as two factors; `self` holds the final values.

        The factors are the softmax over the tile, and the sum of P over the tile, which is 1 if the
        tile has all keys.
        """
        tile = Rows.start(scores_BMN)
        tile.advance(scores_BMN)
        share_BM1 = (tile.largest - self.largest).exp_() * (tile.total / self.total)
        return scores_BMN.softmax(-1), share_BM1

    def normalized(self, scores_BMN: Tensor) -> Tensor:
        """Return the normalized P of a tile; `self` holds the final values."""
        probs_BMN, share_BM1 = self.split(scores_BMN)
        return probs_BMN.mul_(share_BM1)


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Formats and settings of attention in tiles: all arguments except the tensors.

    Raises:
        ValueError: if tiles cut the blocks of an operand.
    """

    qk: TiledMatmul  #: QK^T; its `alpha` is the scale of the scores
    pv: TiledMatmul  #: PV
    tiling: Tiling
    mask: KeyMask = ALL_VISIBLE
    heads: int = 1  #: number of heads of a sample, for a mask that differs between samples or heads
    coefficient: float | None = None  #: factor of the float32 scores, applied before masking
    #: function that is called with the largest score of each query, `[B, M, 1]`
    watch: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        for operation, part in (("qk", self.qk), ("pv", self.pv)):
            for message in misfits(operation, part.operands, self.tiling.tile):
                raise ValueError(f"{operation}: {message}")

    def prepared(self) -> "TiledAttention":
        """Return these settings with the seeds and random signs that all passes share."""
        return replace(self, qk=self.qk.prepared(), pv=self.pv.prepared())

    def tiles(self, queries: int, keys: int) -> Iterator[Tile]:
        """Yield the tiles in their order, without those that no query sees.

        Where the positions show that a query sees no key of a tile, its row is left out. Such rows
        are left out in whole blocks, so that blocks along the queries are as in whole matrices.
        """
        step = query_step(self.qk.operands, self.pv.operands)
        for number, span in self.tiling.spans(keys):
            rows = slice(0, queries)
            if step is not None:
                seeing = self.mask.seeing(span, queries, keys)
                stop = -(-seeing.stop // step) * step
                rows = slice(seeing.start // step * step, min(stop, queries))
                if seeing.start >= seeing.stop:
                    continue
            yield Tile(number, span, rows)

    def scores(self, query: SplitMatrix, key: SplitMatrix, tile: Tile) -> Tensor:
        """Return the scaled and masked scores of a tile in float32."""
        scores_BMN = self.qk.product(_rows(query, tile.queries), _rows(key, tile.keys))
        if self.coefficient is not None:
            scores_BMN = scores_BMN * self.coefficient
        return self.filled(scores_BMN, tile, MASKED)

    def filled(self, x_BMN: Tensor, tile: Tile, value: float) -> Tensor:
        """Return `x_BMN` after setting the values of hidden keys in place."""
        hidden = self.mask.hidden(tile.keys, tile.queries)
        if hidden is not None:
            x_BMN.view(-1, self.heads, *x_BMN.shape[1:]).masked_fill_(hidden, value)
        return x_BMN

    def unnormalized(self, e_BMN: Tensor, number: int) -> SplitMatrix:
        """Return the quantized unnormalized P of a tile, times the static scale."""
        operand, scale = self.pv.formats.fprop_a, self.tiling.scale
        amax = None
        if operand.format is not None and operand.format.has_tensor_scale:
            if scale is not None:
                amax = scalings.target(operand.format)  # the scale of the tile is then 1
            elif operand == Operand(operand.format):
                amax = 1.0
        e_BMN = e_BMN if scale is None else e_BMN * scale
        return self.pv.quantized("fprop_a", e_BMN, axis=-1, tile=number, amax=amax)

    def forward(self, query_BMD: Tensor, key_BND: Tensor, value_BND: Tensor) -> tuple[Tensor, Rows]:
        """Return the output in float32, and what the backward pass needs to recompute P."""
        query = self.qk.quantized("fprop_a", query_BMD, axis=-1)
        key = self.qk.quantized("fprop_b", key_BND, axis=-1)
        vt = self.pv.quantized("fprop_b", value_BND.transpose(1, 2), axis=-1)
        out_BMD = query_BMD.new_zeros(*query_BMD.shape[:2], value_BND.shape[2])
        rows = Rows.start(query_BMD)
        tiles = list(self.tiles(query_BMD.shape[1], key_BND.shape[1]))
        if self.pv.formats.unnormalized:
            return self._online((query, key, vt), tiles, rows, out_BMD)
        for tile in tiles:
            rows.at(tile.queries).advance(self.scores(query, key, tile))
        for tile in tiles:
            probs_BMN = rows.at(tile.queries).normalized(self.scores(query, key, tile))
            probs = self.pv.quantized("fprop_a", probs_BMN, axis=-1, tile=tile.number)
            out_BMD[:, tile.queries] += self.pv.product(probs, _columns(vt, tile.keys))
        return out_BMD, rows

    def _online(
        self,
        operands: tuple[SplitMatrix, SplitMatrix, SplitMatrix],
        tiles: Iterable[Tile],
        rows: Rows,
        out_BMD: Tensor,
    ) -> tuple[Tensor, Rows]:
        """Compute the forward pass with unnormalized P.

        Args:
            operands: quantized Q, K and V^T.
            tiles: the tiles in their order.
            rows: values before the first tile.
            out_BMD: zeros.
        """
        query, key, vt = operands
        scale = 1.0 if self.tiling.scale is None else self.tiling.scale
        sums_BM1 = torch.zeros_like(rows.total)  # row sums of the quantized P, with `scale`
        for tile in tiles:
            e_BMN, shrink_BM1 = rows.at(tile.queries).advance(self.scores(query, key, tile))
            probs = self.unnormalized(e_BMN, tile.number)
            part_BMD = out_BMD[:, tile.queries]
            part_BMD.mul_(shrink_BM1).add_(self.pv.product(probs, _columns(vt, tile.keys)))
            if self.tiling.row_sum == "quantized":
                part_BM1 = sums_BM1[:, tile.queries]
                part_BM1.mul_(shrink_BM1).add_(probs.dense().sum(-1, keepdim=True))
        if self.tiling.row_sum == "quantized":
            return out_BMD / sums_BM1, Rows(rows.largest, sums_BM1 / scale)
        return out_BMD / (rows.total * scale), rows

    @torch.no_grad()
    def pairwise(self, query_BMD: Tensor, key_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, neither masked nor multiplied by `coefficient`, and the normalized P.

        Both are whole matrices `[B, M, N]` in the dtype of the queries. They are not computed for
        the output and cost as much memory as attention without tiles.
        """
        settings = replace(self, qk=replace(self.qk, observe=None))
        plain = replace(settings, mask=ALL_VISIBLE, coefficient=None)
        with torch.autocast(query_BMD.device.type, enabled=False):
            query = settings.qk.quantized("fprop_a", query_BMD.float(), axis=-1)
            key = settings.qk.quantized("fprop_b", key_BND.float(), axis=-1)
            queries, keys = query_BMD.shape[1], key_BND.shape[1]
            scores_BMN = query_BMD.new_empty(query_BMD.shape[0], queries, keys)
            for tile in plain.tiles(queries, keys):
                scores_BMN[..., tile.keys] = plain.scores(query, key, tile)
            probs_BMN, rows = torch.zeros_like(scores_BMN), Rows.start(query_BMD.float())
            for tile in settings.tiles(queries, keys):
                rows.at(tile.queries).advance(settings.scores(query, key, tile))
            for tile in settings.tiles(queries, keys):
                of_tile = rows.at(tile.queries).normalized(settings.scores(query, key, tile))
                probs_BMN[:, tile.queries, tile.keys] = of_tile
        return scores_BMN, probs_BMN


class _Backward:
    """Backward pass of attention in tiles: its operands, quantized whole, and its tiles."""

    def __init__(
        self, attention: TiledAttention, operands: tuple[Tensor, ...], grad_BMD: Tensor
    ) -> None:
        self.attention, self.operands = attention, operands
        query_BMD, key_BND, value_BND = operands
        vt_BDN = value_BND.transpose(1, 2)
        qk, pv = attention.qk, attention.pv
        again = replace(qk, observe=None), replace(pv, observe=None)  # observed in `forward`
        self.query = again[0].quantized("fprop_a", query_BMD, axis=-1)
        self.key = again[0].quantized("fprop_b", key_BND, axis=-1)
        vt = again[1].quantized("fprop_b", vt_BDN, axis=-1)
        self.pv_dgrad_c = pv.quantized("dgrad_c", grad_BMD, axis=-1)
        self.pv_dgrad_b = pv.quantized("dgrad_b", pv.source("dgrad_b", vt_BDN, vt), axis=-2)
        self.pv_wgrad_c = pv.quantized("wgrad_c", grad_BMD, axis=-2)
        source_BND = qk.source("dgrad_b", key_BND, self.key)
        self.qk_dgrad_b = qk.quantized("dgrad_b", source_BND, axis=-2)
        source_BMD = qk.source("wgrad_a", query_BMD, self.query)
        self.qk_wgrad_a = qk.quantized("wgrad_a", source_BMD, axis=-2)

    def gradients(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the gradients of Q, K and V in float32; `rows` comes from the forward pass."""
        tiles = list(self.attention.tiles(self.operands[0].shape[1], self.operands[1].shape[1]))
        dot_BM1 = torch.zeros_like(rows.total)  # D
        for tile in tiles:
            scores_BMN, grad_BMN = self._of_tile(tile)
            probs_BMN, share_BM1 = rows.at(tile.queries).split(scores_BMN)
            dot_BM1[:, tile.queries] += share_BM1 * _row_dot(probs_BMN, grad_BMN)
        dq_BMD, dk_BND, dv_BND = (torch.zeros_like(x) for x in self.operands)
        running = Rows.start(dq_BMD)
        for tile in tiles:
            scores_BMN, grad_BMN = self._of_tile(tile)
            factors = rows.at(tile.queries).split(scores_BMN)
            source_BMN = self._probs(tile, scores_BMN, factors, running=running, rows=rows)
            dv_BND[:, tile.keys] = self._grad_value(tile, source_BMN)
            grad_BMN = self._grad_scores(tile, grad_BMN, factors, dot_BM1[:, tile.queries])
            dq, dk_BND[:, tile.keys] = self._grad_query_key(tile, grad_BMN)
            dq_BMD[:, tile.queries] += dq
        return dq_BMD, dk_BND, dv_BND

    def _of_tile(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the scores of a tile, and the gradient dP."""
        scores_BMN = self.attention.scores(self.query, self.key, tile)
        left = _rows(self.pv_dgrad_c, tile.queries)
        return scores_BMN, self.attention.pv.gradient(left, _columns(self.pv_dgrad_b, tile.keys))

    def _probs(
        self,
        tile: Tile,
        scores_BMN: Tensor,
        factors: tuple[Tensor, Tensor],
        *,
        running: Rows,
        rows: Rows,
    ) -> Tensor:
        """Return the tensor from which P is quantized for the gradient of V.

        Args:
            tile: the tile.
            scores_BMN: its scores.
            factors: its normalized P, as `Rows.split` returns it.
            running: running maximum before the tile; it is updated if the result depends on it.
            rows: final maximum and sum.
        """
        pv, scale = self.attention.pv, self.attention.tiling.scale
        probs_BMN = factors[0] * factors[1]
        if not (pv.formats.straight_through or pv.formats.wgrad_a.source == "dequantized"):
            return probs_BMN
        if pv.formats.unnormalized:
            running, rows = running.at(tile.queries), rows.at(tile.queries)
            e_BMN, _ = running.advance(scores_BMN)
            copy_BMN = self.attention.unnormalized(e_BMN, tile.number).dense()
            copy_BMN *= (running.largest - rows.largest).exp_()
            copy_BMN /= rows.total * (1.0 if scale is None else scale)
        else:
            copy_BMN = pv.quantized("fprop_a", probs_BMN, axis=-1, tile=tile.number).dense()
        return pv.source("wgrad_a", probs_BMN, SplitMatrix(copy_BMN))

    def _grad_value(self, tile: Tile, source_BMN: Tensor) -> Tensor:
        """Return the gradient of V in a tile, `[B, N, D]`."""
        pv = self.attention.pv
        probs = pv.quantized("wgrad_a", source_BMN, axis=-2, tile=tile.number)
        grad = _rows(self.pv_wgrad_c, self._filled(tile))
        return pv.gradient(grad.t(), probs).transpose(1, 2)

    def _filled(self, tile: Tile) -> slice:
        """Return the queries of a tile, with the zeros that fill up the last group of queries."""
        last = tile.queries.stop == self.operands[0].shape[1]
        return slice(tile.queries.start, None if last else tile.queries.stop)

    def _grad_scores(
        self, tile: Tile, grad_BMN: Tensor, factors: tuple[Tensor, Tensor], dot_BM1: Tensor
    ) -> Tensor:
        """Return dS of a tile from dP (`grad_BMN`).

        With P = share * softmax of the tile's scores, P * (dP - D) is the share times the gradient
        of this softmax, corrected for the difference between D and the same sum over the tile. With
        one tile, the share is 1 and the difference 0, and the result has the bits of torch's
        softmax.
        """
        probs_BMN, share_BM1 = factors
        rest_BM1 = _row_dot(probs_BMN, grad_BMN) - dot_BM1
        grad_BMN = torch._softmax_backward_data(grad_BMN, probs_BMN, -1, torch.float32)
        grad_BMN += probs_BMN.mul_(rest_BM1)
        grad_BMN *= share_BM1
        grad_BMN = self.attention.filled(grad_BMN, tile, 0.0)
        coefficient = self.attention.coefficient
        return grad_BMN if coefficient is None else grad_BMN * coefficient

    def _grad_query_key(self, tile: Tile, grad_BMN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of dQ that comes from a tile, and dK of the tile; `grad_BMN` is dS."""
        qk = self.attention.qk
        ds = qk.quantized("dgrad_c", grad_BMN, axis=-1, tile=tile.number)
        dq_BMD = qk.gradient(ds, _rows(self.qk_dgrad_b, tile.keys))
        ds = qk.quantized("wgrad_c", grad_BMN, axis=-2, tile=tile.number)
        return dq_BMD, qk.gradient(ds.t(), _rows(self.qk_wgrad_a, self._filled(tile)))


def _row_dot(probs_BMN: Tensor, grad_BMN: Tensor) -> Tensor:
    return (probs_BMN * grad_BMN).sum(-1, keepdim=True)


def _rows(matrix: SplitMatrix, rows: slice) -> SplitMatrix:
    """Return some rows of a matrix `[B, rows, columns]`."""
    column = matrix.column
    return matrix._replace(
        values=matrix.values[:, rows], column=None if column is None else column[:, rows]
    )


def _columns(matrix: SplitMatrix, columns: slice) -> SplitMatrix:
    """Return some columns of a matrix `[B, rows, columns]`."""
    row = matrix.row
    return matrix._replace(
        values=matrix.values[..., columns], row=None if row is None else row[..., columns]
    )


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
        attention = attention.prepared()
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
            backward = _Backward(ctx.attention, wide, grad_BMD.float())
            grads = backward.gradients(Rows(largest, total))
        pairs = zip(operands, grads, ctx.needs_input_grad, strict=False)
        return *(grad.to(x.dtype) if needed else None for x, grad, needed in pairs), None


def default_tiling(
    matmuls: Mapping[str, GemmFormats | None], queries: int, keys: int
) -> tuple[Tiling | None, str]:
    """Return the tiles in which long sequences are computed without a setting, and the reason.

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
        f"whole matrices of {queries} queries and {keys} keys take {pairs * 4 / 2**20:.0f} MiB per "
        f"head and copy in float32, more than {WHOLE_PAIRS * 4 >> 20} MiB"
    )
    tiling = Tiling()
    for operation, formats in matmuls.items():
        if formats is not None:
            operands = {slot: getattr(formats, slot) for slot in SLOTS}
            for message in misfits(operation, operands, tiling.tile):
                return None, f"{size}, but {operation}: {message}"
    return tiling, size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_attention(
    query_BMD: Tensor, key_BND: Tensor, value_BND: Tensor, *, attention: TiledAttention
) -> Tensor:
    """Return the output of attention `[B, M, D]`, computed tile by tile; see the module.

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
