"""Compute NVFP4's two levels of scales: one E4M3 scale per block and a float32 scale per tensor.

The definition is in arXiv 2509.25149, appendix B. Let a be the largest magnitude of the tensor, and
b the largest magnitude of a block:

    encode = 6 * 448 / a            maps the tensor's largest value to the format's largest number
    decode = 1 / encode
    s      = E4M3(b * (encode / 6)) the block's scale, saturating at 448
    code   = E2M1(x * m)            m = 1 / (s * decode)
    value  = (code * s) * decode    the first product is exact

Each operation is rounded to float32, in the order of Transformer Engine, which multiplies by
float32(1/6). The codes and scales of its kernels are reproduced bit for bit for finite tensors. The
paper writes b / 6 * encode, which sometimes differs in the last bit.

If s underflows to 0, its block becomes zeros; m is clamped to the largest float32, so that the
codes of the block are not NaN. A tensor of zeros has encode = 1.

Transformer Engine does not define the result for NaN and Inf. Here, as in MX, either one makes its
block NaN, by the NaN code of E4M3, and is ignored when a is computed. (In Transformer Engine, one
NaN makes every block's scale NaN.)

With tensor parallelism, a is the maximum of the tensor that `fake_quantize` receives, which for a
weight is a shard.
"""

import torch
from torch import Tensor

from megatron.fake_quant.code_points import decode, encode
from megatron.fake_quant.formats import E2M1, E4M3, ElementFormat, Format, TwoLevelScaling
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape
from megatron.fake_quant.tensor_scale import FLOAT32_MAX, divide_by, finite_amax

SIXTH = torch.tensor(1 / E2M1.max, dtype=torch.float32)
E4M3_NAN = 0x7F


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: TwoLevelScaling
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the element type's range, and the scales of both levels."""
    whole = divide_by(finite_amax(blocks), scaling.target)
    amax = blocks.abs().amax(-1)
    block_scales = round_to(amax * (whole * SIXTH.to(whole.device)), E4M3)
    codes = encode(block_scales, E4M3).masked_fill_(~amax.isfinite(), E4M3_NAN)
    scales = Scales(codes, whole.reciprocal())
    multiplier = (block_scales * scales.whole()).reciprocal_().clamp_(max=FLOAT32_MAX)
    return blocks * multiplier.unsqueeze(-1), scales


def scale_up(elements: Tensor, scales: Scales) -> Tensor:
    """Multiply the elements by both levels of scales, which undoes `scale_down`."""
    return elements * decode(scales.block(), E4M3).unsqueeze(-1) * scales.whole()


def stored_scales(scaling: TwoLevelScaling) -> Tensor:
    """Return the factor that each scale byte stands for, without the tensor's scale."""
    byte = torch.arange(256, dtype=torch.uint8)
    return scale_up(torch.ones(256, 1), Scales(byte, torch.ones(())))[:, 0]


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic") if fmt.element.ties == "even" else ()


def describe(fmt: Format, scaling: TwoLevelScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the two levels of scales."""
    return ScaleDescription(
        "NVFP4, arXiv 2509.25149 appendix B, as Transformer Engine computes it",
        f"E4M3 per {brief_shape(fmt)} values, float32 per tensor",
        f"{block_shape(fmt)}, E4M3; and of the tensor, float32",
        (
            (
                "found",
                f"amax / {E2M1.max:g} of the block, times {E2M1.max:g} x {E4M3.max:g} = "
                f"{scaling.target:g} / amax of the tensor, rounded to E4M3",
            ),
        ),
    )
