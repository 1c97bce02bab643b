"""Describe a model's architecture as data, and translate it to flags of `pretrain_gpt.py`.

A field has the same name and meaning as in the published `config.json`; `flags` translates the
fields to Megatron-LM's flags. Parts that differ between model families (the scaling of rotary
frequencies, latent attention, experts) are separate objects. Latent attention and experts are None
in a model without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.lookup import number


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Scaling of the rotary frequencies in Llama 3.1 and later (`rope_type: llama3`).

    Only the factor is an option of megatron-core. The other three parameters are constants there
    (low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192), with the same
    values as in all published models.
    """

    factor: float

    def flags(self) -> list[str]:
        return ["--use-rope-scaling", "--rope-scaling-factor", number(self.factor)]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN scaling of the rotary frequencies, as in DeepSeek-V2.

    megatron-core supports it only with latent attention.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def flags(self) -> list[str]:
        return [
            *("--rope-type", "yarn", "--rotary-scaling-factor", number(self.factor)),
            "--original-max-position-embeddings",
            str(self.original_max_position_embeddings),
            *("--beta-fast", number(self.beta_fast), "--beta-slow", number(self.beta_slow)),
            *("--mscale", number(self.mscale), "--mscale-all-dim", number(self.mscale_all_dim)),
        ]


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention whose queries are not compressed (`q_lora_rank: null`)."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def flags(self) -> list[str]:
        return [
            *("--multi-latent-attention", "--kv-lora-rank", str(self.kv_lora_rank)),
            "--qk-layernorm",  # norm of the compressed keys and values (`kv_a_layernorm`)
            *("--qk-head-dim", str(self.qk_nope_head_dim)),
            *("--qk-pos-emb-head-dim", str(self.qk_rope_head_dim)),
            *("--v-head-dim", str(self.v_head_dim)),
        ]

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the number of parameters in the attention of one layer."""
        queries = hidden * heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        down = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + down + up + heads * self.v_head_dim * hidden


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts as in DeepSeek-V2: routed and shared experts; the first layers are dense.

    The router applies a softmax over all experts and selects the top k. Their scores are not
    normalized again (`scoring_func: softmax`, `norm_topk_prob: false`). The Lite model does not
    select groups of experts first (`topk_method: greedy`).
    """

    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    aux_loss_alpha: float  #: coefficient of the load-balancing loss per sequence (`seq_aux: true`)

    def flags(self, layers: int) -> list[str]:
        dense = self.first_k_dense_replace
        shared = self.n_shared_experts * self.moe_intermediate_size
        return [
            *("--num-experts", str(self.n_routed_experts)),
            *("--moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}"),
            *("--moe-ffn-hidden-size", str(self.moe_intermediate_size)),
            *("--moe-shared-expert-intermediate-size", str(shared)),
            *("--moe-router-topk", str(self.num_experts_per_tok)),
            *("--moe-router-score-function", "softmax", "--moe-router-pre-softmax"),
            *("--moe-router-topk-scaling-factor", number(self.routed_scaling_factor)),
            *("--moe-router-load-balancing-type", "seq_aux_loss"),
            *("--moe-aux-loss-coeff", number(self.aux_loss_alpha)),
            *("--moe-router-dtype", "fp32"),  # as in the published model
            *("--moe-token-dispatcher-type", "alltoall"),
        ]

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters in the experts and the router of one layer."""
        features = (self.n_routed_experts + self.n_shared_experts) * self.moe_intermediate_size
        return 3 * hidden * features + hidden * self.n_routed_experts


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of a decoder with RMSNorm, SwiGLU, rotary position embeddings and no biases."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None  #: None with latent attention, which has separate head sizes
    vocab_size: int | None  #: published vocabulary size; None if it depends on the tokenizer
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | Yarn
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    latent: LatentAttention | None = None
    experts: Experts | None = None
    vocab_multiple: int = 128  #: number that divides the padded vocabulary size; see `flags`

    def flags(self) -> list[str]:
        """Return the flags of `pretrain_gpt.py` that describe this architecture.

        The model's vocabulary size is the tokenizer's, rounded up to a multiple of `vocab_multiple`
        times the tensor-parallel size. `vocab_multiple` is chosen so that the published tokenizer
        results in the published size.
        """
        words = [
            *("--num-layers", str(self.num_hidden_layers)),
            *("--hidden-size", str(self.hidden_size)),
            *("--ffn-hidden-size", str(self.intermediate_size)),
            *("--num-attention-heads", str(self.num_attention_heads)),
        ]
        if self.latent is None:
            assert self.head_dim is not None
            words += ["--group-query-attention"]
            words += ["--num-query-groups", str(self.num_key_value_heads)]
            words += ["--kv-channels", str(self.head_dim)]
        words += [
            *("--max-position-embeddings", str(self.max_position_embeddings)),
            *("--make-vocab-size-divisible-by", str(self.vocab_multiple)),
            *("--normalization", "RMSNorm", "--norm-epsilon", number(self.rms_norm_eps)),
            *("--swiglu", "--disable-bias-linear", "--attention-dropout", "0"),
            *("--hidden-dropout", "0", "--init-method-std", number(self.initializer_range)),
            *("--position-embedding-type", "rope", "--rotary-base", number(self.rope_theta)),
            *self.rope_scaling.flags(),
        ]
        if not self.tie_word_embeddings:
            words += ["--untie-embeddings-and-output-weights"]
        if self.latent is not None:
            words += self.latent.flags()
        if self.experts is not None:
            words += self.experts.flags(self.num_hidden_layers)
        return words

    def parameters(self) -> int | None:
        """Return the number of parameters of the model, or None if `vocab_size` is None."""
        if self.vocab_size is None:
            return None
        hidden, layers = self.hidden_size, self.num_hidden_layers
        if self.latent is not None:
            attention = self.latent.parameters(hidden, self.num_attention_heads)
        else:
            assert self.head_dim is not None
            heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
            attention = hidden * heads * self.head_dim
        dense = 3 * hidden * self.intermediate_size
        total = layers * (attention + 2 * hidden) + hidden  # two norms per layer and a final norm
        if self.experts is None:
            total += layers * dense
        else:
            first = self.experts.first_k_dense_replace
            total += first * dense + (layers - first) * self.experts.parameters(hidden)
        return total + (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
