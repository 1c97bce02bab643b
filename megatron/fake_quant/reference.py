"""Every format in plain torch operations: the definition that the fused kernels are held to.

A tensor is taken apart into element values and scales (`split`) and put together again (`join`).
`fake_quantize` does both; what is stored in between is in `packing.py`. Everything is computed in
float32, each step is either exact or one correctly rounded operation, and none depends on an order
of summation: the result is the same on every device.
"""

import torch
from torch import Tensor

from megatron.fake_quant import hifloat4, mx, nvfp4, tensor_scale
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.formats import (
    BlockScaling,
    Cast,
    Format,
    GroupScaling,
    HiFloat8,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.hifloat8 import round_to_hifloat8
from megatron.fake_quant.random_bits import random_bits
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import Scales

#: Each scaling has a module with `scale_down` and `scale_up`.
_SCALINGS = {
    BlockScaling: mx,
    TwoLevelScaling: nvfp4,
    GroupScaling: hifloat4,
    TensorScaling: tensor_scale,
}


def split(x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None) -> tuple[Tensor, Scales]:
    """Return element values (float32, in blocks, see `BlockLayout`) and scales of a tensor.

    Args:
        x: of a dtype that `fake_quantize` takes.
        fmt: not a cast.
        layout: of `x`.
        seed: for stochastic rounding, else None.
    """
    blocks, scales = scale_down(x, fmt, layout)
    return round_blocks(blocks, x, fmt, layout, seed), scales


def scale_down(x: Tensor, fmt: Format, layout: BlockLayout) -> tuple[Tensor, Scales]:
    """Return the values as float32 blocks, scaled to the range of the elements, and the scales."""
    blocks = layout.to_blocks(x.float())
    if fmt.scaling is None:
        return blocks, Scales()
    scaled: tuple[Tensor, Scales] = _SCALINGS[type(fmt.scaling)].scale_down(
        blocks, fmt.element, fmt.scaling
    )
    return scaled


def round_blocks(
    blocks: Tensor, x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None
) -> Tensor:
    """Round the blocks that `scale_down` returned for `x` to the elements of `fmt`."""
    random = None
    if seed is not None:
        random = layout.to_blocks(random_bits(tuple(x.shape), seed, x.device))
    if isinstance(fmt.element, HiFloat8):
        source = x.dtype if fmt.scaling is None else torch.float32
        return round_to_hifloat8(blocks, fmt.element, fmt.rounding, source=source, random=random)
    assert not isinstance(fmt.element, Cast)
    return round_to(blocks, fmt.element, random)


def join(elements: Tensor, scales: Scales, fmt: Format, layout: BlockLayout) -> Tensor:
    """The float32 tensor, in its own order, that `split` took apart."""
    if fmt.scaling is not None:
        elements = _SCALINGS[type(fmt.scaling)].scale_up(elements, scales)
    return layout.from_rows(layout.from_blocks(elements))


def store(values: Tensor, out: Tensor) -> Tensor:
    """Round `values` to the dtype of `out`, into it. Every NaN becomes the same one: torch's own
    conversions give one or another, by the length of the tensor.
    """
    out.copy_(values)
    return out.masked_fill_(out.isnan(), torch.nan)


def fake_quantize(x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None) -> Tensor:
    """See `megatron.fake_quant.fake_quantize`; `x` is not empty."""
    if isinstance(fmt.element, Cast):
        values = x.to(fmt.element.dtype)
    else:
        values = join(*split(x, fmt, layout, seed), fmt, layout)
    return store(values, torch.empty_like(x))
