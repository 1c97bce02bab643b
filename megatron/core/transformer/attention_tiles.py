"""Decide whether an attention layer runs in tiles, and describe its mask for the tiles.

`megatron.fake_quant.tiles.attention` defines the computation. A recipe requests tiles by a key such
as `pv: {tile: 128}`. Without a request, long sequences run in tiles if a matmul has a format, since
whole matrices of scores would not fit in memory. The log and the format audit show this. Attention
without any format is megatron-core's own and forms whole matrices.
"""

import functools
import logging
from collections.abc import Mapping

import torch

from megatron.core.transformer.enums import AttnMaskType
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.tiles.attention import default_tiling
from megatron.fake_quant.tiles.tiling import KeyMask, Tiling
from megatron.tensor_record import CODES

logger = logging.getLogger(__name__)

#: Slots of P and of the gradient of the scores, by operation. With tiles, these operands never
#: exist as whole matrices.
_IN_TILES = {"qk": ("dgrad_c", "wgrad_c"), "pv": ("fprop_a", "wgrad_a")}


#: Reason why attention with a softmax offset or dropout cannot have unnormalized probabilities.
NORMALIZED_ONLY = (
    "unnormalized probabilities are for attention without a softmax offset and without "
    "dropout; give --attention-dropout 0, or leave out probabilities: unnormalized"
)


def refusal(attention: torch.nn.Module) -> str | None:
    """Return why an attention layer cannot run in tiles; None if it can."""
    if attention.config.softmax_type != "vanilla":
        return (
            f"the softmax {attention.config.softmax_type} adds a term to the row sums; "
            "give --softmax-type vanilla"
        )
    if attention.attention_dropout.p > 0:
        return (
            "dropout draws random bits for whole matrices of probabilities; give "
            "--attention-dropout 0"
        )
    return None


def default(
    attention: torch.nn.Module, matmuls: Mapping[str, GemmFormats | None], queries: int, keys: int
) -> tuple[Tiling | None, str]:
    """Return the tiles in which a layer runs if its recipe sets none, and the reason.

    See `default_tiling`.
    """
    tiling, why = default_tiling(matmuls, queries, keys)
    reason = refusal(attention)
    if tiling is not None and reason is not None:
        return None, f"{why}, but {reason}"
    return tiling, why


def tiling_of(
    attention: torch.nn.Module, matmuls: Mapping[str, GemmFormats | None], queries: int, keys: int
) -> Tiling | None:
    """Return the tiles in which a layer runs; None for whole matrices.

    Args:
        attention: a `DotProductAttention`.
        matmuls: formats of "qk" and "pv"; None for high precision.
        queries: number of queries on this rank.
        keys: number of keys of all ranks.

    Raises:
        ValueError: if the formats request tiles and the layer cannot run in tiles.
    """
    pv = matmuls["pv"]
    if pv is None or pv.tiling is None:
        tiling, why = default(attention, matmuls, queries, keys)
        if why:
            _log(f"attention in {'whole matrices' if tiling is None else tiling}: {why}")
        return tiling
    reason = refusal(attention)
    if reason:
        raise ValueError(f"attention in {pv.tiling}: {reason}, or remove the tiles from the recipe")
    return pv.tiling


@functools.cache
def _log(message: str) -> None:
    """Log a message once per process."""
    logger.warning(message)


def key_mask(attention: torch.nn.Module, query, key, attention_mask) -> KeyMask:
    """Return a mask that hides the same keys from the queries as megatron-core's softmax.

    `query` and `key` have the shape [s, b, heads, d]. Context parallelism has a mask of its own.

    Raises:
        ValueError: if a causal mask is needed for different numbers of queries and keys.
    """
    softmax, queries, keys = attention.scale_mask_softmax, query.shape[0], key.shape[0]
    if softmax.window_size is not None:
        window = tuple(softmax.window_size)
        return KeyMask.consecutive(queries, query.device, first=keys - queries, window=window)
    if softmax.attn_mask_type == AttnMaskType.causal and attention_mask is None and queries > 1:
        if queries != keys:
            raise ValueError(
                f"causal attention has {queries} queries for {keys} keys; give an attention mask"
            )
        return KeyMask.consecutive(queries, query.device)
    return KeyMask(given=attention_mask)


def check_codes(capture, matmuls: Mapping[str, GemmFormats]) -> None:
    """Raise ValueError if codes are requested for operands that exist only tile by tile.

    Args:
        capture: recorder of this pass's tensors.
        matmuls: formats of "qk" and "pv".
    """
    lost = [
        name
        for operation, formats in matmuls.items()
        for slot, name in zip(SLOTS, CODES[operation], strict=True)
        if slot in _IN_TILES[operation]
        and getattr(formats, slot).format is not None
        and capture.wants(name)
    ]
    if lost:
        raise ValueError(
            f"--collect-tensors {' '.join(lost)}: attention in tiles quantizes P and the gradient "
            "of the scores tile by tile, so there are no codes of a whole matrix; select other "
            "tensors, collect attention_scores and attention_probs, or remove the tiles"
        )
