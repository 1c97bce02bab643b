"""Find the attention probabilities of each layer, or recompute them from query and key.

Probabilities are large, so most dumps lack them. They are then recomputed in high precision, as the
layer computes them without quantization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.analysis.figures.figure_data import FigureData, NothingToDrawError
from megatron.analysis.plots.text import brief
from megatron.analysis.verification.recompute_attention import by_head, mask_of, masked_scores
from megatron.analysis.verification.recorded_formats import (
    NotCheckedError,
    Softmax,
    softmax_of_card,
    window_of_card,
)
from megatron.fake_quant.tiles.tiling import CAUSAL

#: Maximum number of recomputed probabilities per layer. If there are more, the last sequences are
#: left out first, and then the last heads.
MOST = 1 << 28
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Columns that are equal for the query and the key of one pass.
_PASS = ("run_id", "iteration", "micro_batch", "data_rank", "module")


@dataclass(frozen=True)
class Layer:
    """The tensors that give the attention probabilities of one layer."""

    row: Any  #: row of `FigureData.tensors` of the saved probabilities or of the query
    key: int | None  #: index of the key; None if the probabilities were saved

    def probabilities(self, data: FigureData) -> Tensor:
        """Return the probabilities of this layer, of shape [batch, heads, queries, keys].

        Raises:
            NothingToDrawError: if the probabilities have no heads or values, or cannot be
                recomputed.
            ValueError: if a shard is missing, or the shards are inconsistent.
        """
        if self.key is None:
            return _with_heads(data.load(self.row.tensor))
        query, key = data.load(self.row.tensor), data.load(self.key)
        return recomputed(query, key, softmax_of(data, self))


def softmax_of(data: FigureData, layer: Layer) -> Softmax:
    """Return the scale and the mask of a layer's softmax, according to the run card.

    Raises:
        NothingToDrawError: if the probabilities cannot be recomputed.
    """
    card = data.store.run_card(str(layer.row.run_id or ""))
    try:
        return softmax_of_card(card, layer.row.module, layer.row.iteration) or Softmax()
    except NotCheckedError as error:
        raise NothingToDrawError(str(error)) from None


def hidden_keys(data: FigureData, layer: Layer, probs: Tensor) -> Tensor | None:
    """Return a mask of the keys that are hidden from each query, of shape [queries, keys].

    The result is None if the mask is unknown. A probability may underflow to zero, so the
    probabilities alone do not determine the mask.

    Args:
        probs: probabilities of the layer, of shape [..., queries, keys].
    """
    if layer.key is not None:
        return hidden_by(softmax_of(data, layer).window or CAUSAL, probs)
    card = data.store.run_card(str(layer.row.run_id or ""))
    return hidden_of_card(card, str(layer.row.module), int(layer.row.iteration), probs)


def hidden_of_card(
    card: Mapping[str, Any], module: str, iteration: int, probs: Tensor
) -> Tensor | None:
    """Return a mask of the keys that are hidden according to the run card; None if unknown.

    If this mask hides a probability above zero, the probabilities were computed with a different
    mask, which is unknown.
    """
    try:
        hidden = hidden_by(window_of_card(card, module, iteration), probs)
    except NotCheckedError:
        return None
    if hidden is None or any(bool((head[hidden] > 0).any()) for head in probs.flatten(0, -3)):
        return None
    return hidden


def hidden_by(window: tuple[int, int], probs: Tensor) -> Tensor | None:
    """Return a mask of the keys that a window hides; None if queries and keys differ in number.

    Args:
        window: numbers of visible keys before and after a query.
        probs: probabilities of shape [..., queries, keys].
    """
    queries, keys = probs.shape[-2:]
    if queries != keys:
        return None
    hidden = mask_of(keys, 0, 1, window).hidden(slice(0, keys))
    return torch.zeros(queries, keys, dtype=torch.bool) if hidden is None else hidden


def layers_of(data: FigureData) -> list[Layer]:
    """Return the layers whose probabilities can be drawn, in the newest run's last iteration.

    Raises:
        NothingToDrawError: if the dump has neither probabilities nor queries and keys.
    """
    table = data.tensors
    saved = table[table["tensor_name"] == "attention_probs"]
    if not saved.empty:
        rows = latest(data, saved).drop_duplicates("layer_idx").sort_values("layer_idx")
        return [Layer(row, None) for row in rows.itertuples()]
    return recomputable(data)


def recomputable(data: FigureData) -> list[Layer]:
    """Return the layers whose query and key were collected, in the newest run's last iteration.

    Raises:
        NothingToDrawError: if there are none.
    """
    table = data.tensors
    queries, keys = (table[table["tensor_name"] == name] for name in ("query", "key"))
    if queries.empty or keys.empty:
        raise NothingToDrawError(
            "neither attention_probs nor query and key were collected; collect with "
            "--collect-tensors all"
        )
    pairs = queries.merge(
        keys[[*_PASS, "tensor"]], on=list(_PASS), suffixes=("", "_of_key"), how="inner"
    )
    if pairs.empty:
        raise NothingToDrawError("no pass has both query and key")
    rows = latest(data, pairs).sort_values(["layer_idx", "micro_batch", "data_rank"])
    rows = rows.drop_duplicates("layer_idx")
    return [Layer(row, int(row.tensor_of_key)) for row in rows.itertuples()]


def latest(data: FigureData, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the newest run's last iteration.

    Args:
        table: rows of `FigureData.tensors`.
    """
    runs = table["run_id"].fillna("")
    newest = [run for run in data.store.runs() if run in set(runs)][-1]
    of_run = table[runs == newest]
    return of_run[of_run["iteration"] == of_run["iteration"].max()]


