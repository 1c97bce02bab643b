"""Fake-quantize and collect the two matmuls of attention, QK^T and PV, forward and backward.

The file is overlaid because `DotProductAttention.forward` has no seam between its matmuls. The seam
is `forward`. Without a format, the wheel's own `forward` runs, even when tensors are collected.
With a format, our code runs. A test checks that without formats its results are bit-identical to
the wheel's. Our code also runs under context parallelism, which the wheel's attention refuses; see
`context_parallel`.

The collected tensors are the inputs and the output of the whole operation. Keys and values are
collected before they are repeated for grouped-query attention and before they are gathered over
context-parallel ranks. Their gradients are collected after the sum over the query group and the
ranks. On request, two more tensors are collected: the scores, scaled but not yet masked, and the
probabilities after dropout, which multiply V. For these, our `forward` runs even without a format.

Shape suffixes: B batch times heads, M queries, N keys, D head dimension. Letters of the recorded
dims: s sequence, k keys, b batch, a attention heads, g query groups, d head dimension, h all heads'
features.
"""

from functools import partial

import torch

from megatron.core import tensor_parallel, tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.low_precision.quantized_module import Quantized, operand_names
from megatron.core.transformer import attention_tiles
from megatron.core.transformer.attention_logits import note_largest, visible_mask, watch_logits
from megatron.core.transformer.context_parallel import ContextParallelism, as_one_rank
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.tiles.attention import tiled_attention
from megatron.fake_quant.tiles.forward import TiledAttention
from megatron.fake_quant.tiles.matmul import TiledMatmul
from megatron.tensor_record import PAIRWISE

_upstream = shadowed(__name__)

#: Dimension letters and sharding of the matrices A, B and C of both matmuls. Keys and values are
#: gathered over context-parallel ranks and repeated for the heads that share them.
DIMS = {
    "qk": ("b a[tp] s d", "b a[tp] k d", "b a[tp] s k"),
    "pv": ("b a[tp] s k", "b a[tp] d k", "b a[tp] s d"),
}


