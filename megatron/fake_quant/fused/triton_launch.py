"""Launch the fused quantization kernels on CUDA devices.

This module chooses the Triton kernel for a tensor, its tiles and its constants. The kernels have
not run on a GPU yet. Tests run them in Triton's interpreter and compare the results with
`reference.py`. They also compile the kernels for sm_90 and search the assembly code for
instructions that would change the results.

No step waits for the device: if a format needs the tensor's maximum for its scale, one kernel
stores the maximum in device memory and the next kernel reads it there. Triton compiles a kernel the
first time that a combination of its constants is used. This takes a second; later processes load
the kernel from Triton's cache on disk.
"""

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.float32_bits import INFINITY, power_of_two_bits
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import triton_blocks, triton_elementwise
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.hifloat8 import LARGEST_EXPONENT
from megatron.fake_quant.mx import carry_bits
from megatron.fake_quant.random_bits import WORD
from megatron.fake_quant.rounding import check_rounding
from megatron.fake_quant.scalings import kernel_roundings, target
from megatron.fake_quant.special_scalings import TensorScaling
from megatron.fake_quant.tensor_scale import check_amax

#: Number of bytes in the tile that a program holds in registers, unless a block is larger.
TILE = 1 << 14
_PER_WARP = TILE // 4  #: bytes of a tile per warp: 8 loads of 16 bytes per thread
_WIDE = 32  #: desired number of columns in a tile, unless the tile would exceed `_MOST` values
_MOST = 1 << 15
LARGEST_BITS = power_of_two_bits(LARGEST_EXPONENT)  #: bits of HiFloat8's largest number
_REPEATS = 8  #: number of tiles that a program searches for the tensor's maximum

Constants = dict[str, Any]


class LaunchConfig(NamedTuple):
    """Kernel with its launch parameters for one format, shape and dtype."""

    kernel: Any
    programs: int
    numbers: tuple[int, ...]
    constants: Constants  #: compile-time arguments, in the kernel's order
    options: Constants
    amax: bool  #: True if the kernel needs the tensor's maximum
    ready: dict[tuple[int, bool], Any]  #: compiled kernels, by device index and 16-byte alignment

    def launch(self, src: Tensor, *arguments: Any) -> None:
        """Launch the kernel on the current stream; later launches bypass Triton's argument binder.

        Triton's argument binder takes longer than the kernel, which takes an estimated 20
        microseconds for a 4096 x 4096 bfloat16 matrix.
        """
        arguments = (src, *arguments, *self.numbers, *self.constants.values())
        key = (src.get_device(), src.data_ptr() % 16 == 0)
        if key in self.ready:
            self.ready[key][(self.programs, 1, 1)](*arguments)
        else:
            compiled = self.kernel[(self.programs, 1, 1)](*arguments, **self.options)
            if compiled is not None:  # Triton's interpreter returns None.
                self.ready[key] = compiled


