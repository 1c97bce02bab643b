"""Compute the attention maps of the report, and how a format changes them.

A map has one pixel per group of queries and keys, and one byte per pixel. Only the beginning of the
first sequence is shown. This leaves its attention unchanged, because it is causal.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.attention_maps import entropy
from megatron.analysis.figures.attention_probabilities import (
    Layer,
    hidden_by,
    hidden_keys,
    layers_of,
    recomputable,
    recomputed,
    softmax_of,
    source_of,
)
from megatron.analysis.figures.figure_data import FigureData, NothingToDrawError
from megatron.analysis.plots.attention_map import EXTREME
from megatron.analysis.report.json_numbers import short
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.tiles.tiling import CAUSAL

#: Maximum number of layers, and of heads per layer. If there are more, evenly spread ones are
#: shown.
LAYERS, HEADS = 12, 8
TOKENS = 512  #: maximum number of positions at the beginning of a sequence
SIDES = (64, 48, 32, 24, 16)  #: sides of a map in pixels, the largest that `BYTES` allows
BYTES = 600_000  #: approximate maximum size of all maps, in bytes
MASKED = 0  #: byte of a pixel without any visible pair

Values = NDArray[np.float64]


def attention(figure_data: FigureData) -> dict[str, Any]:
    """Return the attention maps of the newest run's last iteration.

    The result has the key `why` instead if there is nothing to show.
    """
    try:
        layers = _found(figure_data)
    except NothingToDrawError as error:
        return {"why": str(error)}
    chosen = [layers[i] for i in spread(len(layers), LAYERS)]
    drawn, refusals = [], []
    for layer in chosen:
        try:
            drawn.append((layer, _probabilities(figure_data, layer)))
        except (NothingToDrawError, UnreadableTensorError, ValueError) as error:
            refusals.append(str(error))
    if not drawn:
        return {"why": refusals[0]}
    maps = sum(len(item.heads) for _, item in drawn) * (1 + len(figure_data.formats))
    tokens = max(item.probs.shape[-1] for _, item in drawn)
    side = next((side for side in SIDES if maps * side**2 <= BYTES), SIDES[-1])
    return {
        "source": source_of(layers),
        "recomputed": layers[0].key is not None,
        "tokens": tokens,
        "all_layers": len(layers),
        "layers": [
            {"layer": int(layer.row.layer_idx)} | _of_layer(item, figure_data.formats, side)
            for layer, item in drawn
        ],
    }


@dataclass(frozen=True)
class _Attention:
    """The attention of one layer's heads in one sequence, of shape [heads, queries, keys]."""

    heads: list[int]
    all_heads: int
    probs: Tensor
    #: Keys that the mask hides, of shape [queries, keys]; None if the mask is not known.
    hidden: Tensor | None
    #: Query and key of shape [s, 1, heads, d], and the parameters of the softmax; None if query and
    #: key were not collected.
    parts: tuple[Tensor, Tensor, Any] | None

    def in_format(self, name: str) -> Tensor:
        """Return the probabilities with query, key and the probabilities quantized.

        If query and key were not collected, only the probabilities are quantized.
        """
        known = get_format(name).with_own_amax()
        probs = self.probs
        if self.parts is not None:
            query, key, softmax = self.parts
            query, key = (_quantized(x.movedim(0, 2), known).movedim(2, 0) for x in (query, key))
            probs = recomputed(query, key, softmax)[0]
        return _quantized(probs, known)


def _quantized(x: Tensor, known: Any) -> Tensor:
    """Quantize a tensor along its last dimension; a seed makes stochastic rounding reproducible."""
    return fake_quantize(x.contiguous(), known, seed=0)


def _found(figure_data: FigureData) -> list[Layer]:
    """Return the layers to show, preferably those whose query and key were collected."""
    try:
        return recomputable(figure_data)
    except NothingToDrawError:
        return layers_of(figure_data)


