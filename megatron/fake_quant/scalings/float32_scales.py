"""Compute float32 block scales, as in FP8 with blocks of 128 values or with one scale per row.

Let b be the largest magnitude of a block and top the largest number of the element type times the
headroom:

    encode = top / b, clamped to normal float32 numbers; 1 if b is 0
    decode = 1 / encode             the stored scale
    value  = element(x * encode) * decode

Each operation is rounded to float32, in the order of Transformer Engine's Float8BlockScaling with
float32 scales. torchao's row-wise scales are the same numbers, except that torchao raises b to at
least 1e-12.

For blocks below 1.3e-36, encode is the largest float32; Transformer Engine takes the largest
bfloat16 if the tensor has that dtype.

A NaN or an Inf makes its block NaN, by a NaN scale. Transformer Engine does not define this case.
"""

import torch
from torch import Tensor

from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import E4M3, E5M2, ElementFormat
from megatron.fake_quant.float32_bits import MANTISSA_BITS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape
from megatron.fake_quant.scalings.mx import scale_values
from megatron.fake_quant.scalings.tensor_scale import divide_by

_EXPONENT = 255  #: mask of float32's exponent field, after a shift to bit 0


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the element type's range, and one float32 scale per block."""
    amax = blocks.abs().amax(-1)
    encode = divide_by(amax, (scaling.top or element.max) * scaling.share)
    encode.masked_fill_(~amax.isfinite(), torch.nan)
    return blocks * encode.unsqueeze(-1), Scales(encode.reciprocal())


def scale_up(elements: Tensor, scales: Scales, scaling: BlockScaling) -> Tensor:
    """Multiply the elements by the scales of their blocks, which undoes `scale_down`."""
    return elements if scaling.apart else elements * scales.block().unsqueeze(-1)


def stored_scales(scaling: BlockScaling) -> Tensor:
    """Return, for each byte from `histogram_bytes`, the smallest scale that it represents."""
    return scale_values(torch.arange(256, dtype=torch.int32, device="cpu"))


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each scale in histograms: its exponent field."""
    return (stored.view(torch.int32) >> MANTISSA_BITS & _EXPONENT).to(torch.uint8)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic") if fmt.element.ties == "even" else ()


def _source(scaling: BlockScaling, element: ElementFormat) -> str:
    """Return text that names the definition of the scales and a package that computes them."""
    plain = element in (E4M3, E5M2) and (scaling.top, scaling.headroom) == (None, "1")
    if plain and scaling.shape_name in ("1 x 128", "128 x 128"):
        return "FP8 blocks, arXiv 2412.19437 section 3.3, as Transformer Engine computes it"
    if plain and scaling.shape_name == "row":
        return "FP8 with float32 scales per row, as torchao computes it"
    return "float32 scales, in the order of Transformer Engine's FP8 blocks (arXiv 2412.19437)"


def describe(fmt: Format, scaling: BlockScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the float32 scale of each block."""
    reached = f"{scaling.top or element.max:g}"
    reached += "" if scaling.headroom == "1" else f" x {scaling.headroom}"
    return ScaleDescription(
        _source(scaling, element),
        f"float32 per {brief_shape(fmt)} values",
        f"{block_shape(fmt)}, float32",
        (("found", f"1 / ({reached} / amax of the block)"),),
    )
