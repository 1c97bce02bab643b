"""Compute the scales of NF4 (arXiv 2305.14314): the largest magnitude of a block, in float32.

    scale = a                       a is the largest magnitude of 64 values
    code  = position of x * (1 / a) in the table of 16 numbers from -1 to 1, to the nearest
    value = table[code] * a

Each operation is rounded to float32, in the order of bitsandbytes. As in its kernels, the
thresholds are the midpoints between neighboring numbers, rounded to float32. A value on a threshold
becomes the lower number. The scales are not quantized in turn ("double quantization").

NF4 is a format for weights. It has no stochastic rounding. Zero has one code, so a negative zero
becomes a positive one.

Three points that bitsandbytes leaves undefined are decided here. A block with a NaN or an Inf
becomes NaN as a whole. A block of zeros becomes zeros. If 1 / a is beyond float32, x is divided by
a instead.
"""

import torch
from torch import Tensor

from megatron.fake_quant.elements import TableElement
from megatron.fake_quant.float32_bits import MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape
from megatron.fake_quant.scalings.mx import scale_values
from megatron.fake_quant.special_scalings import AbsmaxScaling


def scale_down(
    blocks: Tensor, element: TableElement, scaling: AbsmaxScaling
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to magnitudes up to 1, and one float32 scale per block."""
    amax = blocks.abs().amax(-1, keepdim=True)
    amax.masked_fill_(~amax.isfinite(), torch.nan)
    reciprocal = amax.reciprocal()
    scaled = blocks * reciprocal
    beyond = reciprocal.isinf()
    if beyond.any():
        scaled = torch.where(beyond, (blocks / amax).nan_to_num_(0.0), scaled)
    return scaled, Scales(amax.squeeze(-1))


def scale_up(elements: Tensor, scales: Scales, scaling: AbsmaxScaling) -> Tensor:
    """Multiply the elements by the scales of their blocks."""
    return elements * scales.block().unsqueeze(-1)


def stored_scales(scaling: AbsmaxScaling) -> Tensor:
    """Return, for each byte from `histogram_bytes`, the smallest scale that it represents."""
    return scale_values(torch.arange(256, dtype=torch.int32, device="cpu"))


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each scale in histograms: its exponent field."""
    return (stored.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest",) if device == "cpu" and fmt.element.name == "nf4" else ()


def describe(fmt: Format, scaling: AbsmaxScaling, element: TableElement) -> ScaleDescription:
    """Return a description of the float32 scales."""
    return ScaleDescription(
        "NF4 of QLoRA, arXiv 2305.14314, as bitsandbytes computes it",
        f"float32 per {brief_shape(fmt)} values",
        f"{block_shape(fmt)}, float32",
        (("found", "amax of the block; values are multiplied by 1 / amax in float32"),),
    )
