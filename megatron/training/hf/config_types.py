"""Check the types and ranges of the values of a config.json before any of them is used."""

import math
from typing import Any

from megatron.bounded_files import printable

_WIDEST = 1 << 31  #: maximum size of a dimension; a tensor with a larger one could not be indexed
_MOST_LAYERS = 10_000
_MOST_PARTS = 1 << 16  #: maximum number of heads or experts, and maximum head dimension
_COUNTS = {
    "vocab_size": _WIDEST,
    "hidden_size": _WIDEST,
    "intermediate_size": _WIDEST,
    "moe_intermediate_size": _WIDEST,
    "max_position_embeddings": _WIDEST,
    "head_dim": _MOST_PARTS,
    "qk_rope_head_dim": _MOST_PARTS,
    "v_head_dim": _MOST_PARTS,
    "kv_lora_rank": _WIDEST,
    "q_lora_rank": _WIDEST,
    "num_hidden_layers": _MOST_LAYERS,
    "num_attention_heads": _MOST_PARTS,
    "num_key_value_heads": _MOST_PARTS,
}  #: upper bound of each value in a config.json that must be at least 1
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_SIZES = {
    "qk_nope_head_dim": _MOST_PARTS,
    "first_k_dense_replace": _MOST_LAYERS,
    "n_routed_experts": _MOST_PARTS,
    "n_shared_experts": _MOST_PARTS,
    "num_experts_per_tok": _MOST_PARTS,
}  #: upper bound of each value in a config.json that must be at least 0
_NUMBERS = ("rms_norm_eps", "rope_theta", "attention_dropout", "routed_scaling_factor")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob")
_TEXTS = ("hidden_act", "topk_method", "scoring_func")
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_TEXTS = ("rope_type", "type")
_ROPE_FLAGS = ("truncate",)


def check_types(config: dict[str, Any]) -> None:
    """Check that a config.json has the sizes that every model needs, and that its values are valid.

    Other values may be missing or null. Values that this program does not use are not checked.

    Raises:
        ValueError: if a value is wrong or missing; the message reads `NAME VALUE, which is ...` or
            `no NAME`.
    """
    for name in _REQUIRED:
        if config.get(name) is None:
            raise ValueError(f"no {name}")
    for name, value in config.items():
        if value is None:
            continue
        if name in _COUNTS:
            _check_count(name, value, (1, _COUNTS[name]))
        elif name in _SIZES:
            _check_count(name, value, (0, _SIZES[name]))
        elif name in _NUMBERS:
            _check_number(name, value)
        elif name in _FLAGS and type(value) is not bool:
            raise ValueError(f"{name} {_shown(value)}, which is neither true nor false")
        elif name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"{name} {_shown(value)}, which is not a string")
        elif name in _ROPE:
            _check_rope(name, value)


def _check_rope(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} {_shown(value)}, which is not an object")
    for key, item in value.items():
        if item is None:
            continue
        if key in _ROPE_TEXTS:
            if not isinstance(item, str):
                raise ValueError(f"{name}.{key} {_shown(item)}, which is not a string")
        elif key not in _ROPE_FLAGS:
            _check_number(f"{name}.{key}", item)


def _check_count(name: str, value: Any, bounds: tuple[int, int]) -> None:
    least, most = bounds
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} {_shown(value)}, which is not an integer from {least} to {most}")


def _check_number(name: str, value: Any) -> None:
    if type(value) is int and abs(value) < _WIDEST * _WIDEST:
        return
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{name} {_shown(value)}, which is not a finite number")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"with {'an object' if isinstance(value, dict) else 'a list'}"
    if type(value) is int and abs(value) >= _WIDEST * _WIDEST:
        return f"with {value.bit_length()} bits"
    return printable(repr(value), limit=40)
