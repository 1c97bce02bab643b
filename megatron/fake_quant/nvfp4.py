"""NVFP4's two levels of scales: an E4M3 number a block, under one float32 number for the tensor.

arXiv 2509.25149, appendix B. With a, the largest magnitude of the tensor, and b, that of a block:

    encode = 6 * 448 / a            takes the tensor's largest value to the largest of the format
    decode = 1 / encode
    s      = E4M3(b * (encode / 6)) the block's scale, saturating at 448
    code   = E2M1(x * m)            m = 1 / (s * decode)
    value  = (code * s) * decode    the first product is exact

each operation rounded to float32, in the order of Transformer Engine, which multiplies by
float32(1/6): its kernels' codes and scales are reproduced bit for bit for finite tensors. The paper
writes b / 6 * encode, which differs in the last bit now and then.

Where an s underflows to 0 its block becomes zeros; m is held at the largest float32, so that the
codes stored beside it are not NaN. A tensor of zeros has encode = 1.

What Transformer Engine does not define is as for MX: a NaN or an Inf makes its block NaN, by the
NaN code of E4M3, and is left out of a. (There, one NaN makes every block's scale NaN.)

Note for tensor parallelism: a is taken over what `fake_quantize` is given, a shard for a weight.
"""

import torch
from torch import Tensor

from megatron.fake_quant.code_points import decode, encode
from megatron.fake_quant.formats import E2M1, E4M3, ElementFormat, TwoLevelScaling
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import Scales
from megatron.fake_quant.tensor_scale import FLOAT32_MAX, divide_by, finite_amax

LARGEST = E2M1.max * E4M3.max
SIXTH = torch.tensor(1 / E2M1.max, dtype=torch.float32)
E4M3_NAN = 0x7F


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: TwoLevelScaling
) -> tuple[Tensor, Scales]:
    """Blocks in the range of their elements, E4M3 bytes a block, and `decode`."""
    whole = divide_by(finite_amax(blocks), LARGEST)
    amax = blocks.abs().amax(-1)
    block_scales = round_to(amax * (whole * SIXTH.to(whole.device)), E4M3)
    codes = encode(block_scales, E4M3).masked_fill_(~amax.isfinite(), E4M3_NAN)
    scales = Scales(codes, whole.reciprocal())
    multiplier = (block_scales * scales.whole()).reciprocal_().clamp_(max=FLOAT32_MAX)
    return blocks * multiplier.unsqueeze(-1), scales


def scale_up(elements: Tensor, scales: Scales) -> Tensor:
    """Back to the tensor's range."""
    return elements * decode(scales.block(), E4M3).unsqueeze(-1) * scales.whole()
