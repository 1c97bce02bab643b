"""Write small checkpoints with random weights, and compute their logits, with transformers.

The weights are larger than usual initial weights, so no softmax is flat, and the norms are not all
ones. A tensor in the wrong place therefore changes the logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

TOKENS = 96  #: length of the sequences whose logits are compared
VOCABULARY = 120

LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
#: Llama 3.2's scaling; with this base, wavelengths lie on each side of both bounds.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 5120,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
}
#: DeepSeek-V2-Lite's scaling with a shorter original length, which affects even short sequences.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}


def write(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of DeepSeek if `changes` has `kv_lora_rank`, otherwise of Llama.

    Skips the test if the installed transformers does not contain DeepSeek.

    Args:
        folder: the folder to write.
        changes: fields of the configuration, `dtype`, and `file_size`: the largest size of a file
            in the notation of save_pretrained.
    """
    import transformers

    file_size = changes.pop("file_size", "100KB")
    dtype = changes.pop("dtype", torch.float32)
    deepseek = "kv_lora_rank" in changes
    torch.manual_seed(sum(map(ord, folder.name)))
    if deepseek:
        configuration = deepseek_configuration(**changes)
        model = transformers.DeepseekV2ForCausalLM(configuration)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=file_size)
    return folder


def deepseek_configuration(**fields: Any) -> Any:
    """Return a configuration of DeepSeek-V2, or skip the test if transformers is too old for it."""
    return pytest.importorskip("transformers", minversion="4.54").DeepseekV2Config(**fields)


def read(folder: Path, **changes: Any) -> torch.nn.Module:
    """Load a checkpoint with transformers in the checkpoint's own dtype."""
    import transformers

    renamed = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
    changes = {"dtype" if renamed else "torch_dtype": "auto"} | changes
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager", **changes
    )
    return model.eval()


def sample() -> torch.Tensor:
    """Return two fixed sequences of tokens."""
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(sample()).logits
