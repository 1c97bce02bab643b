"""Choose a fused kernel for a tensor: faster than the reference and equal to it bit for bit.

On the CPU, numba compiles the kernels without a C++ compiler. The first compilation takes seconds;
later processes load the result from a cache on disk. On CUDA devices Triton, which comes with
torch's CUDA builds, compiles them. The reference computes everything else: small tensors, formats
and rounding modes without a kernel (`scalings.kernel_roundings`), blocks that do not fit into a
GPU's registers, and all tensors if numba or Triton is missing. `LAB_FUSED=0` in the environment
switches all kernels off.

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
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scalings import kernel_roundings

Kernel = Callable[[Tensor, Format, BlockLayout, int | None], Tensor]
Rotation = Callable[[Tensor, Tensor, float, int], Tensor]

VARIABLE = "LAB_FUSED"
SMALLEST = 1 << 16  #: values of a tensor from which on compiled code is worth its loading time
LARGEST_BLOCK = 1 << 14  #: largest number of values per block that a GPU kernel takes


def find(x: Tensor, fmt: Format) -> Kernel | None:
    """Return a kernel that replaces `reference.fake_quantize` for `x`, None if there is none."""
    device = x.device.type
    if device == "cpu" and x.numel() < SMALLEST:
        return None
    if os.environ.get(VARIABLE) == "0" or fmt.rounding not in kernel_roundings(fmt, device):
        return None
    if device == "cuda":
        size = fmt.block_size or 1
        return _gpu() if (size * size if fmt.square else size) <= LARGEST_BLOCK else None
    return _cpu() if device == "cpu" else None


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
    """Return a kernel for the Hadamard transform of `x`, None if there is none."""
    if x.device.type != "cpu" or x.numel() < SMALLEST or os.environ.get(VARIABLE) == "0":
        return None
    return None if _cpu() is None else _cpu_rotation()


def _cpu_rotation() -> Rotation:
    from megatron.fake_quant.fused import numba_launch

    return numba_launch.rotate
