"""Report how the first forward pass of a model differed from what was requested."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from megatron.collection import session
from megatron.core.low_precision import run_request
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)


@dataclass
class Findings:
    """Differences between what was requested and what ran in the first forward pass."""

    #: layers that were not called
    not_called: list[str] = field(default_factory=list)
    #: layers that have a format and ran without it
    without_format: list[str] = field(default_factory=list)
    #: layers to collect whose own code, which passes the tensors to the collection, did not run
    not_collected: list[str] = field(default_factory=list)
    #: operations outside of our layers, by module
    outside: dict[str, Counter[str]] = field(default_factory=dict)
    #: names of modules inside transformer layers that ran fused attention outside of our layers
    foreign_attention: list[str] = field(default_factory=list)
    #: True if a layer that can be quantized or collected was called
    any_called: bool = False
    keys: int = 1  #: largest number of keys of an attention layer; 1 without attention


def report(findings: Findings) -> None:
    """Log the findings, add them to the run card, and pass them to `refuse`."""
    outside = {
        name: ", ".join(f"{kind} x{count}" for kind, count in operations.items())
        for name, operations in findings.outside.items()
    }
    lines = []
    if findings.not_called:
        lines.append(f"not called: {', '.join(findings.not_called)}")
    for name, operations in outside.items():
        lines.append(f"outside of the audit, in high precision: {name}: {operations}")
    if lines and not session.audited():
        logger.warning("%s", "\n".join(["the first forward pass of the model:", *lines]))
    session.add_to_card("not_called", findings.not_called)
    session.add_to_card("outside_of_the_audit", outside)
    refuse(findings)


def refuse(findings: Findings) -> None:
    """Raise ValueError if a layer or fused attention ran, but was not quantized or collected."""
    requested = run_request.description()
    if findings.without_format:
        raise ValueError(
            f"{requested} applies to {', '.join(findings.without_format)}, but other code has "
            "replaced their forward pass and multiplies without it; remove that code, or leave "
            "these modules out of the formats"
        )
    if findings.not_collected:
        raise ValueError(
            f"{requested} includes {', '.join(findings.not_collected)}, but other code has "
            "replaced their forward pass, so that none of their tensors is collected; remove that "
            "code, or leave these modules out of the collection (--collect-modules)"
        )
    formats = policy.current()
    attends = any(
        formats.choices[operation].format is not None or operation in formats.by_recipe
        for operation in ("qk", "pv")
    )
    if findings.foreign_attention and (attends or run_request.collecting()):
        raise ValueError(
            f"{requested} does not reach the attention of {', '.join(findings.foreign_attention)}, "
            "which calls a fused attention kernel; use DotProductAttention of megatron.core, or "
            "quantize the linear layers only (linear_<format>)"
        )
