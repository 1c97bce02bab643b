"""Faster kernels for some devices and formats, equal to the reference bit for bit.

On the CPU numba compiles them, the first time in seconds and then from a cache on disk; it needs no
C++ compiler. Where numba is missing, and for small tensors, the reference does the work. On CUDA
devices Triton compiles them, which torch's CUDA builds bring; where it is missing the reference
does the work, as it does for HiFloat4 and for blocks too large for a processor's registers.
`LAB_FUSED=0` in the environment switches all of them off.

Kernels take plain tensors only. Under torch.compile, torch.func and other transforms they are
called by `operators.py`.
"""

import functools
import os
import subprocess
import warnings
from collections.abc import Callable

from torch import Tensor

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.formats import Cast, ElementFormat, Format, GroupScaling

Kernel = Callable[[Tensor, Format, BlockLayout, int | None], Tensor]
Rotation = Callable[[Tensor, Tensor, float, int], Tensor]

VARIABLE = "LAB_FUSED"
#: Below so many values compiled code gains less than its loading costs.
SMALLEST = 1 << 16
LARGEST_BLOCK = 1 << 14  #: values of a block that a GPU kernel takes


def find(x: Tensor, fmt: Format) -> Kernel | None:
    """A kernel that does for `x` what `reference.fake_quantize` does, None if there is none."""
    if isinstance(fmt.element, Cast) or os.environ.get(VARIABLE) == "0":
        return None
    groups = isinstance(fmt.scaling, GroupScaling)
    if groups:
        if fmt.rounding != "nearest":
            return None
    elif isinstance(fmt.element, ElementFormat) and fmt.element.ties != "even":
        return None
    if x.is_cuda:
        size = fmt.block_size or 1
        small = (size * size if fmt.square else size) <= LARGEST_BLOCK
        return _gpu() if small and not groups else None
    if x.device.type != "cpu" or x.numel() < SMALLEST:
        return None
    return _cpu()


@functools.cache
def _cpu() -> Kernel | None:
    try:
        from megatron.fake_quant.fused import numba_launch
    except ImportError:
        return None
    return numba_launch.fake_quantize


@functools.cache
def _gpu() -> Kernel | None:
    try:
        from megatron.fake_quant.fused import triton_launch
    except ImportError:
        return None
    try:
        triton_launch.check()
    except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"Triton cannot launch kernels here: {error}. Formats are computed by torch's own "
            "operations, several times slower. Triton builds its launcher with a C compiler and "
            "Python's headers; install gcc and python3-dev, or name a compiler in CC",
            stacklevel=2,
        )
        return None
    return triton_launch.fake_quantize


def find_rotation(x: Tensor) -> Rotation | None:
    """A kernel for `Hadamard` of `x`, None if there is none."""
    if x.device.type != "cpu" or x.numel() < SMALLEST or os.environ.get(VARIABLE) == "0":
        return None
    return None if _cpu() is None else _cpu_rotation()


def _cpu_rotation() -> Rotation:
    from megatron.fake_quant.fused import numba_launch

    return numba_launch.rotate
