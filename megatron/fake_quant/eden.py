"""Correct block scales so that rounding to nearest is unbiased after a random rotation (MS-EDEN).

Stochastic rounding makes every value right on average, at the price of twice the squared error of
rounding to nearest. EDEN (arXiv 2206.12184) rotates a vector at random and rounds it to nearest.
On average over the rotations, this shrinks the vector by a factor, so EDEN scales the result to
undo the shrinkage. MS-EDEN of Quartet II (arXiv 2601.22813) does so in NVFP4, where the scales
absorb the factor:

    s, q   scales and codes of 128 neighbors, as in NVFP4, rounded to nearest; x = value / scale
    c      = sum x^2 / sum x q, over the 128 neighbors
    scale  = E4M3(s c), rounded stochastically, so that it is right on average

The outer scale maps the largest magnitude to a block scale of 255.99 instead of 448, which leaves
room for c > 1. The random rotation is not part of the format: it is the operands' Hadamard
transform of size 128 with `signs: random`.

The sums are computed in float64, in a fixed order, and c is rounded to float32. A block whose scale
is 0 or NaN keeps this scale and does not contribute to the sums. A scaled value that overflows,
which only a given amax far below the values can cause, counts as the largest float32 number. The
random bits of a scale depend on the seed and on the position of the block. If 128 does not divide
the axis, the last group is shorter.
"""

import torch
from torch import Tensor

from megatron.fake_quant.code_points import decode, encode
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.random_bits import random_bits
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.rounding_modes import EDEN_GROUP
from megatron.fake_quant.scales import Scales
from megatron.fake_quant.scalings.tensor_scale import FLOAT32_MAX


def corrected(blocks: Tensor, elements: Tensor, scales: Scales, seed: int) -> Scales:
    """Return the corrected scales, rounded stochastically.

    Args:
        blocks: blocks that are scaled to the range of the element type.
        elements: the same blocks, rounded to the element type.
        scales: E4M3 scales of the blocks.
        seed: seed of the rounding of the scales.
    """
    codes = scales.block()
    stored, wanted = decode(codes, E4M3), corrected_values(blocks, elements, scales)
    random = random_bits(tuple(codes.shape), seed, codes.device)
    rounded = encode(round_to(wanted, E4M3, "stochastic", random=random), E4M3)
    return Scales(torch.where(stored > 0, rounded, codes), scales.tensor)


def corrected_values(blocks: Tensor, elements: Tensor, scales: Scales) -> Tensor:
    """Return the corrected scales as float32 numbers, before they are rounded."""
    stored = decode(scales.block(), E4M3)
    ignored = ~(stored > 0).unsqueeze(-1)
    finite = blocks.clamp(-FLOAT32_MAX, FLOAT32_MAX)
    values, rounded = (part.masked_fill(ignored, 0.0).double() for part in (finite, elements))
    square, product = _group_sums(values * values), _group_sums(values * rounded)
    factor = torch.where(product == 0, 1.0, square / product).float()
    count = EDEN_GROUP // blocks.shape[-1]
    return stored * factor.repeat_interleave(count, -1)[..., : stored.shape[-1]]


def _group_sums(values: Tensor) -> Tensor:
    """Return the sum of each group of 128 values.

    The two halves of a group are added elementwise, again and again, until one number is left.
    """
    row = values.flatten(-2)
    row = torch.nn.functional.pad(row, (0, -row.shape[-1] % EDEN_GROUP))
    total = torch.unflatten(row, -1, (-1, EDEN_GROUP))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
