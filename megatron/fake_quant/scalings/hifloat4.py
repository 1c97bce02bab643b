"""Compute HiFloat4's three levels of scales for 64 values (arXiv 2602.11287, algorithm 1).

    value = E6M2 * 2^(e8 + e16) * element

E6M2 is an unsigned scale 2^(e - 48) * (1 + m / 4) from 2^-48 to 1.5 * 2^15. There is one bit e8 per
8 neighboring values and one bit e16 per 4. An element is a sign and a multiple of 1/4 up to 1.75.
Let a be the largest magnitude of the group of 64, a8 the largest of 8 neighbors, and a4 the largest
of 4:

    E6M2 = a / 7, computed as bf16(a * bf16(1/7)) and rounded to E6M2, to nearest even
    R    = bf16(1 / E6M2)
    e8   = 1 if a8 * R >= 4
    e16  = 1 if a4 * R / 2^e8 >= 2
    element: |x| * R / 2^(e8 + e16), rounded to nearest, ties away from zero, at most 1.75

The products are exact here (in float64), as in the authors' numpy script. Their torch version
rounds the products to float32. For float32 data this can break a tie the other way; for bf16 data
both agree.

R is not the exact inverse of E6M2 unless E6M2 is a power of two. This has two consequences, both of
which belong to the algorithm. A value of the format may change to a neighboring value when it is
quantized again. The mean of stochastic rounding is x * R * E6M2, which is up to 2^-9 away from x.

Four bytes are stored per group: E6M2 (e * 4 + m; 255 is NaN), e8, and two bytes of e16, with the
first neighbors in the highest bit. A NaN or an Inf makes its group NaN; a group of zeros has the
smallest scale. A group's largest values saturate if they exceed 7 * 49152.
"""

import torch
from torch import Tensor

from megatron.fake_quant.elements import S1P2, ElementFormat
from megatron.fake_quant.float32_bits import BIAS, MANTISSA_BITS, power_of_two_bits
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape
from megatron.fake_quant.special_scalings import GroupScaling

NAN_BYTE = 255
_BIAS = 48
_LARGEST_BYTE = 254
_SEVENTH = float(torch.tensor(1 / 7, dtype=torch.bfloat16, device="cpu"))
#: bf16(1 / (1 + m / 4)) for m = 0, 1, 2 and 3. Their products with powers of two are exact.
_RECIPROCALS = (
    (1 / (1 + torch.arange(4, dtype=torch.float32, device="cpu") / 4)).bfloat16().double()
)
_BITS = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device="cpu")


def _e6m2_bytes(amax: Tensor) -> Tensor:
    """Return the E6M2 scale bytes (int32) of groups, given their maxima `amax` (float32)."""
    # This product is exact in float64. It is rounded to 8 significant bits (bf16), then to 3.
    significand, exponent = torch.frexp(amax.double() * _SEVENTH)
    eight_bits = (significand * 256).round_()
    quarters = (eight_bits / 32).round_().int()  # 4 .. 8
    byte = (exponent - 1 + _BIAS) * 4 + quarters - 4
    byte = byte.clamp_(0, _LARGEST_BYTE).masked_fill_(amax == 0, 0)
    return byte.masked_fill_(~amax.isfinite(), NAN_BYTE)


def _e6m2_values(byte: Tensor) -> Tensor:
    """Return the float32 numbers that E6M2 bytes (int32) stand for."""
    bits = power_of_two_bits(-_BIAS) + (byte << (MANTISSA_BITS - 2))
    return bits.view(torch.float32).masked_fill(byte == NAN_BYTE, torch.nan)


def _e6m2_reciprocals(byte: Tensor) -> Tensor:
    """Return R = bf16(1 / E6M2), as float64, for the scales that E6M2 bytes (int32) encode.

    R is finite even for the NaN byte. `scale_up` makes the values of that group NaN.
    """
    mantissa = _RECIPROCALS.to(byte.device)[(byte & 3).long()]
    power = ((_BIAS - (byte >> 2) + BIAS) << MANTISSA_BITS).view(torch.float32)
    return mantissa * power


