"""Make multi-latent attention work with the local layers, without Transformer Engine.

The file is overlaid for three reasons. First, megatron-core 0.16 assumes that Transformer Engine is
installed if its wrapper for it can be imported, which is always the case. The wheel then checks
whether a layer is a `TELinear`, but without Transformer Engine that name is a mock. The seam is the
name `HAVE_TE`.

Second, under tensor parallelism the wheel's local layers silently compute a wrong gradient. The
positional part of the key has one head, which every rank repeats for its own heads, so its gradient
is a sum over the heads of all ranks. In its backward pass, the wheel's gather only cuts the
gradient, so each rank's columns learn from the rank's own heads alone. (Transformer Engine's layer
is not sharded, and for it the wheel computes the sum.) The seam is the output of
`linear_kv_down_proj`; in `FusedMLASelfAttention`, which is sharded since megatron-core 0.19, it is
the result of `_qkv_down_projection`. We gather it before the wheel would, with the sum in the
backward pass. Without tensor parallelism nothing changes.

Third, megatron-core 0.19 builds latent attention with a norm of the keys and without compressed
queries, as in DeepSeek-V2-Lite, only with Transformer Engine. The seam is
`_resolve_qk_norm_config`. For the local layers it takes the layers of the specification, as earlier
releases do.
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
#: names of the layers whose classes `_resolve_qk_norm_config` returns
_RESOLVED = (
    *("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"),
    *("q_layernorm", "kv_layernorm"),
)


class MLASelfAttention(_upstream.MLASelfAttention):
    """The `MLASelfAttention` of megatron-core, with correct gradients under tensor parallelism."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layer = self.linear_kv_down_proj
        if isinstance(layer, ColumnParallelLinear) and self.tp_group.size() > 1:
            layer.register_forward_hook(self._gathered)

    def _resolve_qk_norm_config(self, submodules):
        """Return the classes of the query, key-value and norm layers, by attribute name."""
        local = submodules.linear_q_proj is ColumnParallelLinear
        if local and self.config.qk_layernorm and self.config.q_lora_rank is None:
            return {name: getattr(submodules, name) for name in _RESOLVED}
        return super()._resolve_qk_norm_config(submodules)

    def _gathered(self, layer, inputs, output):
        combined, bias = output
        return gathered_latent(self, combined), bias


def gathered_latent(attention, combined):
    """Gather the columns of `[s, b, latent + RoPE part]` from all tensor-parallel ranks.

    With sequence parallelism, return this rank's slice of s.
    """
    config, group = attention.config, attention.tp_group
    combined = gather_from_tensor_model_parallel_region(combined, group=group)
    if config.sequence_parallel:
        # After this, megatron-core gathers the positional (RoPE) part of the keys along s. The
        # backward pass of that gather sums the gradient over the ranks.
        return scatter_to_sequence_parallel_region(combined, group=group)
    latent, position = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    position = copy_to_tensor_model_parallel_region(position, group=group)
    return torch.cat([latent, position], dim=-1)


if hasattr(_upstream, "FusedMLASelfAttention"):

    class FusedMLASelfAttention(_upstream.FusedMLASelfAttention):
        """The `FusedMLASelfAttention` of megatron-core, with correct tensor-parallel gradients."""

        def _qkv_down_projection(self, hidden_states):
            query, combined = super()._qkv_down_projection(hidden_states)
            layer = self.linear_qkv_down_proj
            if isinstance(layer, ColumnParallelLinear) and self.tp_group.size() > 1:
                combined = gathered_latent(self, combined)
            return query, combined
