"""`fake_quantize`: what a tensor holds after being stored in a low-precision format."""

import torch
from torch import Tensor

from megatron.fake_quant import operators
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.format_text import to_text
from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.names import get_format
from megatron.fake_quant.operators import compute, is_direct
from megatron.fake_quant.random_bits import draw_seed
from megatron.fake_quant.rounding import check_tensor


def fake_quantize(
    x: Tensor,
    fmt: Format | str,
    axis: int = -1,
    *,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Quantize `x` to `fmt` and return the dequantized values in a new tensor like `x`.

    Args:
        x: float32, bfloat16 or float16 of any shape and strides. Gradients do not flow through:
            call it inside an autograd function.
        fmt: a format or its name, see `get_format`.
        axis: along which blocks are formed, in formats that have them; a GEMM's reduction axis.
        generator: generator for stochastic rounding; torch's default one for the CPU if None. One
            number is drawn per call. Each value's random bits follow from it and the value's place
            in `x`.
        seed: a number from 0 to 2^62 - 1 to use instead of drawing one; also as an int64 tensor
            without dimensions.

    The arithmetic is done in float32 whatever the dtype of `x`, and the result is then rounded to
    that dtype, to nearest even. For MX formats, HiFloat4 and HiFloat8 without a scale this last
    step changes nothing, as what they make of a float16 or bfloat16 is one again. The exception is
    the top of the range: with a scale rule other than floor a value within half an ulp of it may
    round up past it, and then is Inf, as it is for a cast.

    A NaN stays NaN, and in a block format it makes its whole block NaN; so does an Inf. In a cast
    Inf stays Inf, in HiFloat8 and per-tensor FP8 it saturates like any overflow. A tensor's scale
    is found from the finite values. A zero keeps its sign where the format has a negative zero,
    which HiFloat8 and mxint8 have not.

    Neither strides, device nor the number of threads change a bit. Flushing of subnormals, where it
    was asked for (`torch.set_flush_denormal`), may: in casts to bf16, and in blocks whose maximum
    is below 2^-90 (or higher up, if a spelled-out element has more than 5 exponent bits).

    Raises ValueError for other dtypes, an unknown format, an axis out of range, and for blocks that
    need other dimensions than the tensor has.
    """
    fmt, layout = checked(x, fmt, axis)
    x = x.detach()
    if not is_direct(x):
        seeds = seeds_for(fmt, generator, seed)
        result: Tensor = operators.fake_quantize(x, to_text(fmt), layout.from_end, seeds, 0)
        return result
    if x.numel() == 0:
        return x.clone()
    return compute(x, fmt, layout, seed_for(fmt, generator, seed))


def checked(x: Tensor, fmt: Format | str, axis: int) -> tuple[Format, BlockLayout]:
    """The format and the layout of its blocks; errors as `fake_quantize` says."""
    if isinstance(fmt, str):
        fmt = FORMATS.get(fmt) or get_format(fmt)
    check_tensor(x, "quantize")
    return fmt, BlockLayout.of(tuple(x.shape), fmt, axis)


def seed_for(
    fmt: Format, generator: torch.Generator | None, seed: int | Tensor | None
) -> int | None:
    """The seed where the format rounds stochastically, else None; nothing is drawn in vain."""
    if not fmt.stochastic:
        return None
    return draw_seed(generator) if seed is None else int(seed)


def seeds_for(
    fmt: Format, generator: torch.Generator | None, seed: int | Tensor | None
) -> Tensor | None:
    """Return the seed of `seed_for` as a tensor, which can be traced."""
    if not fmt.stochastic:
        return None
    return operators.drawn(generator) if seed is None else operators.seed_tensor(seed)
