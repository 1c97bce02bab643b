"""Launch the fused quantization kernels on CUDA devices.

`triton_plans.py` chooses the kernel for a tensor, its tiles and its constants. Tests run the
kernels in Triton's interpreter, and on a GPU if there is one, and compare the results with
`reference.py`. They also compile the kernels for sm_90 and search the assembly code for
instructions that would change the results.

No step waits for the device: if a format needs the maximum of the tensor or of groups of values,
one kernel stores the maxima in device memory and the next kernel reads them there. Triton compiles
a kernel the first time that a combination of its constants is used. This takes a second; later
processes load the kernel from Triton's cache on disk.
"""

import torch
from torch import Tensor
from triton.runtime import driver

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.fused.triton_plans import amax_plan, plan, scaled_plan
from megatron.fake_quant.random_bits import WORD
from megatron.fake_quant.scalings.tensor_scale import check_amax


def _key(seed: int | None) -> tuple[int, int]:
    """Return the low and the high word of the seed as int32 numbers, or zeros without a seed."""
    words = (0, 0) if seed is None else (seed & WORD, seed >> 32)
    return words[0] - ((words[0] >> 31) << 32), words[1]


def check() -> None:
    """Raise Triton's own error if Triton cannot launch kernels on this machine."""
    driver.active.get_current_target()


def finite_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of `x` in float32; see `tensor_scale.local_amax`."""
    src, _ = without_gaps(x.detach(), in_order=False)
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    with torch.cuda.device(x.get_device()):
        amax_plan(src.numel(), x.dtype).launch(src, bits)
    return bits.view(torch.float32)


def scaled(
    sums: Tensor, alpha: float, scale_a: Tensor | None, scale_b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `sums` times the scales and `alpha`, rounded to `dtype`.

    Args:
        sums: float32 tensor without gaps.
        alpha: factor, multiplied last.
        scale_a: float32 tensor without dimensions, multiplied first; None if there is none.
        scale_b: the same, multiplied second.
        dtype: torch.bfloat16 or torch.float16.
    """
    out = torch.empty_like(sums, dtype=dtype)
    factors = (scale_a is not None, scale_b is not None, alpha != 1.0)
    with torch.cuda.device(sums.get_device()):
        scaled_plan(sums.numel(), dtype, factors).launch(
            sums,
            out,
            sums if scale_a is None else scale_a,
            sums if scale_b is None else scale_b,
            float(alpha),  # An integer would compile another kernel, which is not distinguished.
        )
    return out


def fake_quantize(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize `x` with a Triton kernel; see `reference.fake_quantize`.

    The format must be one for which `dispatch.find` returns this function.
    """
    check_amax(fmt, amax)
    axis = layout.axis
    if fmt.columns:
        fmt, axis = fmt.across(), layout.across
    src, order = without_gaps(x, in_order=seed is not None or fmt.height > 1)
    result = torch.empty_like(src)
    shape = tuple(src.shape[dim] for dim in order)
    chosen = plan(fmt, shape, order.index(axis) if order else 0, x.dtype)
    with torch.cuda.device(x.get_device()):
        amax_bits = None
        if amax is not None:
            amax_bits = amax.to(x.device).view(torch.int32)
        elif chosen.maxima is not None:
            amax_bits = torch.zeros(chosen.groups, dtype=torch.int32, device=x.device)
            chosen.maxima.launch(src, amax_bits)
        chosen.launch(src, result, amax_bits, *_key(seed))
    if src is x:
        return result
    out = torch.empty_like(x)
    return result if result.stride() == out.stride() else out.copy_(result)
