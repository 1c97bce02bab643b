"""What the six operands of a matmul went through, from what a dump says of it.

A record names the format of its own operand, in its forward and its backward use. It does not say
whether a backward pass was straight-through, and attention's probabilities and the gradients of its
scores have no record. The run card's audit says all of it, where the trainer was ours; without one
several readings can be possible, and a result that follows from any of them is as recorded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from megatron.fake_quant.gemm import AS_IT_IS, SLOTS, GemmFormats, Operand
from megatron.fake_quant.hadamard import Hadamard
from megatron.fake_quant.names import get_format
from megatron.fake_quant.recipe_config import GEMMS

_AUDIT_LINE = re.compile(
    r"(?P<module>\S+)\s+(?P<operation>linear|qk|pv)\s{2,}(?P<summary>\S.*?)\s{2,}\S.*"
)
_MARK = re.compile(r" \((straight-through|unnormalized probabilities)\)")


class NotCheckedError(Exception):
    """Why a result cannot be recomputed from what was saved."""


def parse_operand(name: str) -> Operand:
    """One operand as audits and records have it: `nvfp4:sr+H16:nvfp4`, `none`.

    Raises:
        NotCheckedError: no such format in this version.
    """
    of_format, _, transform = name.partition("+H")
    try:
        hadamard = None
        if transform:
            size, _, signs = transform.partition(":")
            hadamard = Hadamard(int(size), int(signs) if signs.isdigit() else signs)  # type: ignore[arg-type]
        return Operand(None if of_format == "none" else get_format(of_format), hadamard)
    except ValueError:
        raise NotCheckedError(f"this version does not know the format {name!r}") from None


def uses(name: str | None) -> tuple[Operand, Operand]:
    """The forward and the backward use of the operand that a record's `format` tells of."""
    if name is None:
        return AS_IT_IS, AS_IT_IS
    first, _, second = name.partition(" | ")
    return parse_operand(first), parse_operand(second or first)


def of_records(a: str | None, b: str | None, c: str | None) -> list[GemmFormats]:
    """The readings of the formats that the records of A, B and the gradient of C have.

    Raises:
        NotCheckedError: a format that is unknown, or operands that do not go together.
    """
    (fprop_a, wgrad_a), (fprop_b, dgrad_b), (dgrad_c, wgrad_c) = uses(a), uses(b), uses(c)
    readings = []
    slots = (fprop_a, fprop_b, dgrad_c, dgrad_b, wgrad_c, wgrad_a)
    # transforms that differ between a gradient and an operand are a straight-through pass's
    with contextlib.suppress(ValueError):
        readings.append(GemmFormats(**dict(zip(SLOTS, slots, strict=True))))  # type: ignore[arg-type]
    if dgrad_c == wgrad_c == AS_IT_IS and (fprop_a, fprop_b) == (wgrad_a, dgrad_b):
        straight = GemmFormats(fprop_a=fprop_a, fprop_b=fprop_b, straight_through=True)
        readings += [straight] if fprop_a != AS_IT_IS or fprop_b != AS_IT_IS else []
    if not readings:
        raise NotCheckedError(f"the formats {a!r}, {b!r} and {c!r} do not go together")
    return readings


def of_card(
    card: Mapping[str, Any], module: str, operation: str, iteration: int
) -> GemmFormats | None:
    """What the run card's audit says of one operation of a module; None where it has no audit."""
    parts = [part for part in card.get("quantization") or [] if part["iteration"] <= iteration]
    for line in max(parts, key=lambda part: part["iteration"])["matmuls"] if parts else []:
        match = _AUDIT_LINE.fullmatch(line)
        if match and match["operation"] == operation and _stands_for(match["module"], module):
            return _of_summary(match["summary"], operation)
    return None


def _stands_for(names: str, module: str) -> bool:
    """Whether `decoder.layers.0-2,5.mlp.linear_fc1` is said of a module."""
    match = re.search(r"(?<=layers\.)[\d,-]+", names)
    if match is None:
        return names == module
    ranges = (part.partition("-") for part in match[0].split(","))
    layers = chain(*(range(int(low), int(high or low) + 1) for low, _, high in ranges))
    before, after = names[: match.start()], names[match.end() :]
    return any(module == f"{before}{layer}{after}" for layer in layers)


def _of_summary(summary: str, operation: str) -> GemmFormats:
    """`mxfp8`, `high precision`, or `fprop mxfp8 x mxfp8, dgrad ... (straight-through)`."""
    marks = set(_MARK.findall(summary))
    text = _MARK.sub("", summary)
    gemms = list(GEMMS[operation])
    said = dict.fromkeys(gemms, f"{text} x {text}")
    if text == "high precision":
        said = dict.fromkeys(gemms, "none x none")
    elif " x " in text:
        said = dict(part.split(" ", 1) for part in text.split(", "))
    pairs = [[parse_operand(name) for name in said[gemm].split(" x ")] for gemm in gemms]
    straight = "straight-through" in marks
    operands = dict(zip(SLOTS, chain(*pairs), strict=True))
    if straight:
        operands = {slot: operands[slot] for slot in ("fprop_a", "fprop_b")}
    unnormalized = "unnormalized probabilities" in marks
    return GemmFormats(**operands, straight_through=straight, unnormalized=unnormalized)
