"""Read facts about a run and the format of each matmul from its run card, for the report.

A run card is not trusted: it may contain anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys of the run card that the report shows: single values (`FACTS`), groups of values (`GROUPS`)
#: and entries of the group "arguments" (`ARGUMENTS`).
FACTS = ("quant_type", "started", "status", "reason", "device", "seed", "iterations", "platform")
GROUPS = ("versions", "topology", "git", "loaded")
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
    """Return the names and values of the run card's entries that the report shows.

    Missing entries are omitted.
    """
    pairs = [(name, as_text(card.get(name))) for name in FACTS]
    for group in GROUPS:
        parts = {name: as_text(value) for name, value in _mapping(card.get(group)).items()}
        pairs.append((group, ", ".join(f"{name} {text}" for name, text in parts.items() if text)))
    arguments = _mapping(card.get("arguments"))
    pairs += [(name, as_text(arguments.get(name))) for name in ARGUMENTS]
    return [(name, text) for name, text in pairs if text]


def audit(card: Mapping[str, Any]) -> list[str]:
    """Return the lines of the format audit: the format of each matmul, as printed by the run."""
    lines = []
    for part in _list(card.get("quantization")):
        if not isinstance(part, Mapping):
            continue
        share = part.get("share_of_matmul_flops")
        flops = ""
        if isinstance(share, (int, float)) and 0 <= share <= 1:
            flops = f" {100 * share:.1f} % of the FLOPs in low precision"
        lines.append(f"from iteration {as_text(part.get('iteration')) or '?'}:{flops}")
        lines += [f"  {as_text(line)}" for line in _list(part.get("matmuls"))]
    return lines


def as_text(value: object) -> str:
    """Return a scalar as text, an empty string for None, or the type name of any other value."""
    if value is None or isinstance(value, (str, int, float)):
        return "" if value is None else str(value)
    return f"({type(value).__name__})"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
