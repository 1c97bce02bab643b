"""Attention in tiles and with whole matrices, and tensors for both."""

import torch

from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.tiles.attention import tiled_attention
from megatron.fake_quant.tiles.forward import TiledAttention
from megatron.fake_quant.tiles.matmul import TiledMatmul
from megatron.fake_quant.tiles.tiling import KeyMask

BATCH, SIZE, VALUE_SIZE, ALPHA = 4, 32, 48, 0.25
#: Names of the output and the gradients, in the order in which `tiled` and `whole` return them.
NAMES = ("output", "grad_query", "grad_key", "grad_value")


def tensors(queries=96, keys=96, dtype=torch.float32):
    """Return query, key and value, which require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, SIZE), (keys, SIZE), (keys, VALUE_SIZE), (queries, VALUE_SIZE))
    *qkv, do = (torch.randn(BATCH, *shape, generator=generator).to(dtype) for shape in shapes)
    return tuple(x.requires_grad_() for x in qkv), do


def causal(queries, keys):
    """Return the mask of the keys behind each query."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def tiled(qkv, do, formats, tiling, mask=None, **settings):
    """Return the output and the gradients of attention in tiles."""
    qk, pv = formats
    if mask is None:
        mask = KeyMask.consecutive(qkv[0].shape[1], qkv[0].device)
    attention = TiledAttention(
        TiledMatmul(qk, ALPHA, seed=5), TiledMatmul(pv, seed=6), tiling, mask, **settings
    )
    output = tiled_attention(*qkv, attention=attention)
    return output.detach(), *torch.autograd.grad(output, qkv, do)


def whole(qkv, do, formats):
    """Return the output and the gradients of causal attention with whole matrices."""
    (query, key, value), (qk, pv) = qkv, formats
    scores = quantized_matmul(query, key, qk, alpha=ALPHA, seed=5)
    scores = scores.masked_fill(causal(query.shape[1], key.shape[1]), -10000.0)
    unnormalized = None
    if pv.unnormalized:
        e = (scores - scores.amax(-1, keepdim=True)).detach().exp()
        unnormalized = (e, e.sum(-1, keepdim=True))
    output = quantized_matmul(scores.softmax(-1), value.mT, pv, seed=6, unnormalized=unnormalized)
    return output.detach(), *torch.autograd.grad(output, qkv, do)
