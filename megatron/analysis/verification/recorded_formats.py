"""What the six operands of a matmul went through, from what a dump says of it.

A record names the format of its own operand, in its forward and its backward use. It does not say
whether a backward pass was straight-through, and attention's probabilities and the gradients of its
scores have no record. The run card's audit says all of it, where the trainer was ours; without one
several readings can be possible, and a result that follows from any of them is as recorded.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.fake_quant.gemm import AS_IT_IS, SLOTS, GemmFormats, Operand
from megatron.fake_quant.hadamard import Hadamard
from megatron.fake_quant.names import get_format
from megatron.fake_quant.recipe_operands import GEMMS

_AUDIT_LINE = re.compile(
    r"(?P<module>\S+)\s+(?P<operation>linear|qk|pv)\s{2,}(?P<summary>\S.*?)\s{2,}\S.*"
)
_LINE_LIMIT = 1000  #: longest line of an audit in characters
STRAIGHT, UNNORMALIZED = "straight-through", "unnormalized probabilities"  #: an audit's marks
_MARK = re.compile(rf" \(({STRAIGHT}|{UNNORMALIZED})\)")


@dataclass(frozen=True, slots=True)
class Softmax:
    """What attention does between its two matmuls."""

    scale: float | None = None  #: that QK^T is multiplied by; None: 1 / sqrt(head dim)
    coefficient: float | None = None  #: that the scores are multiplied by again, before the mask
    window: tuple[int, int] | None = None  #: keys before and after a query that it sees, or causal
    in_fp32: bool = True  #: else in the scores' own dtype


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
    """What the run card's audit says of one operation of a module; None where it says nothing.

    Raises:
        NotCheckedError: a way to multiply, or a format, that this version does not know.
    """
    with _of_an_audit():
        part = _part(card, iteration)
        if (found := _entry(part, module, operation)) is not None:
            return _of_entry(found)
        if "operands" not in part:  # of a run before the audit had them: its text
            for line in part.get("matmuls", []):
                if len(line) > _LINE_LIMIT:
                    continue  # matching takes time quadratic in the length
                match = _AUDIT_LINE.fullmatch(line)
                of_it = match and match["operation"] == operation
                if match and of_it and _stands_for(match["module"], module):
                    return _of_summary(match["summary"], operation)
    return None


def softmax_of_card(card: Mapping[str, Any], module: str, iteration: int) -> Softmax | None:
    """What the run card says of an attention layer's softmax: its audit, else the arguments of a
    run before the audit had it; None where it has neither.

    Raises:
        NotCheckedError: a softmax that is not recomputed; the message says why.
    """
    with _of_an_audit():
        found = (_entry(_part(card, iteration), module, "qk") or {}).get("softmax")
        args = card.get("arguments") or {}
        if found is None:
            if not args:
                return None
            found = _softmax_of_arguments(args, module)
        if args.get("reset_attention_mask"):
            raise NotCheckedError("attention with reset_attention_mask: its mask is not saved")
        if found["dropout"]:
            raise NotCheckedError(
                f"attention with dropout {found['dropout']}: what it drops is not saved"
            )
        if found["kind"] != "vanilla":
            raise NotCheckedError(f"attention with a softmax {found['kind']!r}: not recomputed")
        window = found["window"]
        return Softmax(
            scale=found["scale"],
            coefficient=found["coefficient"],
            window=None if window is None else (int(window[0]), int(window[1])),
            in_fp32=found["in_fp32"],
        )


@contextlib.contextmanager
def _of_an_audit() -> Iterator[None]:
    """A card that is not as ours are is a reason, not a failure."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise NotCheckedError(f"the run card's audit is not understood ({why})") from None


def _part(card: Mapping[str, Any], iteration: int) -> Mapping[str, Any]:
    """The part of the audit that is in force in an iteration; empty where there is none."""
    parts = [part for part in card.get("quantization") or [] if part["iteration"] <= iteration]
    return max(parts, key=lambda part: part["iteration"]) if parts else {}


def _entry(part: Mapping[str, Any], module: str, operation: str) -> Mapping[str, Any] | None:
    """What one part says of an operation of a module, as `audit.for_card` has it."""
    for entry in part.get("operands", []):
        if entry["operation"] == operation and _stands_for(entry["modules"], module):
            return entry  # type: ignore[no-any-return]
    return None


def _of_entry(entry: Mapping[str, Any]) -> GemmFormats:
    operands = {slot: parse_operand(entry["slots"][slot]) for slot in SLOTS}
    return _marked(operands, set(entry["marks"]))


def _marked(operands: Mapping[str, Operand], marks: set[str]) -> GemmFormats:
    """The formats, from what each operand really goes through."""
    if unknown := sorted(marks - {STRAIGHT, UNNORMALIZED}):
        raise NotCheckedError(
            f"multiplied in a way that this version does not know: {', '.join(unknown)}"
        )
    straight = STRAIGHT in marks
    if straight:  # the backward pass has the forward pass's
        operands = {slot: operands[slot] for slot in ("fprop_a", "fprop_b")}
    return GemmFormats(**operands, straight_through=straight, unnormalized=UNNORMALIZED in marks)


def _softmax_of_arguments(args: Mapping[str, Any], module: str) -> dict[str, Any]:
    """What megatron-core makes of a run's arguments."""
    layer = re.search(r"(?<=layers\.)\d+", module)
    number = int(layer[0]) + 1 if layer else 1
    scale, coefficient = args.get("softmax_scale"), None
    if args.get("multi_latent_attention"):
        factor = args.get("rotary_scaling_factor", 1.0)
        m = 1.0 if factor <= 1 else 0.1 * args["mscale_all_dim"] * math.log(factor) + 1.0
        scale = m * m / math.sqrt(args["qk_head_dim"] + args["qk_pos_emb_head_dim"])
    if args.get("apply_query_key_layer_scaling"):
        coefficient = number
        scale = (scale or 1 / math.sqrt(args["kv_channels"])) / number
    in_fp32 = args.get("attention_softmax_in_fp32", True) or coefficient is not None
    window, skip = args.get("window_size"), args.get("window_attn_skip_freq")
    if isinstance(skip, int) and number % skip == 0:
        window = None
    if isinstance(skip, list) and not skip[number - 1]:
        window = None
    return {
        "scale": scale,
        "coefficient": coefficient,
        "window": window or None,
        "dropout": args.get("attention_dropout") or 0,
        "kind": args.get("softmax_type") or "vanilla",
        "in_fp32": in_fp32,
    }


def _stands_for(names: str, module: str) -> bool:
    """Whether `decoder.layers.0-2,5.mlp.linear_fc1` is said of a module."""
    match = re.search(r"(?<=layers\.)[\d,-]+", names)
    if match is None:
        return names == module
    before, after = names[: match.start()], names[match.end() :]
    layer = module.removeprefix(before).removesuffix(after)
    if module != f"{before}{layer}{after}" or not re.fullmatch(r"\d{1,18}", layer):
        return False
    ranges = (part.partition("-") for part in match[0].split(","))
    return any(int(low) <= int(layer) <= int(high or low) for low, _, high in ranges)


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
    return _marked(dict(zip(SLOTS, chain(*pairs), strict=True)), marks)