def _probabilities(figure_data: FigureData, layer: Layer) -> _Attention:
    if layer.key is None:
        saved = layer.probabilities(figure_data)[0]
        heads = spread(len(saved), HEADS)
        probs = saved[heads, :TOKENS, :TOKENS].float()
        is_square = saved.shape[-1] == saved.shape[-2]
        hidden = hidden_keys(figure_data, layer, probs) if is_square else None
        return _Attention(heads, len(saved), probs, hidden, None)
    query, key = figure_data.load(layer.row.tensor), figure_data.load(layer.key)
    if query.dim() != 4 or key.dim() != 4 or key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise NothingToDrawError(
            f"probabilities cannot be computed from query and key of shapes {shapes}"
        )
    count = query.shape[2]
    heads = spread(count, HEADS)
    groups = [head // (count // key.shape[2]) for head in heads]
    query = query[:TOKENS, :1, heads].float()
    key = key[:TOKENS, :1, groups].float()
    softmax = softmax_of(figure_data, layer)
    probs = recomputed(query, key, softmax)[0]
    hidden = hidden_by(softmax.window or CAUSAL, probs)
    return _Attention(heads, count, probs, hidden, (query, key, softmax))


def _of_layer(item: _Attention, formats: Sequence[str], side: int) -> dict[str, Any]:
    """Return the maps of one layer's heads, and their changes in each format."""
    probs = item.probs.double().numpy()
    visible = probs > 0
    if item.hidden is not None:  # a probability may underflow to zero
        visible = np.broadcast_to(~item.hidden.numpy(), probs.shape)
    uniform = visible.sum(-1, keepdims=True)
    entry: dict[str, Any] = {
        "heads": item.heads,
        "all_heads": item.all_heads,
        "mask_known": item.hidden is not None,
        "entropy": [short(entropy(head)) for head in item.probs],
        "side": min(side, probs.shape[-1]),
        "maps": _packed(_logarithmic(pooled(probs * uniform, visible, side))),
        "formats": {},
    }
    for name in formats:
        change = item.in_format(name).double().numpy() - probs
        pixels = pooled(change * uniform, visible, side)
        finite = np.abs(pixels[np.isfinite(pixels)])
        most = float(finite.max()) if finite.size else 0.0
        share = np.nan_to_num(pixels / (most or 1.0))  # the root makes small changes visible
        codes = np.rint(np.sign(share) * np.sqrt(np.abs(share)) * 127) + 128
        entry["formats"][name] = {
            "moved": [short(value) for value in moved(change)],
            "sum_change": [short(value) for value in sum_change(change)],
            "most": short(most),
            "maps": _packed(np.where(np.isnan(pixels), MASKED, codes)),
        }
    return entry


def moved(change: Values) -> Values:
    """Return the sum of all increases in a query's probabilities, averaged over queries.

    Half of the sum of all absolute changes would equal this sum only if the probabilities of a
    query still added up to 1. Quantized probabilities do not; see `sum_change`.

    Args:
        change: changes of the probabilities, of shape [heads, queries, keys].
    """
    shares: Values = np.maximum(change, 0).sum(-1).mean(-1)
    return shares


def sum_change(change: Values) -> Values:
    """Return by how much the sum of a query's probabilities changes, averaged over queries.

    The attention that keys lose is `moved` minus this number.

    Args:
        change: changes of the probabilities, of shape [heads, queries, keys].
    """
    changes: Values = change.sum(-1).mean(-1)
    return changes


def pooled(values: Values, visible: NDArray[np.bool_], side: int) -> Values:
    """Return the mean of all visible values in each pixel; NaN for a pixel that has none.

    Args:
        values: values of shape [heads, queries, keys], with as many queries as keys.
        visible: whether a value is visible, of the same shape.
        side: maximum width and height of the result.
    """
    tokens = values.shape[-1]
    side = min(side, tokens)
    starts = np.arange(side) * tokens // side
    sums = np.add.reduceat(np.where(visible, values, 0.0), starts, axis=-1)
    counts = np.add.reduceat(visible.astype(np.int64), starts, axis=-1)
    sums, counts = (np.add.reduceat(part, starts, axis=-2) for part in (sums, counts))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _logarithmic(pixels: Values) -> Values:
    """Return one code per pixel: 1 to 255 on a log scale from 1 / EXTREME to EXTREME; 0 for NaN."""
    reach = math.log2(EXTREME)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.clip(np.log2(pixels), -reach, reach)
    codes = np.rint((exponents + reach) / (2 * reach) * 254) + 1
    return np.where(np.isnan(pixels), MASKED, codes)


def _packed(codes: Values) -> str:
    return base64.b64encode(codes.astype(np.uint8).tobytes()).decode()


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
