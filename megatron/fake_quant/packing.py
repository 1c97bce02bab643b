"""`quantize` and `dequantize`: a tensor as a low-precision format stores it.

Codes lie as tensor cores read them: the axis along which blocks run is the last one and contiguous.
Elements of 5 to 8 bits take a byte each, elements of 4 bits and fewer half a byte, the first of two
neighbors in the low half. Scales are the format's own bytes:

    MX formats        E8M0, one a block: 2^(byte - 127), 255 is NaN
    nvfp4             E4M3, one a block, and a float32 for the tensor
    hifp4             four a block, see `hifloat4.py`
    fp8, hifp8:t15    a float32 for the tensor

bf16 and fp16 have no codes of ours: `codes` is the tensor in that dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.fake_quant.codes import decode, encode, pack_nibbles, unpack_nibbles
from megatron.fake_quant.formats import Cast, Format
from megatron.fake_quant.layout import Layout
from megatron.fake_quant.quantize import checked, seed_for
from megatron.fake_quant.reference import join, split, store
from megatron.fake_quant.scales import Scales

_NIBBLE = 4


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor in a low-precision format.

    codes: uint8 `[..., K]`, or `[..., ceil(K / 2)]` for 4-bit elements, where K is the axis along
        which blocks run, moved to the end.
    scales: `scales.blocks` is uint8 `[..., ceil(K / block)]` (square blocks: of both last axes),
        with four bytes more behind it in hifp4; `scales.tensor` is a float32.
    """

    codes: Tensor
    scales: Scales
    format: Format
    shape: tuple[int, ...]  #: of the tensor
    axis: int  #: of the tensor, along which blocks run
    dtype: torch.dtype  #: of the tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        parts = (self.codes, self.scales.blocks, self.scales.tensor)
        return sum(part.nbytes for part in parts if part is not None)


@torch.no_grad()
def quantize(
    x: Tensor,
    fmt: Format | str,
    axis: int = -1,
    *,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> QuantizedTensor:
    """The codes and scales of `x`.

    Arguments and errors are those of `fake_quantize`, and `dequantize` of the result is bit for bit
    what that returns.
    """
    fmt, layout = checked(x, fmt, axis)

    def quantized(codes: Tensor, scales: Scales) -> QuantizedTensor:
        return QuantizedTensor(codes, scales, fmt, layout.shape, layout.axis, x.dtype)

    if isinstance(fmt.element, Cast):
        return quantized(layout.to_rows(x.to(fmt.element.dtype)).contiguous(), Scales())
    if x.numel() == 0:
        raise ValueError(
            f"a tensor of shape {layout.shape} has no values to store; keep its shape instead"
        )
    elements, scales = split(x, fmt, layout, seed_for(fmt, generator, seed))
    codes = encode(layout.from_blocks(elements), fmt.element)
    return quantized(pack_nibbles(codes) if fmt.element.bits <= _NIBBLE else codes, scales)


@torch.no_grad()
def dequantize(quantized: QuantizedTensor) -> Tensor:
    """The tensor that codes and scales stand for, of the shape and dtype that it had."""
    fmt, codes, shape = quantized.format, quantized.codes, quantized.shape
    layout = Layout.of(shape, fmt, quantized.axis)
    if isinstance(fmt.element, Cast):
        values = layout.from_rows(codes)
    else:
        if fmt.element.bits <= _NIBBLE:
            codes = unpack_nibbles(codes, shape[quantized.axis])
        elements = layout.to_blocks(layout.from_rows(decode(codes, fmt.element)))
        values = join(elements, quantized.scales, fmt, layout)
    return store(values, torch.empty(shape, dtype=quantized.dtype, device=codes.device))
