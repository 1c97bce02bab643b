"""Recompute attention, that is QK^T, softmax, PV and their gradients, from the saved operands.

On the machine of the run, the recomputed results are bit-identical. Another machine may sum in a
different order, which can change the last bit of a score. The probabilities are then rounded to a
format, so this bit can change an operand of PV by a whole step of the format. A bound for each
value cannot distinguish such a step from an error.

Therefore, the effect of rounding is measured: the recomputation is repeated after changing every
score at random by one unit in the last place of its dtype. The allowed difference between the saved
result and the first recomputation is four times the difference between the two recomputations,
plus four units in the last place of the result. Both the norm and the largest value of the
difference are compared in this way.

This module supports attention without dropout, with a causal or sliding-window mask and with any
scale, with whole matrices or in tiles. Heads of values may be smaller than heads of keys. If ranks
share a sequence (context parallelism), their keys and values are gathered, and the gradients of
keys and values are summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.analysis.dump.reassembly import bits, differences
from megatron.analysis.verification.recompute_linear import (
    Outcome,
    Recomputation,
    amax_of,
    as_outcome,
    check_not_random,
)
from megatron.analysis.verification.recorded_formats import NotCheckedError, Softmax
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.tiles.attention import tiled_attention
from megatron.fake_quant.tiles.forward import Tile, TiledAttention
from megatron.fake_quant.tiles.matmul import AnyOperand, TiledMatmul
from megatron.fake_quant.tiles.tiling import CAUSAL, KeyMask
from megatron.tensor_record import PAIRWISE

MASKED = -10000.0  #: score that Megatron assigns to a masked key
_TIMES = 4.0  #: ratio of the allowed deviation to the measured effect of rounding
_OPERANDS, _GRADIENTS = ("query", "key", "value"), ("grad_query", "grad_key", "grad_value")
_FORWARD = ("output", *PAIRWISE)
RESULTS = (*_FORWARD, *_GRADIENTS)  #: tensors that can be recomputed from the operands


@dataclass(frozen=True, slots=True)
class AttentionFormats:
    """Formats of the two matmuls of attention, and parameters of the softmax between them.

    The formats of a matmul are None if it is computed in high precision.
    """

    qk: GemmFormats | None
    pv: GemmFormats | None
    softmax: Softmax = field(default_factory=Softmax)

    def check(self, *, backward: bool) -> None:
        """Raise `NotCheckedError` if attention cannot be recomputed in these formats.

        Args:
            backward: whether to check the operands of the backward pass, too.

        Raises:
            NotCheckedError: if an operand is rounded stochastically, or transformed with random
                signs.
        """
        for formats in (self.qk, self.pv):
            if formats is not None:
                slots = SLOTS if backward else SLOTS[:2]
                operands = (formats.effective(slot) for slot in slots)
                check_not_random(*operands, why="attention is not recomputed from codes")


def attention(
    ranks: Sequence[Mapping[str, Tensor]],
    formats: AttentionFormats,
    slack: float,
    *,
    amaxes: Sequence[Mapping[str, float]] = (),
) -> Iterator[tuple[int, str, Outcome]]:
    """Check the saved results of attention, and yield each result's rank, name and outcome.

    All ranks of a context-parallel group are checked together.

    Args:
        ranks: operands and results of each rank by name, in the order of the ranks.
        formats: formats of the two matmuls, and the softmax.
        slack: factor by which the allowed deviation is multiplied.
        amaxes: recorded amaxes of each rank's operands; see `recompute_linear.amax_of`.
    """
    amaxes = amaxes or [{} for _ in ranks]
    for operands, results in ((_OPERANDS, _FORWARD), ((*_OPERANDS, "grad_output"), _GRADIENTS)):
        saved_results = [
            (rank, name) for rank, held in enumerate(ranks) for name in results if name in held
        ]
        if not saved_results:
            continue
        backward = "grad_output" in operands
        try:
            if lost := [name for name in operands if any(name not in held for held in ranks)]:
                raise NotCheckedError(f"no {' and no '.join(lost)} to recompute the result from")
            formats.check(backward=backward)
            recomputed = recompute(ranks, formats, amaxes, backward=backward)
        except (NotCheckedError, RuntimeError, ValueError) as error:
            for rank, name in saved_results:
                yield rank, name, as_outcome(error)
            continue
        moved: list[dict[str, Tensor]] = []
        for rank, name in saved_results:
            saved, again = ranks[rank][name], recomputed[rank][name]
            if saved.shape == again.shape and torch.equal(bits(saved), bits(again)):
                yield rank, name, Recomputation(exact=True)
                continue
            moved = moved or recompute(ranks, formats, amaxes, backward=backward, move=True)
            yield rank, name, _judge(saved, again, moved[rank][name], slack)


def _judge(saved: Tensor, again: Tensor, moved: Tensor, slack: float) -> Recomputation:
    """Compare a saved result of attention with its recomputation.

    Args:
        saved: the saved result.
        again: the recomputed result.
        moved: the result recomputed with changed scores, which shows the effect of rounding.
        slack: factor by which the allowed deviation is multiplied.
    """
    if saved.shape != again.shape:
        return Recomputation(exact=False, excess=torch.inf, text=differences(again, saved))
    own, other, once_more = saved.double(), again.double(), moved.double()
    finite = own.isfinite() & other.isfinite()
    if not bool(finite.all()):
        if not torch.equal(own[~finite].nan_to_num(nan=0), other[~finite].nan_to_num(nan=0)):
            return Recomputation(
                exact=False, excess=torch.inf, text="NaN or Inf differ from the recomputation"
            )
        own, other, once_more = (torch.where(finite, x, 0.0) for x in (own, other, once_more))
        once_more = once_more.nan_to_num()
    unit = torch.finfo(saved.dtype).eps
    excess, texts = 0.0, []
    for what, measure in (("its norm", torch.linalg.vector_norm), ("its worst value", _largest)):
        error, noise, size = (float(measure(x)) for x in (own - other, once_more - other, other))
        allowed = slack * _TIMES * (noise + unit * size)
        ratio = error / allowed if allowed else (0.0 if error == 0 else math.inf)
        excess = max(excess, ratio)
        texts.append(f"{what} is off by {error:.3g} of {size:.3g}, {ratio:.3g} times the limit")
    return Recomputation(exact=False, excess=excess, text="; ".join(texts))


def _largest(x: Tensor) -> Tensor:
    return x.abs().max()


def recompute(
    ranks: Sequence[Mapping[str, Tensor]],
    formats: AttentionFormats,
    amaxes: Sequence[Mapping[str, float]],
    *,
    backward: bool,
    move: bool = False,
) -> list[dict[str, Tensor]]:
    """Recompute the forward results or the gradients of attention on each rank.

    Args:
        ranks: operands of each rank by name, in the order of the ranks.
        formats: formats of the two matmuls, and the softmax.
        amaxes: recorded amaxes of each rank's operands.
        backward: whether to compute the gradients instead of the forward results.
        move: whether to change every score by one unit in the last place, or by a few in tiles.
    """
    key, value = (
        gathered([held[name] for held in ranks]).detach().requires_grad_(backward)
        for name in ("key", "value")
    )
    by_rank: list[dict[str, Tensor]] = []
    shares: list[Sequence[Tensor]] = []  #: each rank's part of the key and value gradients
    for rank, held in enumerate(ranks):
        query = held["query"].detach().requires_grad_(backward)
        mask = mask_of(len(query), rank, len(ranks), formats.softmax.window)
        if formats.pv is not None and formats.pv.tiling is not None:
            pairwise = not backward and any(name in held for name in PAIRWISE)
            results = _in_tiles(query, key, value, formats, mask, pairwise=pairwise, move=move)
        else:
            results = _attend(query, key, value, formats, mask, amaxes=amaxes[rank], move=move)
        if not backward:
            by_rank.append({name: results[name] for name in _FORWARD if name in held})
            continue
        grads = torch.autograd.grad(results["output"], (query, key, value), held["grad_output"])
        by_rank.append({"grad_query": grads[0]})
        shares.append(grads[1:])
    for name, parts in zip(_GRADIENTS[1:], zip(*shares, strict=True), strict=False):
        for rank, part in enumerate(_scattered(functools.reduce(torch.add, parts), len(ranks))):
            by_rank[rank][name] = part
    return by_rank


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formats: AttentionFormats,
    mask: KeyMask,
    *,
    amaxes: Mapping[str, float],
    move: bool,
) -> dict[str, Tensor]:
    """Return the scores, probabilities and output of attention, computed without tiles.

    The operations are performed in the same order as in the layer.

    Args:
        query: queries of shape [s, b, heads, d].
        key: keys of all ranks of the context-parallel group.
        value: values of all ranks of the context-parallel group.
        formats: formats of the two matmuls, and the softmax.
        mask: keys that are hidden from queries.
        amaxes: recorded amaxes of the operands.
        move: whether to change every score by one unit in the last place.

    Returns:
        The results by name. The output has shape [s, b, heads * d], where d is the size of a head
        of the values.
    """
    batch, heads, dim = query.shape[1:]
    softmax = formats.softmax
    scale = 1 / math.sqrt(dim) if softmax.scale is None else softmax.scale
    hidden = mask.hidden(slice(0, len(key)))
    assert hidden is not None
    query_BMD, key_BND, value_BND = (by_head(x, heads) for x in (query, key, value))
    scores_BMN = _matmul(query_BMD, key_BND, formats.qk, amaxes, "qk", alpha=scale)
    if move:
        signs = torch.randint(0, 2, scores_BMN.shape, generator=torch.Generator().manual_seed(0))
        scores_BMN = scores_BMN * (1 + torch.finfo(query.dtype).eps * (2 * signs - 1)).to(query)
    masked_BMN = masked_scores(scores_BMN, softmax, hidden, in_fp32=softmax.in_fp32)
    probs_BMN = masked_BMN.softmax(-1).to(query.dtype)
    unnormalized = None
    if formats.pv is not None and formats.pv.unnormalized:
        unnormalized = unnormalized_probabilities(
            masked_scores(scores_BMN.detach(), softmax, hidden), query.dtype
        )
    value_BDN = value_BND.transpose(1, 2)
    context_BMD = _matmul(probs_BMN, value_BDN, formats.pv, amaxes, "pv", unnormalized=unnormalized)
    pairwise = {"attention_scores": scores_BMN, "attention_probs": probs_BMN}
    return _by_name(context_BMD, pairwise, batch)


def _by_name(context_BMD: Tensor, pairwise: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Return the results by name, in the shapes in which they are saved."""
    results = {name: x.view(batch, -1, *x.shape[1:]) for name, x in pairwise.items()}
    context = context_BMD.view(batch, -1, *context_BMD.shape[1:]).permute(2, 0, 1, 3)
    return results | {"output": context.reshape(context.shape[0], batch, -1)}


