import torch

from transformer_engine.pytorch import distributed, fp8

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
]


def _rounded(x):
    return x.to(torch.float8_e5m2).to(x.dtype)


class _Product(torch.autograd.Function):
    """A matmul whose operations torch does not see."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _rounded(x) @ _rounded(weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = _rounded(grad.flatten(0, -2))
        return _rounded(grad) @ _rounded(weight), flat.t() @ _rounded(x.flatten(0, -2))


class _Norm(torch.autograd.Function):
    """A norm in one node of the graph, so that it has one gradient to add to others."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            norm = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, ctx.eps)
            return *torch.autograd.grad(norm, (x, weight), grad), None


class FusedAttnFunc(torch.autograd.Function):
    """Attention in one kernel, named like that of Transformer Engine."""

    @staticmethod
    def forward(ctx, *qkv):
        ctx.save_for_backward(*qkv)
        return FusedAttnFunc.compute(*qkv)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(FusedAttnFunc.compute(*qkv), qkv, grad)

    @staticmethod
    def compute(query, key, value):
        repeat = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3)


class TransformerEngineBaseModule(torch.nn.Module):
    def __setattr__(self, name, value):
        """Set most attributes without torch's checks, as Transformer Engine does for speed."""
        if isinstance(value, torch.nn.Parameter | torch.nn.Module):
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value


class _Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        init_method=None,
        bias=True,
        return_bias=False,
        parallel_mode=None,
        params_dtype=torch.float32,
        num_gemms=None,
        **_,
    ):
        super().__init__()
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias, self.num_gemms = bias, return_bias, num_gemms
        suffixes = [""] if num_gemms is None else range(num_gemms)
        for suffix in suffixes:
            weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype)
            (init_method or torch.nn.init.xavier_normal_)(weight)
            self.register_parameter(f"weight{suffix}", torch.nn.Parameter(weight))
            if bias:
                zeros = torch.zeros(self.out_features, dtype=params_dtype)
                self.register_parameter(f"bias{suffix}", torch.nn.Parameter(zeros))

    def _with_bias(self, out):
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class Linear(_Linear):
    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        return self._with_bias(_Product.apply(inp, self.weight))


class LayerNormLinear(_Linear):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        **options,
    ):
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))
        self.eps = eps

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        norm = _Norm.apply(inp, self.layer_norm_weight, self.eps)
        return self._with_bias(_Product.apply(norm, self.weight))


class GroupedLinear(_Linear):
    def __init__(self, num_gemms, in_features, out_features, **options):
        super().__init__(in_features, out_features, num_gemms=num_gemms, **options)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert isinstance(m_splits, list)
        parts = inp.split(m_splits)
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return torch.cat([_Product.apply(x, w) for x, w in zip(parts, weights, strict=True)])


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(self, hidden_size, ffn_hidden_size):
        super().__init__()
        self.fc1_weight = torch.nn.Parameter(torch.randn(ffn_hidden_size, hidden_size))
        self.fc2_weight = torch.nn.Parameter(torch.randn(hidden_size, ffn_hidden_size))

    def forward(self, inp):
        return _Product.apply(_Product.apply(inp, self.fc1_weight), self.fc2_weight)


class FusedAttention(torch.nn.Module):
    def forward(self, query, key, value):
        return FusedAttnFunc.apply(query, key, value)


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        **_,
    ):
        super().__init__()
        self.num_attention_heads, self.qkv_format = num_attention_heads, qkv_format
        self.hidden_size_per_attention_head_k = kv_channels
        self.hidden_size_per_attention_head_v = kv_channels
        self.fused_attention = FusedAttention()

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        attn_mask_type=None,
        **_,
    ):
        qkv = [query_layer, key_layer, value_layer]
        batch_first = (qkv_format or self.qkv_format) == "bshd"
        if batch_first:
            qkv = [x.transpose(0, 1) for x in qkv]
        out = self.fused_attention(*qkv)
        return (out.transpose(0, 1) if batch_first else out).flatten(2)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
