"""Faster kernels for some devices and formats, equal to the reference bit for bit.

On the CPU numba compiles them, the first time in seconds and then from a cache on disk; it needs no
C++ compiler. Where numba is missing, and for small tensors, the reference does the work.
`LAB_FUSED=0` in the environment switches all of them off.
"""

import functools
import os
from collections.abc import Callable

from torch import Tensor

from megatron.fake_quant.formats import Cast, ElementFormat, Format, GroupScaling
from megatron.fake_quant.layout import Layout

Kernel = Callable[[Tensor, Format, Layout, int | None], Tensor]
Rotation = Callable[[Tensor, Tensor, float, int], Tensor]

VARIABLE = "LAB_FUSED"
#: Below so many values compiled code gains less than its loading costs.
SMALLEST = 1 << 16


def find(x: Tensor, fmt: Format) -> Kernel | None:
    """A kernel that does for `x` what `reference.fake_quantize` does, None if there is none."""
    if isinstance(fmt.element, Cast):
        return None
    if isinstance(fmt.scaling, GroupScaling):
        if fmt.rounding != "nearest":
            return None
    elif isinstance(fmt.element, ElementFormat) and fmt.element.ties != "even":
        return None
    if x.device.type != "cpu" or x.numel() < SMALLEST or os.environ.get(VARIABLE) == "0":
        return None
    return _cpu()


@functools.cache
def _cpu() -> Kernel | None:
    try:
        from megatron.fake_quant.fused import cpu
    except ImportError:
        return None
    return cpu.fake_quantize


def find_rotation(x: Tensor) -> Rotation | None:
    """A kernel for `Hadamard` of `x`, None if there is none."""
    if x.device.type != "cpu" or x.numel() < SMALLEST or os.environ.get(VARIABLE) == "0":
        return None
    return None if _cpu() is None else _cpu_rotation()


def _cpu_rotation() -> Rotation:
    from megatron.fake_quant.fused import cpu

    return cpu.rotate