class _Moved(TiledAttention):
    """Tiled attention that changes its scores at random by a few units in the last place.

    The scores of tiles are float32. Sums of the same products in a different order differ by
    several units.
    """

    def scores(self, query: AnyOperand, key: AnyOperand, tile: Tile) -> Tensor:
        """Return the changed scores of a tile."""
        scores_BMN = super().scores(query, key, tile)
        generator = torch.Generator().manual_seed(tile.number)
        signs = torch.randint(0, 2, scores_BMN.shape, generator=generator)
        return scores_BMN * (1 + 2.0**-20 * (2 * signs - 1))


def _in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formats: AttentionFormats,
    mask: KeyMask,
    *,
    pairwise: bool,
    move: bool,
) -> dict[str, Tensor]:
    """Return the output of attention in tiles and, if `pairwise`, its scores and probabilities.

    The other arguments are those of `_attend`.
    """
    batch, heads, dim = query.shape[1:]
    softmax, pv = formats.softmax, formats.pv
    assert pv is not None
    assert pv.tiling is not None
    scale = 1 / math.sqrt(dim) if softmax.scale is None else softmax.scale
    qk = GemmFormats() if formats.qk is None else formats.qk
    attention = (_Moved if move else TiledAttention)(
        TiledMatmul(qk, scale),
        TiledMatmul(pv),
        pv.tiling,
        mask,
        heads,
        softmax.coefficient,
    )
    query_BMD, key_BND, value_BND = (by_head(x, heads) for x in (query, key, value))

    context_BMD = tiled_attention(query_BMD, key_BND, value_BND, attention=attention)
    matrices = attention.pairwise(query_BMD, key_BND) if pairwise else ()
    return _by_name(context_BMD, dict(zip(PAIRWISE, matrices, strict=False)), batch)


