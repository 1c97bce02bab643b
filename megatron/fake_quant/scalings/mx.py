"""Compute MX block scales: one E8M0 byte per block, from the block's largest magnitude.

A scale is kept as its byte (exponent + 127, or 255 for NaN), which is what the format stores. The
two ends of its range need care in float32. Byte 0 is 2^-127, a subnormal whose reciprocal is a
normal number; byte 254 is 2^127, whose reciprocal is the same subnormal. Values are therefore
multiplied by a reciprocal that is built from bits; they are never divided.

Two points that the specification leaves open are decided here. A block with a NaN or an Inf becomes
NaN as a whole: its scale is the NaN byte, because E8M0 has no Inf. A block of zeros gets the
smallest scale, so that its zeros keep their signs.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron.fake_quant.block_scaling import BlockScaling, ScaleRule
from megatron.fake_quant.elements import ELEMENTS, ElementFormat
from megatron.fake_quant.float32_bits import BIAS, MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape

NAN_BYTE = 255
_MAX_BYTE = 254
_HALF_POWER_BITS = 1 << (MANTISSA_BITS - 1)  #: bits of 2^-127, half the smallest normal float32
_QUIET_NAN_BITS = 0x7FC00000
_ULP = math.ldexp(1, -24)  #: spacing of float32 in [0.5, 1), the range of significands from frexp

#: Threshold of each scale rule. The rule doubles the scale of the floor rule (OCP v1.0, section
#: 6.3) if the significand of the block's maximum, in [0.5, 1), is at least the threshold.
CARRY_FROM: dict[ScaleRule, Callable[[ElementFormat], float]] = {
    # The scale is never doubled: the power of two at or below amax maps to the element type's
    # largest power of two. Values above the element type's maximum saturate.
    "floor": lambda element: 1.0,
    # The scale is doubled unless amax is a power of two, so that the scale's exponent is
    # ceil(log2 amax) - emax.
    "ceil": lambda element: 0.5 + _ULP,
    # The scale is doubled if amax would exceed the element type's maximum. The result is the
    # smallest scale at which nothing saturates (arXiv 2506.08027).
    "rceil": lambda element: math.frexp(element.max)[0] + _ULP,
    # The scale is doubled if rounding amax to the significand bits of the element type, half up,
    # gives the next power of two.
    "even": lambda element: 1.0 - math.ldexp(1, -2 - element.mantissa_bits),
}
_RULES_IN_WORDS: dict[ScaleRule, str] = {
    "floor": "2^(floor(log2 amax) - {emax}), as in OCP",
    "rceil": "the smallest power of two at which {saturated}",
    "ceil": "2^(ceil(log2 amax) - {emax})",
    "even": "as floor, of amax rounded half up to {significand} significand bits",
}


def carry_from(fmt: Format) -> float:
    """Return the smallest significand of amax for which the format's rule doubles the scale.

    The format must have E8M0 scales. See `CARRY_FROM`.
    """
    assert isinstance(fmt.element, ElementFormat)
    assert isinstance(fmt.scaling, BlockScaling)
    return _threshold(fmt.element, fmt.scaling)


def _threshold(element: ElementFormat, scaling: BlockScaling) -> float:
    assert scaling.rule is not None
    if scaling.top is not None:  # `top` is in the same binade as the type's largest number.
        element = replace(element, max=scaling.top)
    return CARRY_FROM[scaling.rule](element)


def carry_bits(fmt: Format) -> int:
    """Return the smallest float32 mantissa of amax for which the rule doubles the scale."""
    return int(math.ldexp(carry_from(fmt), 24)) - (1 << 23)


def scale_bytes(amax: Tensor, element: ElementFormat, scaling: BlockScaling) -> Tensor:
    """Return the E8M0 scale bytes (int32) of blocks, given their maxima `amax` (float32).

    `amax` may contain NaN and Inf. Scales out of range are clamped to 2^-127 and 2^127.
    """
    significand, exponent = torch.frexp(amax)
    carry = significand >= _threshold(element, scaling)
    byte = (exponent - 1 - element.emax + BIAS + carry.int()).clamp(0, _MAX_BYTE)
    # frexp does not define the exponent of Inf and NaN, and zero has none.
    return byte.masked_fill(amax == 0, 0).masked_fill(~amax.isfinite(), NAN_BYTE)


def scale_values(byte: Tensor) -> Tensor:
    """Return the float32 numbers 2^(byte - 127) that E8M0 bytes (int32) encode; 255 is NaN."""
    bits = (byte << MANTISSA_BITS).masked_fill(byte == 0, _HALF_POWER_BITS)
    return bits.masked_fill(byte == NAN_BYTE, _QUIET_NAN_BITS).view(torch.float32)


def scale_reciprocals(byte: Tensor) -> Tensor:
    """Return the reciprocals 2^(127 - byte) of E8M0 scales as float32; 255 is NaN."""
    return scale_values((_MAX_BYTE - byte).masked_fill(byte == NAN_BYTE, NAN_BYTE))


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the range of the element type, and one scale byte per block."""
    byte = scale_bytes(blocks.abs().amax(-1), element, scaling)
    factors = scale_reciprocals(byte)
    if scaling.headroom != "1":
        factors = factors * scaling.share
    return blocks * factors.unsqueeze(-1), Scales(byte.to(torch.uint8))


