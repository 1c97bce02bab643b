"""Determine the formats in which a matmul was computed, from the records and run card of a dump.

A record contains the formats of one operand, as used in the forward and the backward pass. It does
not state whether the backward pass was straight-through. The probabilities of attention are
recorded only on request, and the gradients of its scores are never recorded. The format audit in
the run card contains all of this information, but dumps of other training programs have no audit.
In this case, several combinations of formats may be possible, and a result is accepted if it agrees
with any of them.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.matmul.gemm_formats import (
    ACCUMULATOR_FIELDS,
    GEMM_SLOTS,
    SLOTS,
    GemmFormats,
)
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.operand import AS_IT_IS, Operand
from megatron.fake_quant.names import get_format
from megatron.fake_quant.recipe.operands import GEMMS
from megatron.fake_quant.tiles.tiling import CAUSAL, Tiling

_AUDIT_LINE = re.compile(
    r"(?P<module>\S+)\s+(?P<operation>linear|qk|pv)\s{2,}(?P<summary>\S.*?)\s{2,}\S.*"
)
_LINE_LIMIT = 1000  #: maximum length of an audit line, in characters
#: Properties of a matmul that the format audit shows in parentheses after the formats.
STRAIGHT, UNNORMALIZED = "straight-through", "unnormalized probabilities"
ALL_VISIBLE, MASK_NOT_SAVED = "all keys visible", "mask not saved"
#: Mark of a matmul of Transformer Engine, whose formats are not recorded.
TRANSFORMER_ENGINE = "computed by Transformer Engine"
#: words of an audit line between the names of GEMMs and the name of their accumulator
ACCUMULATED = "accumulated in "
_MARK = re.compile(
    rf" \(({STRAIGHT}|{UNNORMALIZED}|tiles of [^()]{{1,80}}"
    rf"|[\w ]{{0,60}}{ACCUMULATED}[\w:, ]{{1,400}})\)"
)


@dataclass(frozen=True, slots=True)
class Softmax:
    """Parameters of scaling, masking and softmax between the two matmuls of attention."""

    scale: float | None = None  #: factor applied to QK^T; None for 1 / sqrt(head dim)
    coefficient: float | None = None  #: factor applied to the scores before masking
    #: How many keys before and after its own position a query attends to; None for a causal mask.
    window: tuple[int, int] | None = None
    in_fp32: bool = True  #: True if softmax is computed in float32, not in the scores' dtype


class NotCheckedError(Exception):
    """Exception raised if a result cannot be recomputed from the saved tensors.

    The message gives the reason.
    """


def parse_operand(name: str) -> Operand:
    """Parse an operand's format from a format audit or record, such as `nvfp4:sr` or `none`.

    The operand's split, Hadamard transform and source may follow, as in
    `nvfp4:sr+mean+H16:nvfp4+dequantized`.

    Raises:
        NotCheckedError: if the format is unknown.
    """
    format_name, *parts = name.split("+")
    settings: dict[str, Any] = {}
    try:
        for part in parts:
            if part.startswith("H"):
                size, _, signs = part[1:].partition(":")
                transform = Hadamard(int(size), int(signs) if signs.isdigit() else signs)  # type: ignore[arg-type]
                settings["hadamard"] = transform
            else:
                settings["split" if part == "mean" else "source"] = part
        return Operand(None if format_name == "none" else get_format(format_name), **settings)
    except ValueError:
        raise NotCheckedError(f"the unknown format {name!r}") from None


def uses(name: str | None) -> tuple[Operand, Operand]:
    """Return the formats of an operand in the forward and in the backward pass.

    Args:
        name: the field `format` of a record; None if the operand was not quantized.
    """
    if name is None:
        return AS_IT_IS, AS_IT_IS
    first, _, second = name.partition(" | ")
    return parse_operand(first), parse_operand(second or first)


def of_records(
    a: str | None,
    b: str | None,
    c: str | None,
    *,
    accumulators: Mapping[str, Accumulator] = MappingProxyType({}),
) -> list[GemmFormats]:
    """Return all `GemmFormats` of a matmul that agree with the records of its operands.

    Args:
        accumulators: accumulators of the matmul's GEMMs, by field of `GemmFormats`.
        a: format in the record of operand A.
        b: format in the record of operand B.
        c: format in the record of the gradient of the result C.

    Raises:
        NotCheckedError: if a format is unknown, or the formats are incompatible.
    """
    (fprop_a, wgrad_a), (fprop_b, dgrad_b), (dgrad_c, wgrad_c) = uses(a), uses(b), uses(c)
    candidates = []
    slots = (fprop_a, fprop_b, dgrad_c, dgrad_b, wgrad_c, wgrad_a)
    # GemmFormats raises ValueError if the two operands of a GEMM have different transforms. If the
    # recorded transforms differ, only a straight-through matmul is possible.
    with contextlib.suppress(ValueError):
        operands = dict(zip(SLOTS, slots, strict=True))
        candidates.append(GemmFormats(**operands, **accumulators))  # type: ignore[arg-type]
    through = dgrad_c == wgrad_c == AS_IT_IS and (fprop_a, fprop_b) == (wgrad_a, dgrad_b)
    if through and (fprop_a != AS_IT_IS or fprop_b != AS_IT_IS):
        settings: dict[str, Any] = {"straight_through": True, **accumulators}
        with contextlib.suppress(ValueError):
            candidates.append(GemmFormats(fprop_a, fprop_b, **settings))
    if not candidates:
        raise NotCheckedError(f"the incompatible formats {a!r}, {b!r} and {c!r}")
    return candidates


def of_accumulate(names: Mapping[str, str] | None, operation: str) -> dict[str, Accumulator]:
    """Return an operation's accumulators, keyed by field of `GemmFormats`.

    Args:
        names: the field `accumulate` of a record.
        operation: linear, qk or pv.

    Raises:
        NotCheckedError: if an accumulator is unknown.
    """
    return {
        field: parse_accumulator(names[f"{operation}_{gemm}"])
        for gemm, field in zip(GEMM_SLOTS, ACCUMULATOR_FIELDS, strict=True)
        if names and f"{operation}_{gemm}" in names
    }


def parse_accumulator(name: str) -> Accumulator:
    """Parse the name of an accumulator from a format audit or record.

    Raises:
        NotCheckedError: if the accumulator is unknown.
    """
    try:
        return get_accumulator(name)
    except ValueError:
        raise NotCheckedError(f"the unknown accumulator {name!r}") from None


def with_drawn_signs(formats: GemmFormats, of_codes: Mapping[str, str]) -> GemmFormats:
    """Return the formats with the recorded random signs of their Hadamard transforms filled in.

    The two operands of a GEMM share the signs.

    Args:
        formats: formats of a matmul.
        of_codes: the field `format` in the records of the matmul's codes, by slot.
    """
    operands = {slot: getattr(formats, slot) for slot in SLOTS}
    for slot, name in of_codes.items():
        gemm, drawn = slot.partition("_")[0], parse_operand(name).hadamard
        for other, operand in operands.items():
            if other.startswith(gemm) and operand.hadamard is not None and operand.hadamard.random:
                operands[other] = replace(operand, hadamard=drawn)
    return replace(formats, **operands)


def of_card(
    card: Mapping[str, Any], module: str, operation: str, iteration: int
) -> GemmFormats | None:
    """Read the formats of a module's matmul from the format audit in the run card.

    The result is None if the audit does not contain the operation.

    Raises:
        NotCheckedError: if a format or a suffix is unknown, or the audit cannot be parsed.
    """
    with _reading_an_audit():
        part = _part(card, iteration)
        if (entry := _entry(part, module, operation)) is not None:
            return _of_entry(entry)
        if "operands" not in part:  # this audit lists the matmuls only as lines of text
            for line in part.get("matmuls", []):
                if len(line) > _LINE_LIMIT:
                    continue  # matching a long line would take quadratic time
                match = _AUDIT_LINE.fullmatch(line)
                if match is None or match["operation"] != operation:
                    continue
                if _covers(match["module"], module):
                    return _of_summary(match["summary"], operation)
    return None


def softmax_of_card(card: Mapping[str, Any], module: str, iteration: int) -> Softmax | None:
    """Read the softmax parameters of an attention layer from the run card.

    The parameters are read from the audit, or else derived from the arguments of the run. The
    result is None if the card has neither.

    Raises:
        NotCheckedError: if this softmax cannot be recomputed; the message gives the reason.
    """
    with _reading_an_audit():
        softmax = _recorded_softmax(card, module, iteration)
        if softmax is None:
            return None
        if softmax["dropout"]:
            raise NotCheckedError(
                f"attention with dropout {softmax['dropout']}: its dropout mask is not saved"
            )
        if softmax["kind"] != "vanilla":
            raise NotCheckedError(f"attention with the unsupported softmax {softmax['kind']!r}")
        window = softmax["window"]
        return Softmax(
            scale=softmax["scale"],
            coefficient=softmax["coefficient"],
            window=None if window is None else (int(window[0]), int(window[1])),
            in_fp32=softmax["in_fp32"],
        )


def window_of_card(card: Mapping[str, Any], module: str, iteration: int) -> tuple[int, int]:
    """Read from the run card how many keys a query sees before and after its position.

    Unlike `softmax_of_card`, this function supports dropout and any type of softmax.

    Raises:
        NotCheckedError: if the mask is not known; the message gives the reason.
    """
    with _reading_an_audit():
        softmax = _recorded_softmax(card, module, iteration)
        if softmax is None:
            raise NotCheckedError("the run card has neither an audit nor arguments")
        window = softmax["window"]
        return CAUSAL if window is None else (int(window[0]), int(window[1]))


def _recorded_softmax(
    card: Mapping[str, Any], module: str, iteration: int
) -> Mapping[str, Any] | None:
    """Return a layer's softmax parameters from the audit or, if it has none, from the arguments.

    Raises:
        NotCheckedError: if the mask is not known.
    """
    entry = _entry(_part(card, iteration), module, "qk") or {}
    softmax, marks = entry.get("softmax"), entry.get("marks") or []
    if TRANSFORMER_ENGINE in marks:
        raise NotCheckedError(f"{TRANSFORMER_ENGINE}: its mask and softmax are not recorded")
    if MASK_NOT_SAVED in marks:
        raise NotCheckedError("attention with a mask that depends on the data: it is not saved")
    args = card.get("arguments") or {}
    if softmax is None:
        if not args:
            return None
        softmax = _softmax_of_arguments(args, module)
    if args.get("reset_attention_mask"):
        raise NotCheckedError("attention with reset_attention_mask: its mask is not saved")
    if ALL_VISIBLE in marks:
        return {**softmax, "window": (CAUSAL[0], CAUSAL[0])}
    return softmax


@contextlib.contextmanager
def _reading_an_audit() -> Iterator[None]:
    """Raise `NotCheckedError` if the `with` block fails to parse the run card."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise NotCheckedError(f"a run card whose audit cannot be parsed ({why})") from None


