"""Fused quantization on CUDA devices: which Triton kernel, in which tiles, with which numbers.

Not yet run on a GPU. Tests hold the kernels to the reference by Triton's interpreter, compile them
for sm_90, and look for what would change bits in the assembler code.

Nothing waits for the device: the scale of a tensor stays in its memory, as the maximum that a first
kernel finds. Kernels are compiled the first time a format meets a type of tensor, which takes a
second, and then come from Triton's cache on disk.
"""

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.formats import (
    BlockScaling,
    ElementFormat,
    Format,
    HiFloat8,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.fused import triton_blocks, triton_elementwise
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.hifloat8 import LARGEST_EXPONENT
from megatron.fake_quant.mx import CARRY_FROM
from megatron.fake_quant.nvfp4 import LARGEST
from megatron.fake_quant.random_bits import WORD
from megatron.fake_quant.rounding import INFINITY, power_of_two_bits

TILE = 1 << 14  #: bytes that a program has in registers, if blocks are not larger
_PER_WARP = TILE // 4  #: eight loads of 16 bytes a thread
_WIDE = 32  #: values side by side that a tile should have, if it gets no larger than `_MOST` values
_MOST = 1 << 15
LARGEST_BITS = power_of_two_bits(LARGEST_EXPONENT)  #: HiFloat8's largest number
_REPEATS = 8  #: tiles in which a program looks for the maximum

Constants = dict[str, Any]


class LaunchConfig(NamedTuple):
    """What a format, a shape and a type make of a kernel; see there."""

    kernel: Any
    programs: int
    numbers: tuple[int, ...]
    constants: Constants  #: in the kernel's order
    options: Constants
    amax: bool  #: whether it asks for the tensor's maximum
    ready: dict[tuple[int, bool], Any]  #: compiled, by device and whether memory is aligned

    def launch(self, src: Tensor, *arguments: Any) -> None:
        """Launch on the current stream, after the first time past Triton's binder: that takes
        longer than the kernel, which for 4096 x 4096 bfloat16 is 20 microseconds.
        """
        arguments = (src, *arguments, *self.numbers, *self.constants.values())
        key = (src.get_device(), src.data_ptr() % 16 == 0)
        if key in self.ready:
            self.ready[key][(self.programs, 1, 1)](*arguments)
        else:
            compiled = self.kernel[(self.programs, 1, 1)](*arguments, **self.options)
            if compiled is not None:  # as it is from the interpreter
                self.ready[key] = compiled


def _bits(x: float) -> int:
    """Those of a positive float32."""
    return int(struct.unpack("i", struct.pack("f", x))[0])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _plan(
    kernel: Any, programs: int, numbers: tuple[int, ...], constants: Constants, size: int
) -> LaunchConfig:
    """The plan for tiles of so many bytes."""
    ordered = {name: constants[name] for name in kernel.arg_names if name in constants}
    # Fusion would make one operation, that rounds once, of a product and a sum.
    options = {"num_warps": min(max(size // _PER_WARP, 1), 16), "enable_fp_fusion": False}
    wants_amax = constants.get("TARGET", 0) != 0
    return LaunchConfig(kernel, programs, numbers, ordered, options, wants_amax, {})


def _element(element: ElementFormat) -> Constants:
    return {
        "LOWEST": _bits(math.ldexp(1, element.emin)),
        "TOP": _bits(element.max),
        "MANTISSA": element.mantissa_bits,
        "ONE_ZERO": element.twos_complement,
    }


def _scaling(fmt: Format) -> Constants:
    assert isinstance(fmt.element, ElementFormat)
    if isinstance(fmt.scaling, TwoLevelScaling):
        return {"EMAX": 0, "CARRY_FROM": 0, "TARGET": LARGEST}
    assert isinstance(fmt.scaling, BlockScaling)
    significand = CARRY_FROM[fmt.scaling.rule](fmt.element)  # in [0.5, 1]
    carry_from = int(math.ldexp(significand, 24)) - (1 << 23)
    return {"EMAX": fmt.element.emax, "CARRY_FROM": carry_from, "TARGET": 0}


def _blocks(fmt: Format, shape: tuple[int, ...], axis: int, itemsize: int) -> LaunchConfig:
    """For memory of this shape with blocks along `axis`, or square ones of the last two."""
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
    if height == 1 and columns == 1:  # blocks along rows, which may be one where they end evenly
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
    constants = _element(fmt.element) | _scaling(fmt)
    constants |= {"RANDOM": random, "HEIGHT": height, "WIDTH": width, "A": a, "T": t, "B": b}
    return _plan(
        triton_blocks.blocks,
        outer * bands * tiles,
        (rows, columns, bands, tiles),
        constants,
        a * t * b * itemsize,
    )


def _elements(fmt: Format, count: int, itemsize: int) -> LaunchConfig:
    scaling = fmt.scaling
    constants: Constants = {"TARGET": 0, "POWER_OF_TWO": False}
    if isinstance(scaling, TensorScaling):
        constants = {"TARGET": scaling.target, "POWER_OF_TWO": scaling.power_of_two}
    if isinstance(fmt.element, HiFloat8):
        beyond = LARGEST_BITS if fmt.element.overflow == "saturate" else INFINITY
        constants |= {"LOWEST": 0, "TOP": 0, "MANTISSA": 0, "ONE_ZERO": True, "BEYOND": beyond}
    else:
        assert isinstance(fmt.element, ElementFormat)
        constants |= _element(fmt.element) | {"BEYOND": 0}
    values = TILE // itemsize
    constants |= {"ROUNDING": fmt.rounding, "BLOCK": values}
    return _plan(triton_elementwise.elements, -(-count // values), (count,), constants, TILE)


@functools.lru_cache(maxsize=1 << 14)
def plan(fmt: Format, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> LaunchConfig:
    """How to quantize memory of this shape and type."""
    if fmt.block_size is None:
        return _elements(fmt, math.prod(shape), dtype.itemsize)
    return _blocks(fmt, shape, axis, dtype.itemsize)


@functools.lru_cache(maxsize=1 << 14)
def amax_plan(count: int, dtype: torch.dtype) -> LaunchConfig:
    """How to find the largest finite magnitude of so many values."""
    values = TILE // dtype.itemsize
    programs = -(-count // (values * _REPEATS))
    constants = {"BLOCK": values, "REPEATS": _REPEATS}
    return _plan(triton_elementwise.finite_amax, programs, (count,), constants, TILE)


def _key(seed: int | None) -> tuple[int, int]:
    """The words of the seed as int32."""
    words = (0, 0) if seed is None else (seed & WORD, seed >> 32)
    return words[0] - ((words[0] >> 31) << 32), words[1]


def check() -> None:
    """Raise what Triton raises where it cannot launch a kernel."""
    driver.active.get_current_target()


def fake_quantize(x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None) -> Tensor:
    """See `reference.fake_quantize`; of formats for which `fused.find` names this one."""
    src, order = without_gaps(x, in_order=seed is not None or fmt.square)
    result = torch.empty_like(src)
    shape = tuple(src.shape[dim] for dim in order)
    chosen = plan(fmt, shape, order.index(layout.axis) if order else 0, x.dtype)
    with torch.cuda.device(x.get_device()):
        amax = None
        if chosen.amax:
            amax = torch.zeros((), dtype=torch.int32, device=x.device)
            amax_plan(x.numel(), x.dtype).launch(src, amax)
        chosen.launch(src, result, amax, *_key(seed))
    if src is x:
        return result
    out = torch.empty_like(x)
    return result if result.stride() == out.stride() else out.copy_(result)
