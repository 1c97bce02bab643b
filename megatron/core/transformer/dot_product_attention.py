"""Attention whose two matmuls, QK^T and PV, can be fake-quantized, forward and backward, and
collected.

Overlaid because `DotProductAttention.forward` has no seam between its matmuls. Without a format the
wheel's own `forward` runs, also when tensors are collected; with one, ours, which a test holds to
the wheel's bit for bit when the formats are taken out.

Collected are the tensors that enter and leave the whole operation: keys and values before they are
repeated for grouped-query attention, and their gradients after these were summed over the group.

Shape suffixes: B batch times heads, M queries, N keys, D head dimension. Letters of the recorded
dims: s sequence, b batch, a attention heads, g query groups, d head dimension, h all heads'
features.
"""

import torch

from megatron.core import tensor_parallel, tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.module_identity import Identified
from megatron.fake_quant import policy
from megatron.fake_quant.gemm import GemmFormats, quantized_matmul

_upstream = shadowed(__name__)


class DotProductAttention(Identified, _upstream.DotProductAttention):
    """See `megatron.core.transformer.dot_product_attention` in the wheel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        custom_quant_type = policy.current()
        self.qk_format = custom_quant_type.qk.format
        self.pv_format = custom_quant_type.pv.format

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        """Query [sq, b, np, hn], key and value [sk, b, ng, hn] to context [sq, b, np * hn]."""
        capture = tensor_saver.capture(self.identity, "attention")
        if capture is not None:
            query, key, value = self._watch_operands(capture, query, key, value)
        if self.qk_format is None and self.pv_format is None:
            context = super().forward(query, key, value, attention_mask, *args, **kwargs)
        else:
            context = self._quantized_forward(query, key, value, attention_mask, *args, **kwargs)
        if capture is not None:
            capture.save("output", context, dims="s b h[tp]", phase="post")
            capture.watch_result(context, "grad_output", dims="s b h[tp]", format=self.pv_format)
        return context

    def _watch_operands(self, capture, query, key, value):
        watched = []
        for name, tensor, heads, format in (
            ("query", query, "a", self.qk_format),
            ("key", key, "g", self.qk_format),
            ("value", value, "g", self.pv_format),
        ):
            dims = f"s b {heads}[tp] d"
            capture.save(name, tensor, dims=dims, format=format)
            watched.append(capture.watch_operand(tensor, f"grad_{name}", dims=dims, phase="post"))
        return watched

    def _quantized_forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError(
                "quantized attention takes neither an attention bias nor packed sequences; "
                "leave them out, or quantize the linear layers only (linear_<format>)"
            )
        batch, heads = query.shape[1], query.shape[2]
        query_BMD, key_BND, value_BND = (self._by_head(x, heads) for x in (query, key, value))
        scores_BMN = self._matmul(query_BMD, key_BND, self.qk_format, alpha=self.softmax_scale)
        probs = self._softmax(scores_BMN.view(batch, heads, *scores_BMN.shape[1:]), attention_mask)
        probs_BMN = probs.view(scores_BMN.shape)
        context_BMD = self._matmul(probs_BMN, value_BND.transpose(1, 2), self.pv_format)
        context = context_BMD.view(batch, heads, *context_BMD.shape[1:])
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], batch, -1)

    @staticmethod
    def _by_head(x, heads):
        """[s, b, groups, d] -> [b * heads, s, d], a group repeated for the heads that share it."""
        if x.shape[2] != heads:
            x = x.repeat_interleave(heads // x.shape[2], dim=2)
        return x.reshape(x.shape[0], -1, x.shape[3]).transpose(0, 1)

    @staticmethod
    def _matmul(a_BMK, b_BNK, format, alpha=1.0):
        """A B^T in `format`, or as the wheel does it."""
        if format is not None:
            return quantized_matmul(a_BMK, b_BNK, GemmFormats.uniform(format), alpha=alpha)
        bt_BKN = b_BNK.transpose(1, 2)
        if alpha == 1.0:
            return torch.bmm(a_BMK, bt_BKN)
        out = a_BMK.new_empty(*a_BMK.shape[:2], bt_BKN.shape[2])
        return torch.baddbmm(out, a_BMK, bt_BKN, beta=0.0, alpha=alpha)

    def _softmax(self, scores, attention_mask):
        """Scale, mask, softmax and dropout, [b, np, sq, sk]; with the wheel's choice of random
        state.
        """
        probs = self.scale_mask_softmax(scores, attention_mask, self.softmax_offset)
        if self.config.sequence_parallel:
            return self.attention_dropout(probs)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.attention_dropout(probs)
