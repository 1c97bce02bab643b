"""Convert a tensor to codes and scales and back, for `packing.py`.

A part that a format does not have is an empty tensor here, because an operator can return only
tensors.
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.fake_quant import reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.code_points import (
    decode,
    encode,
    nan_code,
    pack_nibbles,
    unpack_nibbles,
)
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import Scales

_NIBBLE = 4

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor]  #: codes, block scales and tensor scale


def check_values(shape: tuple[int, ...], fmt: Format) -> None:
    """Refuse an empty tensor, which has no maximum for a scale, unless the format is a cast.

    Raises:
        ValueError: if there are no values and the format is not a cast.
    """
    if math.prod(shape) == 0 and not fmt.is_cast:
        raise ValueError(
            f"a tensor of shape {shape} has no values to store; keep its shape instead"
        )


def packed(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Parts:
    """Quantize a tensor, and return its codes and scales in new memory."""
    none = torch.empty(0, dtype=torch.uint8, device=x.device)
    if fmt.element.is_cast:
        codes = layout.to_rows(x.to(fmt.element.dtype)).contiguous()
        codes = codes.clone() if codes.data_ptr() == x.data_ptr() else codes
        return codes, none, none.float()
    elements, scales = reference.split(x, fmt, layout, seed, amax=amax)
    _check_nan(elements, fmt)
    codes = _codes(elements, scales, fmt, layout)
    if fmt.element.bits <= _NIBBLE:
        codes = pack_nibbles(codes if layout.shape else codes.reshape(1))
    blocks = none if scales.blocks is None else scales.blocks.contiguous()
    whole = none.float() if scales.tensor is None else scales.tensor
    return codes.contiguous(), blocks, whole


class UnstorableError(ValueError):
    """Error about a value that neither a code nor a scale can represent."""


def _check_nan(elements: Tensor, fmt: Format) -> None:
    """Refuse a NaN that neither a code nor the scale of a block can represent.

    Raises:
        UnstorableError: if there is such a NaN.
    """
    if fmt.block_size is not None or fmt.element.is_cast or nan_code(fmt.element) is not None:
        return
    if elements.isnan().any():
        raise UnstorableError(
            f"the tensor contains NaN, which format {fmt.name} cannot store: {fmt.element.name} "
            "elements have no code for it, and the scale is one float32 for finite values; remove "
            "the NaN, or choose a format with block scales or with a code for NaN, such as fp8_e4m3"
        )


def _codes(elements: Tensor, scales: Scales, fmt: Format, layout: BlockLayout) -> Tensor:
    """Return the codes of element values, without padding and with the axis of the blocks last."""
    encoded = []
    for element in fmt.elements:
        assert not element.is_cast
        # Blocks that use another element type may have values beyond the range of `element`. These
        # values are clamped here, and `choose` discards their codes.
        several = len(fmt.elements) > 1
        values = elements.clamp(-element.max, element.max) if several else elements
        encoded.append(encode(values, element))
    return layout.from_blocks(reference.choose(encoded, fmt, scales))


def unpacked(parts: Parts, fmt: Format, layout: BlockLayout, dtype: torch.dtype) -> Tensor:
    """Return the tensor that the codes and scales in `parts` stand for, in new memory."""
    codes, blocks, whole = parts
    if fmt.element.is_cast:
        values = layout.from_rows(codes)
    else:
        if fmt.element.bits <= _NIBBLE:
            count = layout.rows_shape[-1] if layout.shape else 1
            codes = unpack_nibbles(codes, count).reshape(layout.rows_shape)
        scales = Scales(blocks, whole)
        coded = layout.to_blocks(layout.from_rows(codes))
        decoded = [decode(coded, element) for element in fmt.elements if not element.is_cast]
        values = reference.join(reference.choose(decoded, fmt, scales), scales, fmt, layout)
    return reference.store(values, torch.empty(layout.shape, dtype=dtype, device=codes.device))


def empty_parts(x: Tensor, fmt: Format, layout: BlockLayout, front: tuple[int, ...]) -> Parts:
    """Return uninitialized tensors with the shapes and dtypes of the results of `packed`.

    `front` is the shape of the batch dimensions.
    """
    rows, scales = layout.rows_shape, tuple[int, ...]()
    dtype, codes = torch.uint8, rows
    if fmt.element.is_cast:
        dtype = fmt.element.dtype
    elif fmt.element.bits <= _NIBBLE:
        codes = (*rows[:-1], -(-rows[-1] // 2)) if rows else (1,)
    of_blocks = torch.float32 if fmt.block_scale == "FP32" else torch.uint8
    groups = tuple[int, ...]() if fmt.has_tensor_scale else (0,)
    if (size := fmt.block_size) is not None:
        scales = (*rows[:-1], -(-rows[-1] // size))
        if fmt.height > 1:
            scales = (*rows[:-2], -(-rows[-2] // fmt.height), scales[-1])
        scales = (1,) if fmt.one_block else scales
        parts = fmt.scale_bytes // of_blocks.itemsize
        scales += (parts,) if parts > 1 else ()
        if fmt.outer_size is not None:
            groups = (*rows[:-1], -(-rows[-1] // fmt.outer_size))
    return (
        x.new_empty((*front, *codes), dtype=dtype),
        x.new_empty((*front, *scales) if fmt.block_size is not None else (0,), dtype=of_blocks),
        x.new_empty((*front, *groups) if fmt.has_outer_scale else (0,), dtype=torch.float32),
    )
