"""Block scales: an E8M0 byte from each block's largest magnitude, and the number it stands for.

A scale is kept as its byte (exponent + 127, and 255 for NaN), because the byte is what the format
stores and because its two ends need care in float32. Byte 0 is 2^-127, a subnormal whose reciprocal
still is a normal number; byte 254 is 2^127, whose reciprocal is that subnormal. Values are
therefore multiplied by a reciprocal built from bits, never divided.

What the specification leaves open is decided here: a block with a NaN or an Inf becomes NaN as a
whole (its scale is the NaN byte: E8M0 has no Inf), and a block of zeros gets the smallest scale,
which leaves zeros with their signs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.fake_quant.formats import BlockScaling, ElementFormat, ScaleRule
from megatron.fake_quant.rounding import BIAS, MANTISSA_BITS
from megatron.fake_quant.scales import Scales

NAN_BYTE = 255
_MAX_BYTE = 254
_HALF_POWER_BITS = 1 << (MANTISSA_BITS - 1)  #: 2^-127, half the smallest normal float32
_QUIET_NAN_BITS = 0x7FC00000
_ULP = math.ldexp(1, -24)  #: spacing of float32 in [0.5, 1), where frexp puts significands

#: For each rule the significand in [0.5, 1) of the block maximum from which on the scale is one
#: power of two larger than the floor rule of OCP v1.0 section 6.3 has it.
CARRY_FROM: dict[ScaleRule, Callable[[ElementFormat], float]] = {
    # Never: the block's largest power of two lands on the element's, what lies above the element's
    # maximum saturates.
    "floor": lambda element: 1.0,
    # Anything but a power of two: ceil(log2 amax) - emax.
    "ceil": lambda element: 0.5 + _ULP,
    # Beyond the element's maximum: the smallest scale at which nothing saturates, arXiv 2506.08027.
    "rceil": lambda element: math.frexp(element.max)[0] + _ULP,
    # What rounds, half up, to the next power of two when it keeps the element's significand bits.
    "even": lambda element: 1.0 - math.ldexp(1, -2 - element.mantissa_bits),
}


def scale_bytes(amax: Tensor, element: ElementFormat, rule: ScaleRule) -> Tensor:
    """E8M0 bytes (int32, same shape) for the block maxima `amax` (float32, >= 0, NaN or Inf).

    Out of range exponents saturate at the ends, 2^-127 and 2^127.
    """
    significand, exponent = torch.frexp(amax)
    carry = significand >= CARRY_FROM[rule](element)
    byte = (exponent - 1 - element.emax + BIAS + carry.int()).clamp(0, _MAX_BYTE)
    # frexp leaves the exponent of Inf and NaN open; zero has none.
    return byte.masked_fill(amax == 0, 0).masked_fill(~amax.isfinite(), NAN_BYTE)


def scale_values(byte: Tensor) -> Tensor:
    """The float32 numbers 2^(byte - 127) that E8M0 bytes (int32) stand for; 255 is NaN."""
    bits = (byte << MANTISSA_BITS).masked_fill(byte == 0, _HALF_POWER_BITS)
    return bits.masked_fill(byte == NAN_BYTE, _QUIET_NAN_BITS).view(torch.float32)


def scale_reciprocals(byte: Tensor) -> Tensor:
    """The float32 numbers 2^(127 - byte); 255 is NaN."""
    return scale_values((_MAX_BYTE - byte).masked_fill(byte == NAN_BYTE, NAN_BYTE))


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling
) -> tuple[Tensor, Scales]:
    """Blocks in the range of their elements, and a byte a block."""
    byte = scale_bytes(blocks.abs().amax(-1), element, scaling.rule)
    return blocks * scale_reciprocals(byte).unsqueeze(-1), Scales(byte.to(torch.uint8))


def scale_up(elements: Tensor, scales: Scales) -> Tensor:
    """Undo `scale_down`."""
    return elements * scale_values(scales.block().int()).unsqueeze(-1)
