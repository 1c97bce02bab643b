"""Implement every format in plain torch operations, as the reference for the fused kernels.

`split` takes a tensor apart into element values and scales, and `join` puts it together again.
`fake_quantize` does both; `packing.py` stores the parts in between. All arithmetic is float32. Each
step is either exact or one correctly rounded operation, and sums (in `float8_scales.py`) have a
fixed order, so the result is the same on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.fake_quant import eden, scalings
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.elements import Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.random_bits import random_bits
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import Scales
from megatron.fake_quant.scalings.tensor_scale import check_amax_value


def split(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Quantize `x`; return its elements as float32 blocks (see `BlockLayout`), and its scales.

    Args:
        x: tensor of a dtype that `fake_quantize` accepts.
        fmt: format other than a cast.
        layout: positions of the blocks in `x`.
        seed: seed of stochastic rounding; None for other rounding modes.
        amax: number from which the scale of the whole tensor is computed; None for its own amax.
    """
    blocks, scales = scale_down(x, fmt, layout, amax=amax)
    rounded = [
        round_blocks(blocks, x, fmt, layout, seed, element=element) for element in fmt.elements
    ]
    elements = choose(rounded, fmt, scales)
    return elements, final_scales(scales, blocks, elements, fmt, seed)


def choose(results: Sequence[Tensor], fmt: Format, scales: Scales) -> Tensor:
    """Select, for each block, the values that were rounded to the block's element type.

    Args:
        results: one tensor of blocks for each of `fmt.elements`.
        fmt: format.
        scales: scales of the blocks, which contain the choice.
    """
    if len(results) == 1:
        return results[0]
    assert fmt.scaling is not None
    chosen = scalings.alternative_chosen(scales, fmt.scaling).unsqueeze(-1)
    return torch.where(chosen, results[1], results[0])


def final_scales(
    scales: Scales, blocks: Tensor, elements: Tensor, fmt: Format, seed: int | None
) -> Scales:
    """Return the scales to store, which some rounding modes correct after values are rounded.

    Args:
        scales: scales of the blocks, as `scale_down` returns them.
        blocks: scaled blocks, as `scale_down` returns them.
        elements: rounded blocks.
        fmt: format.
        seed: seed of stochastic rounding; None for other rounding modes.
    """
    if not fmt.corrects_scales:
        return scales
    assert seed is not None
    return eden.corrected(blocks, elements, scales, seed)


def scale_down(
    x: Tensor, fmt: Format, layout: BlockLayout, *, amax: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Return `x` as float32 blocks that are scaled to the element type's range, and the scales.

    The scale of the whole tensor, if any, is computed from `amax` or, if `amax` is None, from the
    tensor's own amax.

    Raises:
        ValueError: if the format needs an amax and there is none; see `check_amax_value`.
    """
    check_amax_value(fmt, amax)
    blocks = layout.to_blocks(x.float())
    if fmt.scaling is None:
        return blocks, Scales()
    given = {} if amax is None else {"amax": amax.to(x.device)}
    return scalings.module_of(fmt.scaling).scale_down(blocks, fmt.element, fmt.scaling, **given)


def round_blocks(
    blocks: Tensor,
    x: Tensor,
    fmt: Format,
    layout: BlockLayout,
    seed: int | None,
    *,
    element: Element | None = None,
) -> Tensor:
    """Round the blocks that `scale_down` returned for `x` to the element type of `fmt`.

    Args:
        element: element type that replaces that of `fmt`.

    Raises:
        ValueError: if the element type does not have the format's rounding mode.
    """
    element = element or fmt.element
    assert not element.is_cast
    random = None
    if seed is not None and not fmt.corrects_scales:
        random = layout.to_blocks(random_bits(tuple(x.shape), seed, x.device))
    source = x.dtype if fmt.scaling is None else torch.float32
    return round_to(blocks, element, fmt.rounding, random=random, source=source)


def join(elements: Tensor, scales: Scales, fmt: Format, layout: BlockLayout) -> Tensor:
    """Return the float32 tensor, in its original shape, that elements and scales stand for."""
    if fmt.scaling is not None:
        elements = scalings.module_of(fmt.scaling).scale_up(elements, scales, fmt.scaling)
    return layout.from_rows(layout.from_blocks(elements))


def store(values: Tensor, out: Tensor) -> Tensor:
    """Round `values` to the dtype of `out`, write them to `out`, and return `out`.

    Every NaN is written with the same bits, because torch's conversions write different bits,
    depending on the length of the tensor.
    """
    out.copy_(values)
    return out.masked_fill_(out.isnan(), torch.nan)


def fake_quantize(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize a non-empty tensor; see `megatron.fake_quant.fake_quantize`."""
    if fmt.element.is_cast:
        values = x.to(fmt.element.dtype)
    else:
        values = join(*split(x, fmt, layout, seed, amax=amax), fmt, layout)
    return store(values, torch.empty_like(x))
