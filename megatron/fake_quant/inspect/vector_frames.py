"""Build blocks with known scales for the inputs of conformance vectors.

A frame is a block whose scale is known, because some of its values are fixed. Its other positions
are free for the values under test. A new scaling needs an entry in `_ANCHORS` and in `_FILLS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.fake_quant import scalings
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.elements import Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.special_scalings import ChoiceScaling, MacroScaling

MOST_VALUES = 1 << 14  #: number of values above which a vector has only some of its blocks
_WIDTH = 32  #: values per row if the format itself does not give a block size


@dataclass(frozen=True, slots=True)
class Frame:
    """Block with a known scale, and the positions in it that are free for values under test."""

    base: Tensor
    slots: tuple[int, ...]

    def fill(self, values: Tensor) -> Tensor:
        """Return as many copies of the block as needed, with `values` in the free positions."""
        count = -(-len(values) // len(self.slots))
        padded = torch.nn.functional.pad(values, (0, count * len(self.slots) - len(values)))
        blocks = self.base.repeat(count, 1)
        blocks[:, list(self.slots)] = padded.view(count, -1)
        return blocks


def width_of(fmt: Format) -> int:
    """Return the number of values in a row of a block; `_WIDTH` if the format does not set it."""
    size = fmt.block_size
    return _WIDTH if size is None or size == WHOLE_AXIS else size


def height_of(fmt: Format) -> int:
    """Return the number of rows of a block; 1 if the whole tensor is one block."""
    if fmt.one_block:
        return 1
    return _WIDTH if fmt.columns else fmt.height


def anchor_of(fmt: Format) -> float:
    """Return a block maximum that gives a scale of 1 (with some scale rules, up to 2)."""
    scaling, element = fmt.scaling, fmt.element
    if scaling is None:
        return element.max
    return _ANCHORS[scaling.method](scaling, element)


def _largest(scaling: Any, element: Element) -> float:
    """Return the anchor of most scalings: the largest number of a block with the scale 1."""
    return math.ldexp(element.max, scaling.finer_exponents)


def _quotient(scaling: BlockScaling, element: Element) -> float:
    """Return the number by which a scaling divides a block's maximum; it is the anchor."""
    return (scaling.top or element.max) * scaling.share


#: Functions that return the anchor of a scaling and an element type, by the scaling's `method`.
_ANCHORS: Mapping[str, Callable[[Any, Element], float]] = {
    "tensor": lambda scaling, element: min(scaling.target, element.max),
    "float8": _quotient,
    "float32": _quotient,
    **dict.fromkeys(
        ("mx", "hifloat4", "pair_exponents", "absmax", "element_choice", "macro_blocks"), _largest
    ),
}


def frame_of(fmt: Format, element: Element) -> Frame:
    """Return a block with a known scale in which the values have the element type `element`."""
    base = torch.zeros(width_of(fmt) * height_of(fmt))
    if fmt.scaling is None or fmt.block_size is None:
        return Frame(base, tuple(range(len(base))))
    base[0] = anchor_of(fmt)
    slots = _FILLS[fmt.scaling.method](fmt.scaling, base, element == fmt.element)
    return Frame(base, tuple(slots))


def _fill_nothing(scaling: Any, base: Tensor, first: bool) -> Iterable[int]:
    """Keep a block as it is, and return the free positions: all but that of the maximum."""
    return range(1, len(base))


def _fill_group(scaling: Any, base: Tensor, first: bool) -> Iterable[int]:
    """Return all positions except the first 8, which share a scale bit with the maximum."""
    return range(8, len(base))


def _fill_pairs(scaling: Any, base: Tensor, first: bool) -> Iterable[int]:
    """Set the neighbor of each free position to 1, which fixes the scale of the pair."""
    base[2::2] = 1
    return range(3, len(base), 2)


def _fill_macro_block(scaling: MacroScaling, base: Tensor, first: bool) -> Iterable[int]:
    """Begin each inner block with the maximum, and return all other positions as free."""
    step = len(base) // scaling.blocks
    base[::step] = base[0].clone()
    return (i for i in range(len(base)) if i % step)


def _fill_choice(scaling: ChoiceScaling, base: Tensor, first: bool) -> Iterable[int]:
    """Begin a block with 12 numbers of the format's first or alternative element type."""
    unit = 6 / 7 if scaling.shared else 1.0
    floats, integers = (6, 4, 3, 2, 1.5, 0.5), (7, 5, 3, 1, 7, 5)
    chosen = floats if first else [unit * n for n in integers]
    base[:12] = torch.tensor([*chosen, *(-x for x in chosen)])
    return (12, 13, 14, 15)


#: Functions that fill a block so that its scale is known whatever the free values are, by the
#: scaling's `method`. Each function changes the block in place and returns the free positions. Its
#: last argument is True if the free values have the format's first element type.
_FILLS: Mapping[str, Callable[[Any, Tensor, bool], Iterable[int]]] = {
    **dict.fromkeys(("mx", "float8", "float32", "absmax"), _fill_nothing),
    "hifloat4": _fill_group,
    "pair_exponents": _fill_pairs,
    "macro_blocks": _fill_macro_block,
    "element_choice": _fill_choice,
}


def matrix(blocks: Tensor, fmt: Format) -> Tensor:
    """Return a matrix that contains the blocks, each as one or more rows or as a column.

    If the format has outer scales, each row begins with a block whose maximum sets them to 1. A
    format that has one block for all values gets no such block.
    """
    most = max(4, MOST_VALUES // blocks.shape[-1])
    if len(blocks) > most:
        blocks = blocks[torch.linspace(0, len(blocks) - 1, most).round().long()]
    leading = torch.zeros(blocks.shape[-1])
    leading[0] = scalings.target(fmt) or 0
    tiles = [blocks]
    if fmt.columns:
        return torch.cat([leading.unsqueeze(0), blocks]).t().contiguous()
    if fmt.one_block:
        return blocks
    if fmt.has_outer_scale and fmt.block_size is not None:
        tiles.insert(0, leading.expand_as(blocks))
    elif fmt.has_outer_scale:
        return torch.cat([leading.unsqueeze(0), blocks])
    rows = [tile.reshape(-1, width_of(fmt)) for tile in tiles]
    return torch.cat(rows, dim=-1)


def unit_of(fmt: Format, frame: Frame) -> float:
    """Return the dequantized value of an element that is 1 in the block of `frame`."""
    if fmt.block_size is None:
        return 1.0
    scaling = fmt.scaling
    assert scaling is not None
    if not scaling.one_scale:
        return 1.0
    module = scalings.module_of(scaling)
    lead = torch.zeros_like(frame.base)
    lead[0] = 0 if fmt.one_block else scalings.target(fmt) or 0
    blocks = torch.stack([lead, frame.base])
    scales = module.scale_down(blocks, fmt.element, scaling)[1]
    return float(module.scale_up(torch.ones_like(blocks), scales, scaling)[-1, 0])


def alternative_unit(fmt: Format, element: Element) -> float:
    """Return the value that a 1 of the type `element` stands for, in a block with the scale 1."""
    scaling = fmt.scaling
    assert isinstance(scaling, ChoiceScaling)
    if element == fmt.element:
        return 1.0
    unit = 7 / scaling.alternative.max
    return unit * 6 / 7 if scaling.shared else unit
