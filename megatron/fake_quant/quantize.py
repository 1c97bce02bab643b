"""Define `fake_quantize`, which rounds a tensor to the values of a low-precision format."""

import torch
from torch import Tensor

from megatron.fake_quant import operators
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.format_text import to_text
from megatron.fake_quant.formats import TRACEABLE_FORMATS, Format
from megatron.fake_quant.names import get_format
from megatron.fake_quant.operator_rules import drawn, is_direct, seed_tensor
from megatron.fake_quant.operators import compute
from megatron.fake_quant.random_bits import check_seed, draw_seed
from megatron.fake_quant.rounding import check_tensor
from megatron.fake_quant.scalings.tensor_scale import check_amax


def fake_quantize(
    x: Tensor,
    fmt: Format | str,
    axis: int = -1,
    *,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Quantize `x` to `fmt` and return the dequantized values in a new tensor like `x`.

    Args:
        x: float32, bfloat16 or float16 of any shape and strides. The gradient is zero; call this
            function inside an autograd function.
        fmt: format or its name; see `get_format`.
        axis: axis along which blocks run, if the format has blocks; in a GEMM, the reduction axis.
        generator: generator for stochastic rounding; by default, torch's default CPU generator. One
            number is drawn per call. The random bits of each value are computed from this number
            and from the value's position in `x`.
        seed: number from 0 to 2^62 - 1 to use instead of drawing one; may be an int64 tensor
            without dimensions.
        amax: number from which the scale of the whole tensor is computed, instead of the tensor's
            largest finite magnitude: float32 without dimensions, finite, 0 or more (0 means a
            scale of 1). Values beyond it saturate. Some formats demand it; see
            `Format.amax_source`.

    The arithmetic is float32 for every dtype of `x`, and the result is rounded to the dtype of `x`,
    to nearest even. For MX formats, HiFloat4 and HiFloat8 without a scale this last step is exact,
    because the result for a float16 or bfloat16 value is a value of that dtype. The exceptions are
    a headroom and the mantissa of a macro block: they are not powers of two, so the result may have
    more bits.

    Codes and scales are finite for every finite value, but their product may be beyond the dtype's
    range. The result is then Inf, as in a cast. This can happen to values within half a step of the
    top of the range if the largest magnitude of a block may be rounded up: with every scale rule
    but floor, with a top, a headroom or `pow2`, in macro blocks, and with hybrid or random rounding
    (`hifp8:hr:t224`, `nvfp4:eden`). A format that maps this magnitude to its largest number
    saturates instead.

    A NaN stays a NaN. In a block format, a NaN or an Inf makes its whole block NaN. In a cast, Inf
    stays Inf; in HiFloat8 and per-tensor FP8, it is treated like any other overflow, which
    saturates by default. The scale of a tensor is computed from its finite values. A zero keeps its
    sign if the format has a negative zero; HiFloat8 and mxint8 have none.

    The result is bit-identical for all strides, devices and numbers of threads. Flushing of
    subnormals (`torch.set_flush_denormal`) may change results: in casts to bf16, and in blocks
    whose maximum is below 2^-90 (or higher, if a spelled-out element has more than 5 exponent
    bits).

    Raises:
        ValueError: if the dtype or the format is unknown, if the axis is out of range, if the
            tensor lacks dimensions that the blocks need, or if the format demands an amax and
            there is none.
    """
    fmt, layout = checked(x, fmt, axis, amax)
    x = x.detach()
    if not is_direct(x):
        seeds = seeds_for(fmt, generator, seed)
        result: Tensor = operators.fake_quantize(x, to_text(fmt), layout.from_end, seeds, 0, amax)
        return result
    if x.numel() == 0:
        return x.clone()
    return compute(x, fmt, layout, seed_for(fmt, generator, seed), amax=amax)


def checked(
    x: Tensor, fmt: Format | str, axis: int, amax: Tensor | None = None
) -> tuple[Format, BlockLayout]:
    """Return the format and its block layout for `x`, or raise an error as in `fake_quantize`."""
    if isinstance(fmt, str):
        fmt = TRACEABLE_FORMATS.get(fmt) or get_format(fmt)
    elif not isinstance(fmt, Format):
        raise ValueError(f"{fmt!r} is not a format; give a Format, or a name such as 'mxfp8'")
    check_tensor(x, "quantize")
    check_amax(fmt, amax)
    return fmt, BlockLayout.of(tuple(x.shape), fmt, axis)


def seed_for(
    fmt: Format, generator: torch.Generator | None, seed: int | Tensor | None
) -> int | None:
    """Return `seed`, or a drawn seed if it is None; return None if rounding is not stochastic."""
    if not fmt.stochastic:
        return None
    if seed is None:
        return draw_seed(generator)
    check_seed(seed)
    return int(seed)


def seeds_for(
    fmt: Format, generator: torch.Generator | None, seed: int | Tensor | None
) -> Tensor | None:
    """Return what `seed_for` returns, but as a tensor, so that torch can trace how it is drawn."""
    if not fmt.stochastic:
        return None
    return drawn(generator) if seed is None else seed_tensor(seed)
