"""Define the backward pass of attention in tiles; see `attention.py`."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.fake_quant.tiles.forward import Rows, Tile, TiledAttention


class Backward:
    """Backward pass of attention in tiles, and the operands that it quantizes as whole matrices."""

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
        self.pv_dgrad_b = pv.quantized("dgrad_b", pv.source("dgrad_b", vt_BDN, vt.dense), axis=-2)
        self.pv_wgrad_c = pv.quantized("wgrad_c", grad_BMD, axis=-2)
        source_BND = qk.source("dgrad_b", key_BND, self.key.dense)
        self.qk_dgrad_b = qk.quantized("dgrad_b", source_BND, axis=-2)
        source_BMD = qk.source("wgrad_a", query_BMD, self.query.dense)
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
        """Return the scores of a tile, and dP, the gradient of its probabilities."""
        scores_BMN = self.attention.scores(self.query, self.key, tile)
        operands = self.pv_dgrad_c.rows(tile.queries), self.pv_dgrad_b.columns(tile.keys)
        return scores_BMN, self.attention.pv.product("dgrad", *operands)

    def _probs(
        self,
        tile: Tile,
        scores_BMN: Tensor,
        factors: tuple[Tensor, Tensor],
        *,
        running: Rows,
        rows: Rows,
    ) -> Tensor:
        """Return the normalized P of a tile, which is then quantized for the gradient of V.

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
        return pv.source("wgrad_a", probs_BMN, lambda: copy_BMN)

    def _grad_value(self, tile: Tile, source_BMN: Tensor) -> Tensor:
        """Return the gradient of V at the keys of a tile, `[B, N, D]`."""
        pv = self.attention.pv
        probs = pv.quantized("wgrad_a", source_BMN, axis=-2, tile=tile.number)
        grad = self.pv_wgrad_c.rows(self._filled(tile))
        return pv.product("wgrad", grad, probs).transpose(1, 2)

    def _filled(self, tile: Tile) -> slice:
        """Return the range of a tile's queries, including any padding after the last query."""
        last = tile.queries.stop == self.operands[0].shape[1]
        return slice(tile.queries.start, None if last else tile.queries.stop)

    def _grad_scores(
        self, tile: Tile, grad_BMN: Tensor, factors: tuple[Tensor, Tensor], dot_BM1: Tensor
    ) -> Tensor:
        """Return dS of a tile from dP (`grad_BMN`).

        With P = share * softmax of the tile's scores, P * (dP - D) is the share times the gradient
        of this softmax, corrected for the difference between D and the same sum over the tile. With
        one tile, the share is 1 and the difference 0, and the result is bit-identical to the
        gradient of torch's softmax.
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
        dq_BMD = qk.product("dgrad", ds, self.qk_dgrad_b.rows(tile.keys))
        ds = qk.quantized("wgrad_c", grad_BMN, axis=-2, tile=tile.number)
        return dq_BMD, qk.product("wgrad", ds, self.qk_wgrad_a.rows(self._filled(tile)))


def _row_dot(probs_BMN: Tensor, grad_BMN: Tensor) -> Tensor:
    return (probs_BMN * grad_BMN).sum(-1, keepdim=True)
