"""Convert a tensor to the codes and scales of a format (`quantize`) and back (`dequantize`).

Codes are stored as tensor cores read them: the axis along which blocks run is the last one and
contiguous. Elements of 5 to 8 bits take one byte each. Elements of 4 bits or fewer take half a
byte, with the first of two neighbors in the low half. Scales are stored in the format's own bytes:

    MX formats        one E8M0 byte per block: 2^(byte - 127), 255 is NaN
    nvfp4             one E4M3 byte per block, and a float32 for the tensor (or per outer group)
    fp8_block         one float32 per block
    hifp4             four bytes per block; see `hifloat4.py`
    fp8, hifp8:t15    a float32 for the tensor

The module of a scaling (see `scalings/`) describes the bytes of the other formats.
For bf16 and fp16, `codes` is the tensor in that dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.fake_quant import operators
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.format_text import to_text
from megatron.fake_quant.formats import Format
from megatron.fake_quant.operator_rules import is_direct
from megatron.fake_quant.packing_parts import check_values, packed, unpacked
from megatron.fake_quant.quantize import checked, seed_for, seeds_for
from megatron.fake_quant.scales import Scales


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Tensor that is stored as the codes and scales of a low-precision format.

    codes: uint8 `[..., K]`, or `[..., ceil(K / 2)]` for 4-bit elements, where K is the axis along
        which blocks run, moved to the end.
    scales: `scales.blocks` is `[..., ceil(K / block)]` (for square blocks, both last axes are
        divided), in uint8 with a further axis if a block has several bytes, or in float32;
        `scales.tensor` is one float32, or one per group of blocks that share an outer scale.
    """

    codes: Tensor
    scales: Scales
    format: Format
    shape: tuple[int, ...]  #: shape of the original tensor
    axis: int  #: axis of the original tensor along which blocks run
    dtype: torch.dtype  #: dtype of the original tensor

    @property
    def nbytes(self) -> int:
        """Total number of bytes in the codes and scales."""
        parts = (self.codes, self.scales.blocks, self.scales.tensor)
        return sum(part.nbytes for part in parts if part is not None)


def quantize(
    x: Tensor,
    fmt: Format | str,
    axis: int = -1,
    *,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` and return its codes and scales.

    `fake_quantize` has the same arguments and raises the same errors. In addition, this function
    raises ValueError for an empty tensor, unless the format is a cast, and for a NaN that the
    format cannot store, because its scale is one float32 for the tensor and its elements have no
    code for NaN. `dequantize` converts the result to exactly the tensor that `fake_quantize`
    returns.
    """
    fmt, layout = checked(x, fmt, axis, amax)
    if is_direct(x):
        check_values(layout.shape, fmt)
        parts = packed(x.detach(), fmt, layout, seed_for(fmt, generator, seed), amax=amax)
    else:
        seeds = seeds_for(fmt, generator, seed)
        parts = operators.quantize(x.detach(), to_text(fmt), layout.from_end, seeds, 0, amax)
    codes, blocks, whole = parts
    has_blocks = fmt.block_size is not None
    scales = Scales(blocks if has_blocks else None, whole if fmt.has_outer_scale else None)
    return QuantizedTensor(codes, scales, fmt, layout.shape, layout.axis, x.dtype)


def dequantize(quantized: QuantizedTensor) -> Tensor:
    """Return the tensor that codes and scales stand for, in the original shape and dtype."""
    fmt, codes, scales = quantized.format, quantized.codes, quantized.scales
    layout = BlockLayout.of(quantized.shape, fmt, quantized.axis)
    codes = codes.detach()
    blocks = codes.new_empty(0) if scales.blocks is None else scales.blocks
    whole = codes.new_empty(0) if scales.tensor is None else scales.tensor.detach()
    if all(is_direct(part) for part in (codes, blocks, whole)):
        return unpacked((codes, blocks, whole), fmt, layout, quantized.dtype)
    result: Tensor = operators.dequantize(
        codes, blocks, whole, to_text(fmt), layout.shape, layout.from_end, quantized.dtype, 0
    )
    return result
