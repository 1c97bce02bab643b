"""Define the models: their published sizes, and a small model of each architecture.

The numbers come from the public `config.json` files of Llama-3.1-8B, Llama-3.2-1B and
DeepSeek-V2-Lite. Tests compare them with the copies of these files in tests/data/published_models/.
A `tiny` preset keeps the architecture: normalization, rotary scaling, tied embeddings, latent
attention, a dense first layer, shared experts, the ratio of heads to key-value heads. It changes
only sizes; they are multiples of the largest block size of any format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from configs.architecture import Architecture, Experts, LatentAttention, Llama3Scaling, Yarn
from configs.parallelism import Parallelism

PRESETS = ("full", "tiny")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's architecture and its training defaults, such as the sequence length."""

    architecture: Architecture
    seq_length: int
    micro_batch_size: int
    lr: float  #: maximum learning rate; the minimum is a tenth of it
    #: default number of processes and parallel sizes
    parallelism: Parallelism = field(default_factory=Parallelism)
    recompute: bool = False  #: True if attention scores are recomputed in the backward pass


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Tokenizer with which a model was published."""

    family: str  #: name of the tokenizer's family; all its models use the same token ids
    path: str  #: path relative to the root of the repository


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the experiment matrix."""

    title: str
    tokenizer: Tokenizer
    full: Preset
    tiny: Preset

    def preset(self, name: str) -> Preset:
        return {"full": self.full, "tiny": self.tiny}[name]


def _tiny(published: Architecture, **sizes: object) -> Preset:
    """Return the tiny preset: a small model with the architecture of `published`.

    It has 4 layers with a hidden size of 256. One iteration takes seconds on a CPU.
    """
    small = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
    architecture = replace(
        published, **{**small, "vocab_size": None, "vocab_multiple": 128, **sizes}
    )
    return Preset(architecture=architecture, seq_length=256, micro_batch_size=2, lr=2e-3)


_LLAMA31_8B = Architecture(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    vocab_multiple=32,  # 128256 is a multiple of 32 x 8: no padding up to --tp 8
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000,
    rope_scaling=Llama3Scaling(factor=8),
    tie_word_embeddings=False,
)

_LLAMA32_1B = replace(
    _LLAMA31_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    rope_scaling=Llama3Scaling(factor=32),
    tie_word_embeddings=True,
)

_DEEPSEEK2_LITE = Architecture(
    hidden_size=2048,
    intermediate_size=10944,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=None,
    vocab_size=102400,
    vocab_multiple=3200,  # The roughly 100,000 tokens are padded to 102400.
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    rope_scaling=Yarn(
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    tie_word_embeddings=False,
    latent=LatentAttention(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    experts=Experts(
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        aux_loss_alpha=0.001,
    ),
)

MODELS: Mapping[str, Model] = {
    "llama31-8b": Model(
        title="Llama 3.1 8B",
        tokenizer=Tokenizer(family="llama3", path="model/llama3.1-8b"),
        full=Preset(
            architecture=_LLAMA31_8B,
            seq_length=8192,
            micro_batch_size=1,
            lr=3e-4,
            parallelism=Parallelism(nproc_per_node=8, tp=4),
            recompute=True,
        ),
        tiny=_tiny(_LLAMA31_8B, intermediate_size=896, num_key_value_heads=2, head_dim=32),
    ),
    "llama32-1b": Model(
        title="Llama 3.2 1B",
        tokenizer=Tokenizer(family="llama3", path="model/llama3.2-1b"),
        full=Preset(
            architecture=_LLAMA32_1B,
            seq_length=8192,
            micro_batch_size=1,
            lr=3e-4,
            recompute=True,
        ),
        tiny=_tiny(_LLAMA32_1B, intermediate_size=1024, num_key_value_heads=2, head_dim=32),
    ),
    "deepseek2_lite": Model(
        title="DeepSeek-V2-Lite",
        tokenizer=Tokenizer(family="deepseek2", path="model/deepseek-v2-lite"),
        full=Preset(
            architecture=_DEEPSEEK2_LITE,
            seq_length=4096,
            micro_batch_size=1,
            lr=4.2e-4,
            parallelism=Parallelism(nproc_per_node=8, ep=8),
            recompute=True,
        ),
        tiny=_tiny(
            _DEEPSEEK2_LITE,
            intermediate_size=1344,
            num_key_value_heads=8,
            latent=LatentAttention(
                kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
            ),
            experts=replace(
                _DEEPSEEK2_LITE.experts,
                n_routed_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=192,
            ),
        ),
    ),
}