class DotProductAttention(Quantized, _upstream.DotProductAttention):
    """The `DotProductAttention` of megatron-core; its matmuls can be quantized and collected."""

    operations = ("qk", "pv")
    layer_type = "attention"
    group_copies = 1  #: number of consecutive tensor-parallel ranks that share a query group

    def __init__(self, config, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(as_one_rank(config), *args, **kwargs)
        self.config = config
        self.context = ContextParallelism.of(self, kwargs.get("cp_comm_type"))
        if self.context is not None:  # `self.context` builds the masks instead
            self.scale_mask_softmax.window_size = None
        if v_channels is not None:  # megatron-core's `forward` reshapes its output to this size
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if config.log_max_attention_logit:
            watch_logits(self)

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        """Map query [sq, b, np, hn], key and value [sk, b, ng, hn] to context [sq, b, np * hn]."""
        # `megatron.fake_quant.policy` resolves the formats from flags, recipe and environment.
        formats = (self.formats_of("qk"), self.formats_of("pv"))
        capture = tensor_saver.capture(self.identity, self.layer_type, training=self.training)
        if capture is not None:
            capture.note_accumulators(qk=formats[0], pv=formats[1])
            query, key, value = self._watch_operands(capture, query, key, value, *formats)
        pairwise = capture is not None and capture.wants(*PAIRWISE)
        if formats == (None, None) and self.context is None and not pairwise:
            context = super().forward(query, key, value, attention_mask, *args, **kwargs)
        else:
            context = self._quantized_forward(
                query,
                key,
                value,
                attention_mask,
                *args,
                formats=formats,
                capture=capture,
                **kwargs,
            )
        if capture is not None:
            capture.save("output", context, dims="s b h[tp]", phase="post")
            format_names = operand_names(formats[1], "dgrad_c", "wgrad_c")
            capture.watch_result(context, "grad_output", dims="s b h[tp]", format=format_names)
        return context

    def _watch_operands(self, capture, query, key, value, qk, pv):
        watched = []
        for name, tensor, heads, format_names in (
            ("query", query, "a", operand_names(qk, "fprop_a", "wgrad_a")),
            ("key", key, "g", operand_names(qk, "fprop_b", "dgrad_b")),
            ("value", value, "g", operand_names(pv, "fprop_b", "dgrad_b")),
        ):
            dims = of_grad = f"s b {heads}[tp] d"
            if heads == "g" and self.group_copies > 1:
                dims = f"s b g[tp:{self.group_copies}] d"
                of_grad = f"{dims} | partial[tp:{self.group_copies}]"
            capture.save(name, tensor, dims=dims, format=format_names)
            watched.append(
                capture.watch_operand(tensor, f"grad_{name}", dims=of_grad, phase="post")
            )
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
        *,
        formats,
        capture=None,
    ):
        """Compute attention; quantize the operands of each matmul that has a format."""
        self._check_plain(attention_bias, packed_seq_params)
        mask = None
        if self.context is not None:
            key, value, mask = self.context.whole(query, key, value, attention_mask)
        qk, pv = formats
        batch, heads = query.shape[1], query.shape[2]
        query_BMD, key_BND, value_BND = (self._by_head(x, heads) for x in (query, key, value))
        matmuls = {"qk": qk, "pv": pv}
        tiling = attention_tiles.tiling_of(self, matmuls, query.shape[0], key.shape[0])
        if tiling is not None:
            if mask is None:
                mask = attention_tiles.key_mask(self, query, key, attention_mask)
            operands = (query_BMD, key_BND, value_BND)
            context_BMD = self._in_tiles(operands, matmuls, tiling, mask=mask, capture=capture)
            context = context_BMD.view(batch, heads, *context_BMD.shape[1:])
            return context.permute(2, 0, 1, 3).reshape(query.shape[0], batch, -1)
        if mask is not None:
            attention_mask = mask.hidden(slice(0, key.shape[0]))
        scores_BMN = self._matmul(query_BMD, key_BND, "qk", qk, capture, alpha=self.softmax_scale)
        scores = scores_BMN.view(batch, heads, *scores_BMN.shape[1:])
        if capture is not None:  # save the scores before the mask changes them in place
            capture.save("attention_scores", scores, dims=DIMS["qk"][2], phase="post")
        probs_BMN = self._softmax(scores, attention_mask).view(scores_BMN.shape)
        if capture is not None:
            names = operand_names(pv, "fprop_a", "wgrad_a")
            probs = probs_BMN.view(scores.shape)
            capture.save("attention_probs", probs, dims=DIMS["pv"][0], format=names)
        whole = None
        if pv is not None and pv.unnormalized:
            whole = self._unnormalized(scores, attention_mask)
        value_BDN = value_BND.transpose(1, 2)
        context_BMD = self._matmul(probs_BMN, value_BDN, "pv", pv, capture, unnormalized=whole)
        context = context_BMD.view(batch, heads, *context_BMD.shape[1:])
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], batch, -1)

    def _in_tiles(self, operands, matmuls, tiling, *, mask, capture):
        """Return the output [b * np, sq, hn] of attention in tiles.

        Args:
            operands: Q, K and V, [b * np, s, hn].
            matmuls: formats of "qk" and "pv"; None for high precision.
            tiling: the tiles.
            mask: keys that are hidden from queries.
            capture: recorder of this pass's tensors, or None.
        """
        matmuls = {name: GemmFormats() if x is None else x for name, x in matmuls.items()}
        if capture is not None:
            attention_tiles.check_codes(capture, matmuls)
        parts = {}
        for operation, formats in matmuls.items():
            observe = None if capture is None else capture.observer(operation)
            alpha = self.softmax_scale if operation == "qk" else 1.0
            seed = self.rounding_seed(formats, operation)
            parts[operation] = TiledMatmul(formats, alpha, seed, observe)
        heads, watch = self.num_attention_heads_per_partition, None
        if self.config.log_max_attention_logit:
            watch = partial(note_largest, self, heads)
        attention = TiledAttention(
            **parts,
            tiling=tiling,
            mask=mask,
            heads=heads,
            coefficient=self.scale_mask_softmax.scale,
            watch=watch,
        )
        if capture is not None and capture.wants(*PAIRWISE):
            matrices = attention.pairwise(*operands[:2])
            scores, probs = (x.view(-1, heads, *x.shape[1:]) for x in matrices)
            capture.save("attention_scores", scores, dims=DIMS["qk"][2], phase="post")
            names = operand_names(matmuls["pv"], "fprop_a", "wgrad_a")
            capture.save("attention_probs", probs, dims=DIMS["pv"][0], format=names)
        return tiled_attention(*operands, attention=attention)

    def _check_plain(self, attention_bias, packed_seq_params):
        if attention_bias is None and packed_seq_params is None:
            return
        if self.context is not None:
            raise ValueError(
                "context-parallel attention of the local layers takes neither an attention bias "
                "nor packed sequences; leave them out, or give --context-parallel-size 1"
            )
        raise ValueError(
            "quantized attention takes neither an attention bias nor packed sequences; "
            "leave them out, or quantize the linear layers only (linear_<format>)"
        )

    @staticmethod
    def _by_head(x, heads):
        """Reshape [s, b, groups, d] to [b * heads, s, d], and repeat each group for its heads."""
        if x.shape[2] != heads:
            x = x.repeat_interleave(heads // x.shape[2], dim=2)
        return x.reshape(x.shape[0], -1, x.shape[3]).transpose(0, 1)

    def _matmul(self, a_BMK, b_BNK, operation, formats, capture, alpha=1.0, unnormalized=None):
        """Return `alpha * A @ B^T`; quantize the operands to `formats` unless `formats` is None."""
        if formats is not None:
            return quantized_matmul(
                a_BMK,
                b_BNK,
                formats,
                alpha=alpha,
                seed=self.rounding_seed(formats, operation),
                unnormalized=unnormalized,
                observe=None if capture is None else capture.observer(operation),
                amax_of=self.amax_of(formats, DIMS[operation], operation),
            )
        bt_BKN = b_BNK.transpose(1, 2)
        if alpha == 1.0:
            return torch.bmm(a_BMK, bt_BKN)
        out = a_BMK.new_empty(*a_BMK.shape[:2], bt_BKN.shape[2])
        return torch.baddbmm(out, a_BMK, bt_BKN, beta=0.0, alpha=alpha)

    @torch.no_grad()
    def _unnormalized(self, scores, attention_mask):
        """Return e = exp(s - rowmax) [b * np, sq, sk] and its row sums in fp32 [b * np, sq, 1].

        A flash-attention kernel multiplies V by e and divides by the sums afterwards.
        """
        softmax = self.scale_mask_softmax
        if self.softmax_offset is not None or (self.training and self.attention_dropout.p > 0):
            raise ValueError(attention_tiles.NORMALIZED_ONLY)
        scaled = scores.float() if softmax.scale is None else scores.float() * softmax.scale
        attention_mask = visible_mask(softmax, scores, attention_mask)
        if attention_mask is not None:
            scaled = softmax.mask_func(scaled, attention_mask)
        e = (scaled - scaled.amax(-1, keepdim=True)).exp_().flatten(0, 1)
        return e.to(scores.dtype), e.sum(-1, keepdim=True)

    def _softmax(self, scores, attention_mask):
        """Scale and mask scores [b, np, sq, sk], then apply softmax and dropout.

        Dropout uses the same random state as in the wheel.
        """
        if self.scale_mask_softmax.is_kernel_available(attention_mask, *scores.shape):
            raise ValueError(
                "quantized and context-parallel attention cannot run with a fused softmax kernel; "
                "give --no-masked-softmax-fusion"
            )
        probs = self.scale_mask_softmax(scores, attention_mask, self.softmax_offset)
        if self.config.sequence_parallel:
            return self.attention_dropout(probs)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.attention_dropout(probs)
