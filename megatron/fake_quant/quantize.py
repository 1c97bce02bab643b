"""`fake_quantize`: what a tensor holds after being stored in a low-precision format."""

import torch
from torch import Tensor

from megatron.fake_quant.block import fake_quantize_blocks
from megatron.fake_quant.element import round_to
from megatron.fake_quant.formats import Cast, Format, HiFloat8, get_format
from megatron.fake_quant.hifloat8 import round_to_hifloat8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def fake_quantize(x: Tensor, fmt: Format | str, axis: int = -1) -> Tensor:
    """Quantize `x` to `fmt` and return the dequantized values in a new tensor like `x`.

    Args:
        x: float32, bfloat16 or float16 of any shape and strides. Gradients do not flow through:
            call it inside an autograd function.
        fmt: a format or its name, see `get_format`.
        axis: along which blocks are formed, in formats that have them; a GEMM's reduction axis.

    The arithmetic is exact in float32 whatever the dtype of `x`, and the result is then rounded to
    that dtype, to nearest even. For block formats and HiFloat8 this last step changes nothing, as
    what they make of a float16 or bfloat16 is one again. The exception is the top of the range:
    with a scale rule other than floor a value within half an ulp of it may round up past it, and
    then is Inf, as it is for a cast.

    A NaN stays NaN, and in a block format it makes its whole block NaN; so does an Inf. In a cast
    Inf stays Inf, in HiFloat8 it saturates like any overflow. A zero keeps its sign where the
    format has a negative zero, which HiFloat8 and mxint8 have not.

    Neither strides nor the number of threads change a bit. Flushing of subnormals, where it was
    asked for (`torch.set_flush_denormal`), does: in casts to bf16, and in blocks whose maximum is
    below 2^-90 (or higher up, if a spelled-out element has more than 5 exponent bits).

    Raises ValueError for other dtypes, an unknown format, an axis out of range, and for block
    scales on a tensor without dimensions.
    """
    if isinstance(fmt, str):
        fmt = get_format(fmt)
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"cannot quantize a tensor of {x.dtype}; give one of {names}, for instance by x.float()"
        )
    axis = _checked_axis(x, fmt, axis)
    if x.numel() == 0:
        return x.clone()
    if isinstance(fmt.element, Cast):
        return x.to(fmt.element.dtype, copy=True).to(x.dtype)
    if isinstance(fmt.element, HiFloat8):
        return round_to_hifloat8(x.float(), fmt.element).to(x.dtype)
    if fmt.scaling is None:
        return round_to(x.float(), fmt.element).to(x.dtype)
    return fake_quantize_blocks(x.float(), fmt.element, fmt.scaling, axis=axis).to(x.dtype)


def _checked_axis(x: Tensor, fmt: Format, axis: int) -> int:
    """`axis` counted from the front."""
    if x.ndim == 0:
        if fmt.scaling is not None:
            raise ValueError(
                f"format {fmt.name!r} scales blocks along an axis, but the tensor has no "
                "dimensions; give it one, for instance by x.reshape(1)"
            )
        return 0
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}; "
            f"choose one from {-x.ndim} to {x.ndim - 1}"
        )
    return axis % x.ndim
