"""Track the largest attention logit of an iteration, for `--log-max-attention-logit`.

A logit is an element of the scaled product QK^T whose key is not masked. Each attention module
keeps the maximum per head in `current_max_attn_logits`, as Transformer Engine's attention does.
"""

import math

import torch
import torch.distributed as dist

from megatron.core.fusions.fused_softmax import (
    FusedScaleMaskSoftmax,
    get_default_causal_mask,
    get_sliding_window_causal_mask,
)
from megatron.core.transformer.enums import AttnMaskType

NAME = "current_max_attn_logits"


def visible_mask(softmax: FusedScaleMaskSoftmax, scores, attention_mask):
    """Return the softmax's mask for scores [b, np, sq, sk], or None if all keys are visible."""
    queries, keys = scores.shape[-2:]
    if softmax.window_size is not None:
        return get_sliding_window_causal_mask(queries, keys, softmax.window_size)
    if softmax.attn_mask_type == AttnMaskType.causal and attention_mask is None:
        return get_default_causal_mask(queries)
    return attention_mask


def watch_logits(attention: torch.nn.Module) -> None:
    """Track the maximum input to the softmax of an attention module during training.

    A recomputed forward pass has the same maximum and so changes nothing.
    """
    setattr(attention, NAME, None)
    attention.scale_mask_softmax.register_forward_pre_hook(
        lambda softmax, inputs: _note(attention, softmax, *inputs[:2])
    )


@torch.no_grad()
def note_largest(attention: torch.nn.Module, heads: int, largest_BM1: torch.Tensor) -> None:
    """Track the largest logit of attention in tiles, given each query's maximum [b * np, sq, 1]."""
    if attention.training:
        _keep(attention, largest_BM1.view(-1, heads, largest_BM1.shape[1]).amax(dim=(0, 2)))


def _keep(attention: torch.nn.Module, largest: torch.Tensor) -> None:
    before = getattr(attention, NAME)
    setattr(attention, NAME, largest if before is None else torch.maximum(before, largest))


@torch.no_grad()
def _note(attention, softmax, scores, attention_mask) -> None:
    if not attention.training:
        return
    mask = visible_mask(softmax, scores, attention_mask)
    visible = scores if mask is None else scores.masked_fill(mask, -math.inf)
    # The maximum may be taken before scaling, because the scale is positive.
    largest = visible.amax(dim=(0, 2, 3)).float()
    if softmax.scale is not None:
        largest = largest * softmax.scale
    _keep(attention, largest)


@torch.no_grad()
def take_max_attention_logit(model: list[torch.nn.Module]) -> float:
    """Return the largest attention logit, over all layers, heads and ranks, since the last call.

    The result is NaN if any logit was NaN, and minus infinity if there was no logit. Must be called
    on all ranks.
    """
    largest = torch.full((2,), -math.inf, dtype=torch.float32, device=torch.cuda.current_device())
    for module in (module for chunk in model for module in chunk.modules()):
        per_head = getattr(module, NAME, None)
        if per_head is not None:
            setattr(module, NAME, None)
            largest[0] = torch.maximum(
                largest[0], per_head.float().nan_to_num(-math.inf, math.inf, -math.inf).max()
            )
            largest[1] = torch.maximum(largest[1], per_head.isnan().any().float())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    value, has_nan = largest.tolist()
    return math.nan if has_nan > 0 else value
