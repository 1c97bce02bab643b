"""One float32 scale for a whole tensor, from its own largest magnitude ("current scaling").

    encode = target / a, held to normal float32 numbers; 1 where a is 0
    decode = 1 / encode
    value  = round(x * encode) * decode

each operation rounded to float32: what Transformer Engine computes for per-tensor FP8, with the
element's largest number as target. With `power_of_two` encode loses its mantissa, as under
Transformer Engine's `force_pow_2_scales`. Ascend scales HiFloat8 tensors to 15 (inputs, weights)
and 224 (gradients).

a is the largest finite magnitude. A NaN stays a NaN and an Inf saturates, without a say in the
scale of the others; Transformer Engine takes 1 for the scale where it meets an Inf.
"""

import torch
from torch import Tensor

from megatron.fake_quant.formats import Element, TensorScaling
from megatron.fake_quant.rounding import INFINITY, MAGNITUDE
from megatron.fake_quant.scales import Scales

SMALLEST_NORMAL, FLOAT32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def finite_amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of float32 `x`, 0 if there is none; no dimensions."""
    magnitude = x.view(torch.int32) & MAGNITUDE
    return magnitude.masked_fill_(magnitude >= INFINITY, 0).amax().view(torch.float32)


def divide_by(amax: Tensor, target: float) -> Tensor:
    """target / amax, 2^-126 at least and the largest float32 at most; 1 where amax is 0.

    A subnormal quotient (of a target below 4) might have no finite reciprocal.
    Not the operator: torch has a number over a tensor as a multiplication by the reciprocal, which
    rounds twice.
    """
    quotient = torch.div(torch.full_like(amax, target), amax).clamp_(SMALLEST_NORMAL, FLOAT32_MAX)
    return torch.where(amax == 0, torch.ones_like(quotient), quotient)


def encode_scale(amax: Tensor, scaling: TensorScaling) -> Tensor:
    """What the tensor is multiplied by before rounding, from its largest finite magnitude."""
    scale = divide_by(amax, scaling.target)
    if scaling.power_of_two:
        scale = (scale.view(torch.int32) & INFINITY).view(torch.float32)
    return scale


def scale_down(blocks: Tensor, element: Element, scaling: TensorScaling) -> tuple[Tensor, Scales]:
    """The tensor in the range of its elements, and `decode`."""
    encode = encode_scale(finite_amax(blocks), scaling)
    return blocks * encode, Scales(tensor=encode.reciprocal())


def scale_up(elements: Tensor, scales: Scales) -> Tensor:
    """Multiply by `decode`."""
    return elements * scales.whole()