def _part(card: Mapping[str, Any], iteration: int) -> Mapping[str, Any]:
    """Return the part of the format audit that applies to an iteration, or {} if there is none."""
    parts = [part for part in card.get("quantization") or [] if part["iteration"] <= iteration]
    return max(parts, key=lambda part: part["iteration"]) if parts else {}


def _entry(part: Mapping[str, Any], module: str, operation: str) -> Mapping[str, Any] | None:
    """Return the format audit's entry for an operation of a module, or None if there is none.

    The entry has the form that `matmul_audit.for_card` writes.
    """
    for entry in part.get("operands", []):
        if entry["operation"] == operation and _covers(entry["modules"], module):
            return entry  # type: ignore[no-any-return]
    return None


def _of_entry(entry: Mapping[str, Any]) -> GemmFormats:
    operands = {slot: parse_operand(entry["slots"][slot]) for slot in SLOTS}
    return _marked(operands, set(entry["marks"]), entry["operation"])


def _marked(operands: Mapping[str, Operand], marks: set[str], operation: str) -> GemmFormats:
    """Return the formats of a matmul, given its operands and its properties in the format audit.

    The audit shows such a property in parentheses, for example `straight-through`.

    Args:
        operands: operands by slot (operand of one GEMM).
        marks: properties of the matmul.
        operation: linear, qk or pv.
    """
    accumulators, others = _accumulators_of(marks, operation)
    tilings = {mark: tiling for mark in others if (tiling := Tiling.parse(mark)) is not None}
    known = {STRAIGHT, UNNORMALIZED, ALL_VISIBLE, MASK_NOT_SAVED}
    if unknown := sorted(others - known - tilings.keys()):
        raise NotCheckedError(f"a matmul with unknown properties: {', '.join(unknown)}")
    straight = STRAIGHT in marks
    if straight:  # the backward pass uses the operands of the forward pass
        operands = {slot: operands[slot] for slot in ("fprop_a", "fprop_b")}
    settings: dict[str, Any] = {**operands, **accumulators}
    return GemmFormats(
        **settings,
        straight_through=straight,
        unnormalized=UNNORMALIZED in marks,
        tiling=next(iter(tilings.values()), None),
    )


