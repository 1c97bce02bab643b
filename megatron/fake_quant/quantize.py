"""`fake_quantize`: what a tensor holds after being stored in a low-precision format."""

import torch
from torch import Tensor

from .block import fake_quantize_blocks
from .element import round_to
from .formats import Cast, Format, HiFloat8, get_format
from .hifloat8 import round_to_hifloat8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def fake_quantize(x: Tensor, fmt: Format | str, axis: int = -1) -> Tensor:
    """Quantize `x` to `fmt` and return the dequantized values in a new tensor like `x`.

    Args:
        x: float32, bfloat16 or float16, any shape and strides. Not differentiable: call it inside
        an autograd function. fmt: a format or its name, see `get_format`. axis: the axis along
        which blocks are formed, for formats that have them; a GEMM's reduction axis.

    The arithmetic is exact in float32 whatever the dtype of `x`; the result is rounded to that
    dtype, to nearest even. For block formats and HiFloat8 this last step changes nothing (their
    values fit into bfloat16 and float16), except at the very top: with a scale rule other than
    floor a maximum next to the end of the dtype's range may round up past it, and then is Inf.

    A NaN stays NaN; in a block format it, or an Inf, makes its whole block NaN. Without blocks an
    Inf stays Inf, but saturates in HiFloat8 unless its overflow is "inf". A zero keeps its sign
    where the format has a negative zero (not in HiFloat8, not in mxint8). If the process flushes
    subnormals (`torch.set_flush_denormal`), blocks with a maximum under about 2^-90 may flush too.

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
