"""Translate the two forms of rotary embedding settings in a config.json to flags.

rope_theta, rope_scaling {"type" or "rope_type": ...}     before transformers 5, and as published
rope_parameters {"rope_theta", "rope_type", ...}          since transformers 5
"""

from typing import Any

#: Parameters of Llama 3's RoPE scaling; megatron-core's rotary embedding hard-codes these values.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Unsupported(ValueError):
    """Error raised for a config.json that requires a feature this program lacks."""


def parameters(config: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """Return the RoPE scaling type ("default" if unscaled), the base and the other parameters."""
    numbers = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = numbers.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kinds = [numbers.pop(name, None) for name in ("rope_type", "type")]
    return kinds[0] or kinds[1] or "default", float(base), numbers


def llama3_flags(config: dict[str, Any]) -> dict[str, Any]:
    """Return the flags for the rotary embedding of a Llama model.

    Raises:
        Unsupported: if the scaling is not Llama 3's, or its parameters differ from `LLAMA3`.
    """
    kind, base, numbers = parameters(config)
    flags: dict[str, Any] = {"rotary_base": base, "use_rope_scaling": kind == "llama3"}
    if kind == "llama3":
        for name, value in LLAMA3.items():
            if numbers.get(name) != value:
                raise Unsupported(
                    f"rope scaling with {name} {numbers.get(name)}; megatron-core computes {value}"
                )
        flags["rope_scaling_factor"] = float(numbers["factor"])
    elif kind != "default":
        raise Unsupported(f"rope scaling {kind!r}; Llama's can be 'llama3' or none")
    return flags


def yarn_flags(config: dict[str, Any]) -> dict[str, Any]:
    """Return the flags for the rotary embedding of multi-latent attention.

    Raises:
        Unsupported: if the scaling is not YaRN, or is a variant that megatron-core does not have.
    """
    kind, base, numbers = parameters(config)
    if kind == "default":
        return {"rotary_base": base, "rope_type": "rope", "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise Unsupported(f"rope scaling {kind!r}; DeepSeek-V2's can be 'yarn' or none")
    for name, value in (("attention_factor", None), ("truncate", True)):
        if numbers.get(name, value) != value:
            raise Unsupported(
                f"YaRN with {name} {numbers[name]}; megatron-core supports only {value}"
            )
    mscale, all_dim = numbers.get("mscale") or 0.0, numbers.get("mscale_all_dim") or 0.0
    if all_dim and not mscale:
        raise Unsupported(f"YaRN with mscale_all_dim {all_dim} and no mscale")
    length = numbers.get("original_max_position_embeddings")
    if length is None or numbers.get("factor") is None:
        raise Unsupported("YaRN without a factor or original_max_position_embeddings")
    return {
        "rotary_base": base,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(numbers["factor"]),
        "original_max_position_embeddings": int(length),
        "beta_fast": float(numbers.get("beta_fast") or 32),
        "beta_slow": float(numbers.get("beta_slow") or 1),
        # transformers uses mscale only together with mscale_all_dim. megatron-core always uses it;
        # a value of 1 has the same effect as no mscale.
        "mscale": float(mscale) if all_dim else 1.0,
        "mscale_all_dim": float(all_dim),
    }