def scale_up(elements: Tensor, scales: Scales, scaling: BlockScaling) -> Tensor:
    """Multiply the elements by the scales of their blocks, which undoes `scale_down`."""
    values = elements * scale_values(scales.block().int()).unsqueeze(-1)
    return values if scaling.headroom == "1" else values * (1 / scaling.share)


def stored_scales(scaling: BlockScaling) -> Tensor:
    """Return the factor for each of the 256 scale bytes."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    return scale_up(torch.ones(256, 1, dtype=torch.float32, device="cpu"), Scales(byte), scaling)[
        :, 0
    ]


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each scale in histograms: the stored byte itself."""
    return stored


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic") if fmt.element.ties == "even" else ()


def source(fmt: Format) -> str:
    """Return a reference to the document that defines the format."""
    named = "" if fmt.element.name in ELEMENTS else ", with an element that is not among its own"
    rule = "; scale rule arXiv 2506.08027" if fmt.scale_rule == "rceil" else ""
    return f"OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3{named}{rule}"


def _headroom(scaling: BlockScaling) -> list[tuple[str, str]]:
    """Return the line that states the headroom (arXiv 2502.20586), or no line if there is none."""
    if scaling.headroom == "1":
        return []
    words = f"values times {scaling.headroom} before rounding, and its inverse after it"
    return [("headroom", f"{words} (arXiv 2502.20586)")]


def describe(fmt: Format, scaling: BlockScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of E8M0 scales and of every rule that can compute them."""
    rules = []
    for rule, words in _RULES_IN_WORDS.items():
        words = words.format(
            emax=element.emax,
            significand=element.mantissa_bits + 1,
            saturated="nothing saturates"
            if scaling.top is None
            else f"amax is at most {scaling.top:g}",
        )
        carry = _threshold(element, scaling) if rule == scaling.rule else CARRY_FROM[rule](element)
        low, high = (math.ldexp(carry, element.emax + binade) * scaling.share for binade in (0, 1))
        label = f"{rule} *" if rule == scaling.rule else rule
        rules.append((label, f"{words}; amax lands in {low:.6g} to {high:.6g}"))
    how = [str(scaling.rule)]
    how += [f"top {scaling.top:g}"] if scaling.top is not None else []
    how += [f"headroom {scaling.headroom}"] if scaling.headroom != "1" else []
    return ScaleDescription(
        source(fmt),
        f"E8M0 per {brief_shape(fmt)} values, {', '.join(how)}",
        f"{block_shape(fmt)}, E8M0 (a power of two)",
        (
            ("scale rule", "one of the following; the format has the one with *:"),
            *rules,
            *_headroom(scaling),
        ),
    )
