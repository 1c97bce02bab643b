"""What the page says of a run, from its card: a file of anyone's, in which nothing is certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a reader wants to know of a run.
FACTS = ("quant_type", "started", "status", "reason", "device", "seed", "iterations", "platform")
GROUPS = ("versions", "topology", "git")
ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


def facts(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values; what is unknown is left out."""
    found = [(name, said(card.get(name))) for name in FACTS]
    for group in GROUPS:
        parts = {name: said(value) for name, value in _mapping(card.get(group)).items()}
        found.append((group, ", ".join(f"{name} {text}" for name, text in parts.items() if text)))
    arguments = _mapping(card.get("arguments"))
    found += [(name, said(arguments.get(name))) for name in ARGUMENTS]
    return [(name, text) for name, text in found if text]


def audit(card: Mapping[str, Any]) -> list[str]:
    """What each matmul goes through, as the run printed it."""
    lines = []
    for part in _list(card.get("quantization")):
        if not isinstance(part, Mapping):
            continue
        share = part.get("share_of_matmul_flops")
        flops = ""
        if isinstance(share, (int, float)) and 0 <= share <= 1:
            flops = f" {100 * share:.1f} % of the FLOPs in low precision"
        lines.append(f"from iteration {said(part.get('iteration')) or '?'}:{flops}")
        lines += [f"  {said(line)}" for line in _list(part.get("matmuls"))]
    return lines


def said(value: object) -> str:
    """A single value in words; of what should be one and is not, its type."""
    if value is None or isinstance(value, (str, int, float)):
        return "" if value is None else str(value)
    return f"({type(value).__name__})"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
