"""Multi-latent attention from the local layers, without Transformer Engine.

Overlaid for two reasons. The wheel takes Transformer Engine for installed wherever its wrapper of
it can be imported, which is always, and then asks whether a layer is a `TELinear`, which is a mock.
Seam: the name `HAVE_TE`.

And under tensor parallelism the wheel's local layers compute a wrong gradient, without a word. The
positional part of the key has one head, which every rank repeats for its own heads: its gradient is
a sum over all ranks' heads, but what gathered it from the ranks only cuts the gradient again, so
that each rank's columns learn from its own heads alone. (Transformer Engine's layer is not cut over
ranks, and there the wheel sums.) Seam: the output of `linear_kv_down_proj`, which we gather, so
that the wheel does not, with the sum in the backward pass. Without tensor parallelism nothing
changes.
"""

import torch

from megatron.core._overlay import shadowed
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

_upstream = shadowed(__name__)
_upstream.HAVE_TE = HAVE_TE = transformer_engine.HAVE_TE


class MLASelfAttention(_upstream.MLASelfAttention):
    """See `megatron.core.transformer.multi_latent_attention` in the wheel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layer = self.linear_kv_down_proj
        if isinstance(layer, ColumnParallelLinear) and self.tp_group.size() > 1:
            layer.register_forward_hook(self._gathered)

    def _gathered(self, layer, inputs, output):
        """All columns of `[s, b, latent + position]`; its slice of s under sequence parallelism."""
        combined, bias = output
        combined = gather_from_tensor_model_parallel_region(combined, group=self.tp_group)
        if self.config.sequence_parallel:  # the wheel gathers the position, and sums its gradient
            return scatter_to_sequence_parallel_region(combined, group=self.tp_group), bias
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, position = combined.split(sizes, dim=-1)
        position = copy_to_tensor_model_parallel_region(position, group=self.tp_group)
        return torch.cat([latent, position], dim=-1), bias