def _accumulators_of(marks: set[str], operation: str) -> tuple[dict[str, Accumulator], set[str]]:
    """Return the accumulators in `marks`, keyed by field of `GemmFormats`, and the other marks."""
    fields = dict(zip(GEMMS[operation], ACCUMULATOR_FIELDS, strict=True))
    accumulators: dict[str, Accumulator] = {}
    others: set[str] = set()
    for mark in marks:
        if ACCUMULATED not in mark:
            others.add(mark)
            continue
        # One mark may list several accumulators: "fprop and dgrad accumulated in x, wgrad in y".
        for part in mark.replace(ACCUMULATED, "in ", 1).split(", "):
            words, _, name = part.rpartition("in ")
            gemms = words.strip().split(" and ") if words else list(fields)
            if not fields.keys() >= set(gemms):
                others.add(mark)
                continue
            accumulators |= {fields[gemm]: parse_accumulator(name) for gemm in gemms}
    return accumulators, others


def _softmax_of_arguments(args: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Derive the softmax parameters from the arguments of a run, as megatron-core does."""
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


def _covers(names: str, module: str) -> bool:
    """Return whether a name such as `decoder.layers.0-2,5.mlp.linear_fc1` includes a module."""
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
    """Parse the formats of a matmul from its summary, a part of a line in the format audit.

    A summary is, for example, `mxfp8`, `high precision` or
    `fprop mxfp8 x mxfp8, dgrad ... (straight-through)`.
    """
    marks = set(_MARK.findall(summary))
    text = _MARK.sub("", summary)
    gemms = list(GEMMS[operation])
    operands = dict.fromkeys(gemms, f"{text} x {text}")
    if text == "high precision":
        operands = dict.fromkeys(gemms, "none x none")
    elif " x " in text:
        operands = dict(part.split(" ", 1) for part in text.split(", "))
    pairs = [[parse_operand(name) for name in operands[gemm].split(" x ")] for gemm in gemms]
    return _marked(dict(zip(SLOTS, chain(*pairs), strict=True)), marks, operation)