def _group_scales(blocks: Tensor) -> Tensor:
    """Return the four scale bytes of each group: one E6M2 byte and three of exponent bits."""
    amax = blocks.abs().amax(-1)
    e6m2 = _e6m2_bytes(amax)
    finite = blocks.abs().masked_fill(~amax.isfinite().unsqueeze(-1), 0).double()
    scaled = finite * _e6m2_reciprocals(e6m2).unsqueeze(-1)
    fours = torch.unflatten(scaled, -1, (16, 4)).amax(-1)
    e8 = torch.unflatten(fours, -1, (8, 2)).amax(-1) >= 4
    e16 = torch.where(e8.repeat_interleave(2, -1), fours / 2, fours) >= 2
    bits = torch.unflatten(torch.cat([e8, e16], dim=-1), -1, (3, 8)).to(torch.uint8)
    packed = (bits * _BITS.to(bits.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([e6m2.to(torch.uint8).unsqueeze(-1), packed], dim=-1)


def _exponents(scales: Tensor) -> Tensor:
    """Return e8 + e16, the sum of the two exponent bits, for each of a group's 64 values, as int32.

    e8 is the bit shared by 8 values, and e16 is the bit shared by 4.
    """
    bits = (scales[..., 1:].unsqueeze(-1) & _BITS.to(scales.device)) > 0
    e8, e16 = bits.flatten(-2).int().tensor_split([8], dim=-1)
    return (e8.repeat_interleave(2, -1) + e16).repeat_interleave(4, -1)


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: GroupScaling
) -> tuple[Tensor, Scales]:
    """Return the groups scaled to the range of the element type, and four scale bytes per group.

    The exact products can have more bits than float32. They are truncated, not rounded, so that a
    value halfway between two elements stays there, and a value below the midpoint stays below it.
    """
    stored = _group_scales(blocks)
    reciprocal = _e6m2_reciprocals(stored[..., 0].int()).unsqueeze(-1)
    exact = blocks.double() * reciprocal / (1 << _exponents(stored))
    rounded = exact.float()
    beyond = rounded.double().abs() > exact.abs()
    cut = (rounded.view(torch.int32) - beyond.int()).view(torch.float32)
    return cut, Scales(stored)


def scale_up(elements: Tensor, scales: Scales, scaling: GroupScaling) -> Tensor:
    """Multiply the elements by their scales; the products are exact in float32."""
    stored = scales.block()
    e6m2 = _e6m2_values(stored[..., 0].int()).unsqueeze(-1)
    powers = (1 << _exponents(stored)).float()
    return elements * (e6m2 * powers)


def stored_scales(scaling: GroupScaling) -> Tensor:
    """Return 512 factors: 256 (one per E6M2 byte) with all exponent bits 0, then 256 with all 1."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    extremes = torch.tensor([0, 255], dtype=torch.uint8, device="cpu").repeat_interleave(256)
    stored = torch.stack([byte.repeat(2), *[extremes] * 3], dim=-1)
    return scale_up(
        torch.ones(512, scaling.size, dtype=torch.float32, device="cpu"), Scales(stored), scaling
    )[:, 0]


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each group in histograms: its E6M2 byte, the first one."""
    return stored[..., 0]


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest",) if device == "cpu" and fmt.element == S1P2 else ()


def describe(fmt: Format, scaling: GroupScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the three levels of scales."""
    return ScaleDescription(
        "HiFloat4, arXiv 2602.11287 algorithm 1",
        f"E6M2 per {scaling.size} values, plus 1 bit per 8 and 1 bit per 4",
        f"{block_shape(fmt)}, E6M2; one bit of exponent for each 8 of them, one for each 4",
        (
            (
                "found",
                "amax / 7 rounded to E6M2; the bit of 8 values is set if their amax is at least 4 "
                "scales, and then that of 4 values if theirs is at least 2 scales",
            ),
        ),
        range_note=", with the two bits",
    )