def masked_scores(
    scores_BMN: Tensor, softmax: Softmax, hidden: Tensor, *, in_fp32: bool = True
) -> Tensor:
    """Return the scaled and masked scores, which are the input of softmax."""
    scores_BMN = scores_BMN.float() if in_fp32 else scores_BMN
    if softmax.coefficient is not None:
        scores_BMN = scores_BMN * softmax.coefficient
    return scores_BMN.masked_fill(hidden, MASKED)


def unnormalized_probabilities(masked_BMN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `exp(scores - rowmax)` in `dtype` and its row sums in float32."""
    e_BMN = (masked_BMN - masked_BMN.amax(-1, keepdim=True)).exp()
    return e_BMN.to(dtype), e_BMN.sum(-1, keepdim=True)


def by_head(x: Tensor, heads: int) -> Tensor:
    """Reshape [s, b, groups, d] to [b * heads, s, d]; repeat each group for the heads it serves."""
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x.reshape(x.shape[0], -1, x.shape[3]).transpose(0, 1)


def _matmul(
    a_BMK: Tensor,
    b_BNK: Tensor,
    formats: GemmFormats | None,
    amaxes: Mapping[str, float],
    operation: str,
    *,
    alpha: float = 1.0,
    unnormalized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    if formats is not None:

        def recorded(slot: str, x: Tensor, fmt: Format) -> Tensor:
            amax = amax_of(fmt, amaxes, f"{operation}_{slot}")
            assert amax is not None
            return amax

        return quantized_matmul(
            a_BMK, b_BNK, formats, alpha=alpha, unnormalized=unnormalized, amax_of=recorded
        )
    bt_BKN = b_BNK.transpose(1, 2)
    if alpha == 1.0:
        return cpu_matmul.bmm(a_BMK, bt_BKN)
    out = a_BMK.new_empty(*a_BMK.shape[:2], bt_BKN.shape[2])
    return cpu_matmul.baddbmm(out, a_BMK, bt_BKN, beta=0.0, alpha=alpha)


def mask_of(tokens: int, rank: int, size: int, window: tuple[int, int] | None) -> KeyMask:
    """Return the mask of the keys that are hidden from the queries of one rank.

    Args:
        tokens: number of tokens on each rank.
        rank: context-parallel rank.
        size: size of the context-parallel group.
        window: numbers of visible keys before and after a query; None for a causal mask.
    """
    keys = torch.arange(tokens * size)
    chunks = keys.chunk(2 * size)
    queries = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) if size > 1 else keys
    window = CAUSAL if window is None else window
    return KeyMask(queries, window, first=0 if size == 1 else None)


def gathered(parts: Sequence[Tensor]) -> Tensor:
    """Join the zigzag chunks of all context-parallel ranks, in the order of the sequence."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])


def _scattered(whole: Tensor, size: int) -> list[Tensor]:
    """Divide a sequence into the zigzag chunks of each rank, as the inverse of `gathered`."""
    if size == 1:
        return [whole]
    chunks = whole.chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size)]
