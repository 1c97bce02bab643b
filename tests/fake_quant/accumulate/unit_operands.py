"""Operands of accumulators, decoded from the codes of `quantize` for tests."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.fake_quant import quantize
from megatron.fake_quant.accumulate import ACCUMULATORS, get_accumulator
from megatron.fake_quant.code_points import decode, unpack_nibbles
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, GemmFormats


def with_accumulators(formats: GemmFormats, name: str) -> GemmFormats:
    accumulator = get_accumulator(name)
    return replace(formats, **{f"{gemm}_accumulator": accumulator for gemm in GEMM_SLOTS})


def taken_apart(x: Tensor, name: str | None, axis: int, unit: str, amax: Tensor | None = None):
    """Return elements, block scales (or None) and the factor of the sums, decoded from codes."""
    x = x.detach()
    if name is None:
        return x.movedim(axis, -1).float(), None, torch.ones(()), str(x.dtype)[6:]
    packed = quantize(x, name, axis, amax=amax)
    fmt, codes = packed.format, packed.codes
    count = x.shape[axis]
    if fmt.element.bits <= 4:
        codes = unpack_nibbles(codes, count)
    elements, after = decode(codes, fmt.element), torch.ones(())
    if fmt.has_outer_scale:
        after = packed.scales.tensor
    stored = packed.scales.blocks
    if stored is None:
        return elements, None, after, fmt.element.name
    if fmt.block_scale == "E8M0":
        scales = torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    elif fmt.block_scale == "E4M3":
        scales = decode(stored, FORMATS["fp8_e4m3"].element)
    else:
        scales = stored
    scales = scales.repeat_interleave(fmt.height, -2)[..., : elements.shape[-2], :]
    if "head3/4" in name:
        after = torch.tensor(4 / 3)
    if "rowwise" in name:
        return elements, None, scales, fmt.element.name
    block = ACCUMULATORS[unit].scale_block if unit in ACCUMULATORS else 16
    scales = scales.repeat_interleave(packed.format.block_size // block, -1)
    return elements, scales[..., : -(-count // block)], after, fmt.element.name
