"""Compute the shared microexponents of MX9 and MX6 (arXiv 2302.08007).

A block of 16 values shares an 8-bit exponent E, and each pair of neighbors has one bit d:

    E      = floor(log2 a)      a is the largest magnitude of the block
    d      = 1 if both magnitudes of the pair are below 2^E
    scale  = 2^(E - d)
    element: x / scale, rounded to nearest even and clamped

An element is a multiple of 1/64 up to 127/64 in MX9 and a multiple of 1/8 up to 15/8 in MX6. It is
stored in two's complement without the lowest code, like an element of MXINT8.

The paper leaves several points open. They are decided as in AMD's ALTO, whose codes and bytes are
reproduced bit for bit for finite values:

- The step between neighboring values is at least 2^-126, the smallest normal float32. A scale
  therefore does not fall below 2^-120 in MX9 and 2^-123 in MX6, whatever E and d are.
- E of a subnormal or zero maximum is -127, and its pairs have d = 0.
- A value that rounds beyond the largest element is clamped to it, even where d = 1.

ALTO has no code for NaN and clamps an Inf. Here, as in MX, either one makes its block NaN.

Two bytes are stored per block: E + 127 (255 for NaN), and the bits d with the first pair in the
lowest bit.
"""

import torch
from torch import Tensor

from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.float32_bits import BIAS, MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape
from megatron.fake_quant.scalings.mx import NAN_BYTE, scale_reciprocals, scale_values
from megatron.fake_quant.special_scalings import PairScaling

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")


def _exponent_fields(magnitudes: Tensor) -> Tensor:
    """Return the biased exponents of float32 magnitudes; they are 255 for NaN and Inf."""
    return magnitudes.view(torch.int32) >> MANTISSA_BITS


def _scale_bytes(stored: Tensor, scaling: PairScaling) -> Tensor:
    """Return the E8M0 byte (int32) of each value's scale, given the bytes stored per block."""
    shared, bits = stored[..., :1].int(), stored[..., 1:]
    lower = ((bits & _BITS.to(bits.device)) > 0).int()
    byte = (shared - lower).clamp_(min=scaling.lowest + BIAS)
    return byte.masked_fill_(shared == NAN_BYTE, NAN_BYTE).repeat_interleave(2, -1)


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: PairScaling
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the range of the element type, and two scale bytes per block."""
    pairs = torch.unflatten(blocks.abs(), -1, (-1, 2)).amax(-1)
    shared = _exponent_fields(pairs.amax(-1, keepdim=True))
    lower = (_exponent_fields(pairs) < shared).to(torch.uint8)
    bits = (lower * _BITS.to(lower.device)).sum(-1, keepdim=True, dtype=torch.uint8)
    stored = torch.cat([shared.to(torch.uint8), bits], dim=-1)
    return blocks * scale_reciprocals(_scale_bytes(stored, scaling)), Scales(stored)


def scale_up(elements: Tensor, scales: Scales, scaling: PairScaling) -> Tensor:
    """Multiply the elements by the scales of their pairs, which undoes `scale_down`."""
    return elements * scale_values(_scale_bytes(scales.block(), scaling))


def stored_scales(scaling: PairScaling) -> Tensor:
    """Return 512 factors: 256 (one per exponent byte) with all pair bits 0, then 256 with all 1."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").repeat(2)
    bits = torch.tensor([0, 255], dtype=torch.uint8, device="cpu").repeat_interleave(256)
    scales = Scales(torch.stack([byte, bits], dim=-1))
    return scale_up(
        torch.ones(512, scaling.size, dtype=torch.float32, device="cpu"), scales, scaling
    )[:, 0]


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each block in histograms: that of the shared exponent."""
    return stored[..., 0]


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic")


def describe(fmt: Format, scaling: PairScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the block's shared exponent and of the exponent bits of pairs."""
    return ScaleDescription(
        "shared microexponents, arXiv 2302.08007, as AMD's ALTO computes them",
        f"E8M0 per {scaling.size} values, minus 1 bit of exponent per 2",
        f"{block_shape(fmt)}, E8M0; one bit of exponent for each 2 of them",
        (
            (
                "found",
                "2^floor(log2 amax), half of it for a pair whose magnitudes are both below it; "
                f"at least 2^{scaling.lowest}",
            ),
        ),
        range_note=", with the bit of the pair",
    )
