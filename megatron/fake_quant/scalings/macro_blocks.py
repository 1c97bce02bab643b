"""Compute MX scales with one mantissa per macro block of 128 values (arXiv 2603.08713).

The values of a macro block are multiplied by a factor f from 1 to 2 - 1/256, which moves the
largest of them to the top of the element type. Blocks of 32 values are then quantized as in MX. Let
a be the largest magnitude of the macro block, at least 1e-12:

    f     = 1 + k / 256             k is the first 8 bits of the mantissa of float32(6 / a)
    scale = E8M0 of each block of x * f, by the format's rule
    value = element(x * f / scale) * scale / f

Each operation is rounded to float32. This is ALTO's macro-block scaling of float32 tensors, except
that ALTO's torch code rounds 6 / a twice. For bfloat16 tensors, ALTO rounds f and the products to
bfloat16. The rule is that of ALTO's MXFP4 kernels: `even`, or in overflow-aware scaling (OAS) the
smallest power of two at which no magnitude exceeds 7.25.

Two points are decided here. A NaN or an Inf makes its macro block NaN. If a * f is beyond float32,
f is 1.

Five bytes are stored per macro block: the E8M0 bytes of its four blocks, and k.
"""

import torch
from torch import Tensor

from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import E2M1, ElementFormat
from megatron.fake_quant.float32_bits import MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape
from megatron.fake_quant.scalings import mx
from megatron.fake_quant.special_scalings import MacroScaling

SMALLEST = 1e-12
STEPS = 256


def block_scaling(scaling: MacroScaling) -> BlockScaling:
    """Return the scaling of the blocks in a macro block."""
    return BlockScaling(scaling.size // scaling.blocks, scaling.rule, top=scaling.top)


def _factors(mantissa: Tensor) -> Tensor:
    """Return the factor f = 1 + k / 256 of each macro block; `mantissa` holds the integers k."""
    return 1 + mantissa.float().unsqueeze(-1) / STEPS


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: MacroScaling
) -> tuple[Tensor, Scales]:
    """Return the macro blocks scaled to the element type's range, and five bytes for each."""
    amax = blocks.abs().amax(-1)
    quotient = torch.div(torch.full_like(amax, E2M1.max), amax.clamp(min=SMALLEST))
    mantissa = quotient.view(torch.int32) >> (MANTISSA_BITS - 8) & (STEPS - 1)
    special = ~amax.isfinite()
    beyond = (amax * _factors(mantissa).squeeze(-1)).isinf()
    mantissa.masked_fill_(special | beyond, 0)
    parts = torch.unflatten(blocks * _factors(mantissa), -1, (scaling.blocks, -1))
    scaled, scales = mx.scale_down(parts, element, block_scaling(scaling))
    codes = scales.block().masked_fill(special.unsqueeze(-1), mx.NAN_BYTE)
    stored = torch.cat([codes, mantissa.to(torch.uint8).unsqueeze(-1)], dim=-1)
    return scaled.flatten(-2), Scales(stored)


def scale_up(elements: Tensor, scales: Scales, scaling: MacroScaling) -> Tensor:
    """Multiply elements by the scales of their blocks, and divide by their macro block's factor."""
    stored = scales.block()
    parts = torch.unflatten(elements, -1, (scaling.blocks, -1))
    values = mx.scale_up(parts, Scales(stored[..., :-1]), block_scaling(scaling))
    return values.flatten(-2) / _factors(stored[..., -1])


def stored_scales(scaling: MacroScaling) -> Tensor:
    """Return 512 factors scale / f: 256 (1 per E8M0 byte) with f = 1, then 256 with f = 2 - 1/256.

    2 - 1/256 is the largest f.
    """
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").repeat(2).unsqueeze(-1)
    mantissa = torch.tensor([0, STEPS - 1], dtype=torch.uint8, device="cpu").repeat_interleave(256)
    stored = torch.cat([byte.expand(-1, scaling.blocks), mantissa.unsqueeze(-1)], dim=-1)
    return scale_up(
        torch.ones(512, scaling.size, dtype=torch.float32, device="cpu"), Scales(stored), scaling
    )[:, 0]


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each macro block in histograms: its largest E8M0 byte."""
    return stored[..., :-1].amax(-1)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic") if device == "cpu" and fmt.element == E2M1 else ()


def describe(fmt: Format, scaling: MacroScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of both levels of scales."""
    size = scaling.size // scaling.blocks
    inner = block_scaling(scaling)
    rules = mx.describe(Format("mxfp4", element, inner), inner, element).found
    chosen = next(words for label, words in rules if label.endswith("*") and "rule" not in label)
    rule = f"{scaling.rule}, top {scaling.top:g}" if scaling.top is not None else scaling.rule
    return ScaleDescription(
        "macro-block scaling, arXiv 2603.08713, as AMD's ALTO computes it in float32",
        f"E8M0 per {size} values, {rule}; 8 bits of mantissa per {scaling.size}",
        f"{size} values, E8M0; and of {block_shape(fmt)}, a mantissa of 8 bits",
        (
            ("mantissa", f"that of {E2M1.max:g} / amax of {scaling.size} values; multiplies them"),
            ("found", chosen),
        ),
        range_note=", with the mantissa",
    )