def _bits(x: float) -> int:
    """Return the float32 bits of a positive number."""
    return int(struct.unpack("i", struct.pack("f", x))[0])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _plan(
    kernel: Any, programs: int, numbers: tuple[int, ...], constants: Constants, size: int
) -> LaunchConfig:
    """Return the launch configuration of a kernel with tiles of `size` bytes."""
    ordered = {name: constants[name] for name in kernel.arg_names if name in constants}
    # FP fusion is off: it would merge a product and a sum into one operation with one rounding.
    options = {"num_warps": min(max(size // _PER_WARP, 1), 16), "enable_fp_fusion": False}
    wants_amax = constants.get("TARGET", 0) != 0
    return LaunchConfig(kernel, programs, numbers, ordered, options, wants_amax, {})


def _element(element: ElementFormat) -> Constants:
    return {
        "LOWEST": _bits(element.smallest_normal),
        "TOP": _bits(element.max),
        "MANTISSA": element.mantissa_bits,
        "ONE_ZERO": element.twos_complement,
    }


def _scaling(fmt: Format, element: ElementFormat) -> Constants:
    if fmt.scale_rule is not None:
        return {"EMAX": element.emax, "CARRY_FROM": carry_bits(fmt), "TARGET": 0}
    return {"EMAX": 0, "CARRY_FROM": 0, "TARGET": target(fmt)}


def _blocks(fmt: Format, shape: tuple[int, ...], axis: int, itemsize: int) -> LaunchConfig:
    """Return the launch configuration for a format with blocks along `axis` or square blocks.

    `shape` is the shape of the tensor, with its dimensions in memory order. Square blocks
    extend over the last two dimensions.
    """
    assert isinstance(fmt.element, ElementFormat)
    assert fmt.block_size is not None
    size = fmt.block_size
    if fmt.square:
        height, width, axis = size, size, len(shape) - 2
    elif math.prod(shape[axis + 1 :]) == 1:
        height, width = 1, min(size, shape[axis])
    else:
        height, width = min(size, shape[axis]), 1
    outer, rows, columns = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    # If blocks run along rows, and each row consists of whole blocks, treat all rows as one row.
    if height == 1 and columns == 1:
        rows, columns = outer, rows
        outer = 1
        if columns % width == 0:
            rows, columns = 1, rows * columns
    a, b = _power_of_two(height), _power_of_two(width)
    values = TILE // itemsize
    t = max(values // (a * b), min(_WIDE // b, _MOST // (a * b)), 1)
    t = min(t, _power_of_two(-(-columns // width)))
    if height == 1:
        a = min(max(values // (t * b), 1), _power_of_two(rows))
    bands, tiles = -(-rows // (a if height == 1 else height)), -(-columns // (t * width))
    random = 0
    if fmt.rounding == "stochastic":
        random = 4 if columns % 4 == 0 and b == width and t * b % 4 == 0 else 1
    constants = _element(fmt.element) | _scaling(fmt, fmt.element)
    constants |= {"RANDOM": random, "HEIGHT": height, "WIDTH": width, "A": a, "T": t, "B": b}
    return _plan(
        triton_blocks.blocks,
        outer * bands * tiles,
        (rows, columns, bands, tiles),
        constants,
        a * t * b * itemsize,
    )


def _elements(fmt: Format, count: int, itemsize: int) -> LaunchConfig:
    constants: Constants = {"TARGET": 0, "POWER_OF_TWO": False}
    if isinstance(fmt.scaling, TensorScaling):
        constants = {"TARGET": fmt.scaling.target, "POWER_OF_TWO": fmt.scaling.power_of_two}
    if isinstance(fmt.element, ElementFormat):
        constants |= _element(fmt.element) | {"BEYOND": 0}
    else:
        beyond = LARGEST_BITS if fmt.element.saturates else INFINITY
        constants |= {"LOWEST": 0, "TOP": 0, "MANTISSA": 0, "ONE_ZERO": True, "BEYOND": beyond}
    values = TILE // itemsize
    constants |= {"ROUNDING": fmt.rounding, "BLOCK": values}
    return _plan(triton_elementwise.elements, -(-count // values), (count,), constants, TILE)


@functools.lru_cache(maxsize=1 << 14)
def plan(fmt: Format, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for quantizing a tensor of this dtype.

    `shape` and `axis` refer to the tensor's dimensions in memory order.

    Raises:
        ValueError: if there is no CUDA kernel for the format's rounding mode.
    """
    check_rounding(fmt.rounding, kernel_roundings(fmt, "cuda"), f"the CUDA kernel of {fmt.name}")
    if fmt.block_size is None:
        return _elements(fmt, math.prod(shape), dtype.itemsize)
    return _blocks(fmt, shape, axis, dtype.itemsize)


@functools.lru_cache(maxsize=1 << 14)
def amax_plan(count: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for the largest finite magnitude of `count` values."""
    values = TILE // dtype.itemsize
    programs = -(-count // (values * _REPEATS))
    constants = {"BLOCK": values, "REPEATS": _REPEATS}
    return _plan(triton_elementwise.finite_amax, programs, (count,), constants, TILE)


def _key(seed: int | None) -> tuple[int, int]:
    """Return the low and the high word of the seed as int32 numbers, or zeros without a seed."""
    words = (0, 0) if seed is None else (seed & WORD, seed >> 32)
    return words[0] - ((words[0] >> 31) << 32), words[1]


def check() -> None:
    """Raise Triton's own error if Triton cannot launch kernels on this machine."""
    driver.active.get_current_target()


def fake_quantize(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize `x` with a Triton kernel; see `reference.fake_quantize`.

    The format must be one for which `dispatch.find` returns this function.
    """
    check_amax(fmt, amax)
    src, order = without_gaps(x, in_order=seed is not None or fmt.square)
    result = torch.empty_like(src)
    shape = tuple(src.shape[dim] for dim in order)
    chosen = plan(fmt, shape, order.index(layout.axis) if order else 0, x.dtype)
    with torch.cuda.device(x.get_device()):
        amax_bits = None
        if amax is not None:
            amax_bits = amax.to(x.device).view(torch.int32)
        elif chosen.amax:
            amax_bits = torch.zeros((), dtype=torch.int32, device=x.device)
            amax_plan(x.numel(), x.dtype).launch(src, amax_bits)
        chosen.launch(src, result, amax_bits, *_key(seed))
    if src is x:
        return result
    out = torch.empty_like(x)
    return result if result.stride() == out.stride() else out.copy_(result)