def source_of(layers: Sequence[Layer]) -> str:
    """Return a phrase with the run, the iteration, and the origin of the probabilities."""
    first = layers[0]
    run = f"{brief(first.row.quant_type)} run {first.row.run_id or '(unknown)'}"
    how = "" if first.key is None else "recomputed from query and key without quantization, "
    return f"{how}{run} (the newest), iteration {first.row.iteration} (its last)"


def recomputed(query: Tensor, key: Tensor, softmax: Softmax) -> Tensor:
    """Compute attention probabilities without quantization, in general at most `MOST` of them.

    At least the first head of the first sequence is computed, whatever its size.

    Args:
        query: queries of shape [s, b, heads, d].
        key: keys of shape [s, b, groups, d].
        softmax: scale and mask of the softmax.

    Returns:
        Probabilities of shape [b, heads, s, s] in the dtype of the queries.

    Raises:
        NothingToDrawError: if the shapes of query and key do not fit together.
    """
    if query.dim() != 4 or key.dim() != 4 or not query.numel():
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise NothingToDrawError(
            f"probabilities cannot be computed from query and key of shapes {shapes}"
        )
    if query.dtype != key.dtype or query.dtype not in _DTYPES:
        dtypes = " and ".join(str(x.dtype).removeprefix("torch.") for x in (query, key))
        raise NothingToDrawError(
            f"probabilities cannot be computed from query and key of dtypes {dtypes}"
        )
    length, batch, heads, dim = query.shape
    if (key.shape[0], key.shape[1], key.shape[3]) != (length, batch, dim) or heads % key.shape[2]:
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise NothingToDrawError(f"query and key of shapes {shapes} do not fit together")
    of_head = length * length
    batch = min(batch, max(1, MOST // (of_head * heads)))
    most_heads = min(heads, max(1, MOST // of_head))
    scale = 1 / math.sqrt(dim) if softmax.scale is None else softmax.scale
    hidden = mask_of(length, 0, 1, softmax.window).hidden(slice(0, length))
    assert hidden is not None
    probs = torch.empty(batch, most_heads, length, length, dtype=query.dtype)
    for sequence in range(batch):
        queries_BMD = by_head(query[:, sequence : sequence + 1], heads)
        keys_BND = by_head(key[:, sequence : sequence + 1], heads)
        for head in range(most_heads):
            scores = cpu_matmul.matmul(queries_BMD[head], keys_BND[head].t()) * scale
            masked = masked_scores(scores, softmax, hidden, in_fp32=softmax.in_fp32)
            probs[sequence, head] = masked.softmax(-1).to(query.dtype)
    return probs


def _with_heads(probs: Tensor) -> Tensor:
    """Reshape saved attention probabilities to [batch, heads, queries, keys]."""
    if probs.dim() < 3:
        raise NothingToDrawError(f"attention_probs of shape {list(probs.shape)} have no heads")
    if not probs.numel():
        raise NothingToDrawError(f"attention_probs of shape {list(probs.shape)} have no values")
    return probs.reshape(-1, *probs.shape[-3:])
