"""Define the settings and the forward pass of attention in tiles; see `attention.py`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant import scalings
from megatron.fake_quant.accumulate.unit_matrix import scales_follow_values
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.tiles.checks import misfits, query_step
from megatron.fake_quant.tiles.matmul import AnyOperand, TiledMatmul
from megatron.fake_quant.tiles.tiling import ALL_VISIBLE, KeyMask, Tiling

MASKED = -10000.0  #: score of a hidden key, as in megatron-core


class Tile(NamedTuple):
    """A tile of keys, and the queries that may see any of these keys."""

    number: int  #: number of the tile, counted from the first key
    keys: slice
    queries: slice


class Rows(NamedTuple):
    """Running maximum and running sum of each query's row, `[B, M, 1]`, in float32."""

    largest: Tensor  #: m, the largest score of the keys so far
    total: Tensor  #: l, the sum of exp(S - m) over these keys, without the static scale of P

    @classmethod
    def start(cls, like_BMD: Tensor) -> "Rows":
        """Return the maxima and sums before the first tile."""
        largest = like_BMD.new_full((*like_BMD.shape[:2], 1), -torch.inf)
        return cls(largest, torch.zeros_like(largest))

    def at(self, queries: slice) -> "Rows":
        """Return views of the maxima and sums of the given queries."""
        return Rows(self.largest[:, queries], self.total[:, queries])

    def advance(self, scores_BMN: Tensor) -> tuple[Tensor, Tensor]:
        """Update the maxima and sums in place with the scores of a tile.

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
        """Return the normalized P of a tile as two factors, given the final maxima and sums.

        The factors are the softmax over the tile, and the sum of P over the tile, which is 1 if the
        tile has all keys.
        """
        tile = Rows.start(scores_BMN)
        tile.advance(scores_BMN)
        share_BM1 = (tile.largest - self.largest).exp_() * (tile.total / self.total)
        return scores_BMN.softmax(-1), share_BM1

    def normalized(self, scores_BMN: Tensor) -> Tensor:
        """Return the normalized P of a tile, given the final maxima and sums."""
        probs_BMN, share_BM1 = self.split(scores_BMN)
        return probs_BMN.mul_(share_BM1)


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Formats and settings of attention in tiles: everything that it needs except the tensors.

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

    def prepared(self, dtype: torch.dtype) -> "TiledAttention":
        """Return these settings with seeds and random signs, which forward and backward share.

        `dtype` is the dtype of Q, K and V.
        """
        return replace(self, qk=self.qk.prepared(dtype), pv=self.pv.prepared(dtype))

    @property
    def continues(self) -> bool:
        """True if the register of a simulated unit keeps O from one tile to the next.

        This requires that the scale of P is the same in all tiles. Otherwise, each tile begins a
        new sum, and O is added up in float32.
        """
        fmt = self.pv.formats.fprop_a.format
        if self.pv.formats.simulated_accumulator("fprop") is None:
            return False
        if fmt is None or not scales_follow_values(fmt):
            return True
        return self.pv.formats.unnormalized and self._constant_amax() is not None

    def tiles(self, queries: int, keys: int) -> Iterator[Tile]:
        """Yield the tiles in their order, without those that no query sees.

        Where the positions show that a query sees no key of a tile, its row is left out. Such rows
        are left out in whole blocks, so that blocks along the queries are as in whole matrices. If
        P or dS depends on all queries (see `query_step`), no row and no tile is left out.
        """
        units = [part.formats.simulated_accumulator("wgrad") for part in (self.qk, self.pv)]
        step = query_step(self.qk.operands, self.pv.operands, filter(None, units))
        for number, span in self.tiling.spans(keys):
            rows = slice(0, queries)
            if step is not None:
                seeing = self.mask.seeing(span, queries, keys)
                stop = -(-seeing.stop // step) * step
                rows = slice(seeing.start // step * step, min(stop, queries))
                if seeing.start >= seeing.stop:
                    continue
            yield Tile(number, span, rows)

    def scores(self, query: AnyOperand, key: AnyOperand, tile: Tile) -> Tensor:
        """Return the scaled and masked scores of a tile in float32."""
        scores_BMN = self.qk.product("fprop", query.rows(tile.queries), key.rows(tile.keys))
        if self.coefficient is not None:
            scores_BMN = scores_BMN * self.coefficient
        return self.filled(scores_BMN, tile, MASKED)

    def filled(self, x_BMN: Tensor, tile: Tile, value: float) -> Tensor:
        """Set the elements of `x_BMN` at hidden keys to `value` in place, and return `x_BMN`."""
        hidden = self.mask.hidden(tile.keys, tile.queries)
        if hidden is not None:
            x_BMN.view(-1, self.heads, *x_BMN.shape[1:]).masked_fill_(hidden, value)
        return x_BMN

    def unnormalized(self, e_BMN: Tensor, number: int) -> AnyOperand:
        """Return the unnormalized P of a tile times the static scale, quantized."""
        scale = self.tiling.scale
        e_BMN = e_BMN if scale is None else e_BMN * scale
        amax = self._constant_amax()
        return self.pv.quantized("fprop_a", e_BMN, axis=-1, tile=number, amax=amax)

    def _constant_amax(self) -> float | None:
        """Return the amax from which the scale of the unnormalized P is computed in all tiles.

        The result is None if P has no scale for the whole tensor, or a different one in each tile.
        """
        operand = self.pv.formats.fprop_a
        if operand.format is None or not operand.format.has_tensor_scale:
            return None
        if self.tiling.scale is not None:
            return scalings.target(operand.format)  # the scale of the tile is then 1
        return 1.0 if operand == Operand(operand.format) else None

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
        probs = vt  # replaced by P of the last tile
        for tile in tiles:
            probs_BMN = rows.at(tile.queries).normalized(self.scores(query, key, tile))
            probs = self.pv.quantized("fprop_a", probs_BMN, axis=-1, tile=tile.number)
            self._add(out_BMD[:, tile.queries], probs, vt.columns(tile.keys))
        return self.pv.finished(out_BMD, probs, vt) if self.continues else out_BMD, rows

    def _add(self, out_BMD: Tensor, probs: AnyOperand, vt: AnyOperand) -> None:
        """Add P V of a tile to `out_BMD` in place; see `continues`."""
        if self.continues:
            out_BMD.copy_(self.pv.continued(out_BMD, probs, vt))
        else:
            out_BMD += self.pv.product("fprop", probs, vt)

    def _online(
        self,
        operands: tuple[AnyOperand, AnyOperand, AnyOperand],
        tiles: Iterable[Tile],
        rows: Rows,
        out_BMD: Tensor,
    ) -> tuple[Tensor, Rows]:
        """Return what `forward` returns, computed with unnormalized P.

        Args:
            operands: quantized Q, K and V^T.
            tiles: the tiles in their order.
            rows: values before the first tile.
            out_BMD: zeros.
        """
        query, key, vt = operands
        scale = 1.0 if self.tiling.scale is None else self.tiling.scale
        sums_BM1 = torch.zeros_like(rows.total)  # row sums of the quantized P, times `scale`
        probs = vt  # replaced by P of the last tile
        for tile in tiles:
            e_BMN, shrink_BM1 = rows.at(tile.queries).advance(self.scores(query, key, tile))
            probs = self.unnormalized(e_BMN, tile.number)
            out_BMD[:, tile.queries] *= shrink_BM1
            self._add(out_BMD[:, tile.queries], probs, vt.columns(tile.keys))
            if self.tiling.row_sum == "quantized":
                part_BM1 = sums_BM1[:, tile.queries]
                part_BM1.mul_(shrink_BM1).add_(probs.dense().sum(-1, keepdim=True))
        if self.continues:
            out_BMD = self.pv.finished(out_BMD, probs, vt)
        if self.tiling.row_sum == "quantized":
            return out_BMD / sums_BM1, Rows(rows.largest, sums_BM1 / scale)
        return out_BMD / (rows.total * scale), rows

    @torch.no_grad()
    def pairwise(self, query_BMD: Tensor, key_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, neither multiplied by `coefficient` nor masked, and the normalized P.

        Both are whole matrices `[B, M, N]` in the dtype of the queries. The output does not need
        them, and they take as much memory as attention without tiles.
        """
        settings = self.prepared(query_BMD.dtype)
        settings = replace(settings, qk=replace(settings.qk, observe=None))
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
