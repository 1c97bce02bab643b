"""Choose a fused quantization kernel for a tensor.

The fused kernels are faster than `reference.py` and return the same results, bit for bit. On the
CPU, numba compiles them without a C++ compiler. The first compilation takes seconds; later
processes load the result from a cache on disk. On CUDA devices, Triton compiles them; torch's CUDA
builds contain Triton, in a sufficiently recent version since torch 2.10. `reference.py` computes
everything else: small tensors until the CPU kernels are loaded, formats and rounding modes without
a kernel (`scalings.kernel_roundings`), blocks that do not fit into a GPU's registers, and all
tensors if numba or Triton is missing or too old. The environment variable `LAB_FUSED=0` switches
off all kernels.

Kernels accept only plain tensors. Under torch.compile, torch.func and other transforms,
`operators.py` calls them.
"""

import functools
import os
import subprocess
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scalings import kernel_roundings

#: First version of Triton whose results are bit-identical to the reference; the divisions of older
#: versions flush subnormals to zero. torch 2.10 contains this version.
TRITON = (3, 6)
Rotation = Callable[[Tensor, Tensor, float, int], Tensor]
Scaling = Callable[[Tensor, float, Tensor | None, Tensor | None, torch.dtype], Tensor]


class Multiplication(Protocol):
    """Function that multiplies operands and simulates an accumulator; see `accumulate.matmul`."""

    def __call__(
        self,
        a: UnitOperand,
        b: UnitOperand,
        accumulator: Accumulator,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """Return A B^T + `start`, `[batch, M, N]`; see `accumulate.matmul.multiply`."""


class Kernel(Protocol):
    """Function that quantizes and dequantizes a tensor; see `reference.fake_quantize`."""

    def __call__(
        self,
        x: Tensor,
        fmt: Format,
        layout: BlockLayout,
        seed: int | None,
        *,
        amax: Tensor | None = None,
    ) -> Tensor:
        """Return the dequantized values in a new tensor like `x`."""


VARIABLE = "LAB_FUSED"
SMALLEST = 1 << 16  #: smallest tensor, in values, that makes loading the CPU kernels worthwhile
#: total number of values in tensors below SMALLEST after which the CPU kernels are loaded; loading
#: takes about as long as computing this many values with the reference
BEFORE_LOADING = 1 << 25
#: number of products that the reference sums in the time in which it quantizes one value
PRODUCTS_PER_VALUE = 16
LARGEST_BLOCK = 1 << 14  #: maximum number of values per block that a GPU kernel supports


def find(x: Tensor, fmt: Format) -> Kernel | None:
    """Return a kernel that replaces `reference.fake_quantize` for `x`, or None if there is none."""
    device = x.device.type
    if os.environ.get(VARIABLE) == "0" or fmt.rounding not in kernel_roundings(fmt, device):
        return None
    if device == "cuda":
        size = fmt.block_size or 1
        rows = fmt.columns or (size == WHOLE_AXIS and not fmt.one_block)
        return _gpu() if rows or size * fmt.height <= LARGEST_BLOCK else None
    return _cpu() if device == "cpu" and _pays(x.numel()) else None


# Number of values still to be quantized by the reference before the CPU kernels are loaded.
_left = BEFORE_LOADING


def _pays(count: int) -> bool:
    """Return whether a CPU kernel saves time for a tensor of `count` values.

    Once the kernels are loaded, they save time for every tensor. Loading takes about a second.
    """
    global _left
    _left = 0 if count >= SMALLEST else max(_left - count, 0)
    return _left == 0


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
        import triton

        from megatron.fake_quant.fused import triton_launch
    except ImportError:
        return None
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < TRITON:
        needed = ".".join(map(str, TRITON))
        warnings.warn(
            f"Triton {triton.__version__} is older than {needed}, which torch 2.10 contains. "
            "Quantization uses plain torch operations, which are several times slower",
            stacklevel=2,
        )
        return None
    try:
        triton_launch.check()
    except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"Triton cannot launch kernels here: {error}. Quantization uses plain torch "
            "operations, which are several times slower. Triton builds its launcher with a C "
            "compiler and Python's headers; install gcc and python3-dev, or set CC to a compiler",
            stacklevel=2,
        )
        return None
    return triton_launch.fake_quantize


def find_amax(x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a kernel for the largest finite magnitude of `x`, or None if there is none."""
    if not x.is_cuda or os.environ.get(VARIABLE) == "0" or x.numel() == 0 or _gpu() is None:
        return None
    from megatron.fake_quant.fused import triton_launch

    return triton_launch.finite_amax


def find_scaling(sums: Tensor, *scales: Tensor | None) -> Scaling | None:
    """Return a kernel that multiplies sums by scales and rounds them, or None if there is none."""
    known = all(
        scale is None
        or (scale.dim() == 0 and scale.dtype == torch.float32 and scale.device == sums.device)
        for scale in scales
    )
    if not (known and sums.is_cuda and sums.is_contiguous() and sums.numel()):
        return None
    if os.environ.get(VARIABLE) == "0" or _gpu() is None:
        return None
    from megatron.fake_quant.fused import triton_launch

    return triton_launch.scaled


def find_rotation(x: Tensor) -> Rotation | None:
    """Return a kernel for the Hadamard transform of `x`, or None if there is none."""
    if x.device.type != "cpu" or os.environ.get(VARIABLE) == "0" or not _pays(x.numel()):
        return None
    return None if _cpu() is None else _cpu_rotation()


def _cpu_rotation() -> Rotation:
    from megatron.fake_quant.fused import numba_launch

    return numba_launch.rotate


def find_multiplication(a: Tensor, b: Tensor) -> Multiplication | None:
    """Return a kernel for matmuls with a simulated accumulator, or None if there is none.

    The operands have the shapes `[batch, M, K]` and `[batch, N, K]`.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    if a.device.type == "cuda":
        return None if _gpu() is None else _gpu_multiplication()
    if a.device.type != "cpu":
        return None
    pays = _pays(a.numel() * b.shape[-2] // PRODUCTS_PER_VALUE)
    return _cpu_multiplication() if pays else None


@functools.cache
def _cpu_multiplication() -> Multiplication | None:
    try:
        from megatron.fake_quant.fused import numba_accumulate_launch
    except ImportError:
        return None
    return numba_accumulate_launch.multiply


def _gpu_multiplication() -> Multiplication:
    from megatron.fake_quant.fused import triton_accumulate_launch

    return triton_accumulate_launch.multiply
