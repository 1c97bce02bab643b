"""Choose the Triton kernel for a format and a tensor, its tiles and its constants.

A plan depends only on the format, the shape and the axis. Plans are cached for each dtype, because
they hold the compiled kernels.
"""

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.float32_bits import BIAS, INFINITY, power_of_two_bits
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import triton_blocks, triton_elementwise
from megatron.fake_quant.hifloat8 import LARGEST_EXPONENT
from megatron.fake_quant.rounding import check_rounding
from megatron.fake_quant.scalings import float8_scales, kernel_roundings, target
from megatron.fake_quant.scalings.mx import carry_bits
from megatron.fake_quant.special_scalings import PairScaling, TensorScaling

#: Number of values in the tile that a program holds in registers, unless a block is larger.
TILE = 1 << 12
#: Number of values in a tile per warp, 32 per thread. With 64 values of 16 bits, a thread needs so
#: many registers that probably too few threads run at a time: on an H100, blocks along columns then
#: reach 71 to 76 % of a copy's speed, compared with 99 % for 32 float32 values.
_PER_WARP = 1 << 10
_WIDE = 32  #: desired number of columns in a tile, unless the tile would exceed `_MOST` values
_MOST = 1 << 15
#: Longest block along rows, in values, that one program reads. Another kernel computes the maxima
#: of longer blocks beforehand.
_LONGEST = 1 << 14
#: Columns of a tile that divides blocks along columns: 128 bytes of bfloat16 per row.
_STRIP = 64
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
    ready: dict[tuple[int, bool], Any]  #: compiled kernels, by device index and 16-byte alignment
    #: launch that computes the maxima which the kernel reads; None if it reads none
    maxima: "LaunchConfig | None" = None
    groups: int = 0  #: number of these maxima

    def launch(self, src: Tensor, *arguments: Any) -> None:
        """Launch the kernel on the current stream; later launches bypass Triton's argument binder.

        Triton's argument binder takes longer than the kernel, which takes 24 to 33
        microseconds for a 4096 x 4096 bfloat16 matrix on an H100.
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


def _float32(x: float) -> float:
    """Round a number to float32, so that no compiler has to."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _launch(
    kernel: Any, programs: int, numbers: tuple[int, ...], constants: Constants, values: int
) -> LaunchConfig:
    """Return the launch configuration of a kernel with tiles of `values` values."""
    ordered = {name: constants[name] for name in kernel.arg_names if name in constants}
    # FP fusion is off: it would merge a product and a sum into one operation with one rounding.
    options = {"num_warps": min(max(values // _PER_WARP, 1), 16), "enable_fp_fusion": False}
    return LaunchConfig(kernel, programs, numbers, ordered, options, {})


def _element(element: ElementFormat) -> Constants:
    return {
        "LOWEST": _bits(element.smallest_normal),
        "TOP": _bits(element.max),
        "MANTISSA": element.mantissa_bits,
        "ONE_ZERO": element.twos_complement,
    }


def _scaling(fmt: Format, element: ElementFormat) -> Constants:
    """Return the constants from which the kernel computes block scales."""
    scaling = fmt.scaling
    constants: Constants = {
        "KIND": "pairs",
        "EMAX": 0,
        "CARRY_FROM": 0,
        "SHARE": 1.0,
        "INVERSE_SHARE": 1.0,
        "REACHED": 0.0,
        "TARGET": 0.0,
        "SMALLEST_OUTER": _float32(float8_scales.SMALLEST_OUTER),
        "SEARCH": "none",
        "APART": False,
    }
    if isinstance(scaling, PairScaling):
        return constants | {"EMAX": scaling.lowest + BIAS}
    assert isinstance(scaling, BlockScaling)
    constants |= {"KIND": scaling.scale, "SEARCH": scaling.search, "APART": scaling.apart}
    if scaling.scale == "e8m0":
        return constants | {
            "EMAX": element.emax,
            "CARRY_FROM": carry_bits(fmt),
            "SHARE": _float32(scaling.share),
            "INVERSE_SHARE": _float32(1 / scaling.share),
        }
    reached = 0.0
    if not float8_scales.folds(scaling, element):
        reached = _float32(float8_scales.top(scaling, element))
    return constants | {"REACHED": reached, "TARGET": _float32(target(fmt) or 0.0)}


class _Matrices(NamedTuple):
    """Layout of a tensor as consecutive matrices, and of the blocks in them."""

    number: int
    rows: int
    columns: int
    height: int  #: rows per block
    width: int  #: columns per block
    rowwise: bool  #: True if blocks run along rows; False if they run along columns


def _matrices(shape: tuple[int, ...], axis: int, size: int, unit: int | None) -> _Matrices:
    """Return the layout of a tensor as matrices with blocks of `size` values along `axis`.

    If blocks run along rows, and each row consists of whole `units`, all rows are treated as one.

    unit: number of values at whose multiples a row may end; None to keep the rows.
    """
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if inner > 1:
        return _Matrices(outer, length, inner, size, 1, False)
    if unit is not None and length % unit == 0:
        return _Matrices(1, 1, outer * length, 1, size, True)
    return _Matrices(1, outer, length, 1, size, True)


def _parts(shape: tuple[int, ...], axis: int) -> _Matrices:
    """Return a layout that divides the blocks along `axis` into tiles of at most `TILE` values."""
    inner = math.prod(shape[axis + 1 :])
    if inner == 1:
        return _matrices(shape, axis, min(TILE, _power_of_two(shape[axis])), None)
    width = min(_STRIP, _power_of_two(inner))
    height = min(TILE // width, _power_of_two(shape[axis]))
    return _matrices(shape, axis, height, None)._replace(width=width)


def _tiles(matrices: _Matrices, groups: int) -> tuple[int, Any, Constants, int]:
    """Return the number of programs, the kernel's tile arguments, and a tile's number of values.

    The arguments are a tuple of numbers, and constants that are known at compile time.
    """
    number, rows, columns, height, width, rowwise = matrices
    a, b = _power_of_two(height), _power_of_two(width)
    t = max(TILE // (a * b), min(_WIDE // b, _MOST // (a * b)), 1)
    t = min(t, _power_of_two(-(-columns // width)))
    if height == 1:
        a = min(max(TILE // (t * b), 1), _power_of_two(rows))
    bands, tiles = -(-rows // (a if height == 1 else height)), -(-columns // (t * width))
    constants = {"ROWWISE": rowwise, "HEIGHT": height, "WIDTH": width, "A": a, "T": t, "B": b}
    numbers = (rows, columns, bands, tiles, groups)
    return number * bands * tiles, numbers, constants, a * t * b


def _maxima(matrices: _Matrices, groups: int, *, group: int, finite: bool) -> LaunchConfig:
    """Return the launch configuration for the maxima of `groups` groups per row or column."""
    programs, numbers, constants, values = _tiles(matrices, groups)
    constants |= {"FINITE": finite, "GROUP": group}
    return _launch(triton_blocks.maxima, programs, numbers, constants, values)


def _blocks(fmt: Format, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for a format with block scales whose blocks run along `axis`.

    `shape` is the shape of the tensor, with its dimensions in memory order. Blocks of several rows
    extend over the last two dimensions.
    """
    assert isinstance(fmt.element, ElementFormat)
    assert fmt.block_size is not None
    assert fmt.scaling is not None
    length, inner = shape[axis], math.prod(shape[axis + 1 :])
    size = fmt.block_size if fmt.height > 1 else min(fmt.block_size, length)
    if isinstance(fmt.scaling, PairScaling):
        size = fmt.block_size  # even, so that pairs are whole
    content, maxima, group, groups = "none", None, 0, 1
    matrices = _matrices(shape, axis, size, size)
    if fmt.height > 1:
        rowwise = axis == len(shape) - 1
        height, width = (fmt.height, size) if rowwise else (size, fmt.height)
        front, rows, columns = math.prod(shape[:-2]), shape[-2], shape[-1]
        matrices = _Matrices(front, rows, columns, height, width, rowwise)
    if fmt.has_tensor_scale:
        content, maxima = "tensor", amax_plan(math.prod(shape), dtype)
    elif fmt.outer_size is not None:
        content, parts = "groups", _parts(shape, axis)
        matrices = _matrices(shape, axis, size, None)
        if fmt.outer_size != WHOLE_AXIS:
            group = fmt.outer_size
            groups = -(-length // group)
            matrices = _matrices(shape, axis, size, group)
            parts = _matrices(shape, axis, group, group)
        maxima = _maxima(parts, groups, group=group, finite=True)
    elif fmt.block_size == WHOLE_AXIS and length > (_LONGEST if inner == 1 else _MOST // _WIDE):
        content, matrices = "blocks", _parts(shape, axis)
        maxima = _maxima(matrices, groups, group=group, finite=False)
    programs, numbers, constants, values = _tiles(matrices, groups)
    width, b = constants["WIDTH"], constants["B"]
    fours = matrices.columns % 4 == 0 and b == width and constants["T"] * b % 4 == 0
    random = 0 if fmt.rounding == "nearest" else 4 if fours else 1
    constants |= _element(fmt.element) | _scaling(fmt, fmt.element)
    constants |= {"RANDOM": random, "AMAX": content, "GROUP": group}
    chosen = _launch(triton_blocks.blocks, programs, numbers, constants, values)
    count = 1 if content == "tensor" else math.prod(shape) // length * groups
    return chosen._replace(maxima=maxima, groups=count)


def _elements(fmt: Format, count: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for a format without block scales."""
    constants: Constants = {"TARGET": 0, "POWER_OF_TWO": False, "APART": False}
    maxima = None
    if isinstance(fmt.scaling, TensorScaling):
        constants = {
            "TARGET": fmt.scaling.target,
            "POWER_OF_TWO": fmt.scaling.power_of_two,
            "APART": fmt.scaling.apart,
        }
        maxima = amax_plan(count, dtype)
    if isinstance(fmt.element, ElementFormat):
        constants |= _element(fmt.element) | {"BEYOND": 0}
    else:
        beyond = LARGEST_BITS if fmt.element.saturates else INFINITY
        constants |= {"LOWEST": 0, "TOP": 0, "MANTISSA": 0, "ONE_ZERO": True, "BEYOND": beyond}
    constants |= {"ROUNDING": fmt.rounding, "BLOCK": TILE}
    chosen = _launch(triton_elementwise.elements, -(-count // TILE), (count,), constants, TILE)
    return chosen._replace(maxima=maxima, groups=1)


@functools.lru_cache(maxsize=1 << 14)
def plan(fmt: Format, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for quantizing a tensor of this shape and dtype.

    `shape` and `axis` refer to the tensor's dimensions in memory order.

    Raises:
        ValueError: if there is no CUDA kernel for the format's rounding mode.
    """
    check_rounding(fmt.rounding, kernel_roundings(fmt, "cuda"), f"the CUDA kernel of {fmt.name}")
    if fmt.block_size is None:
        return _elements(fmt, math.prod(shape), dtype)
    return _blocks(fmt, shape, axis, dtype)


@functools.lru_cache(maxsize=1 << 14)
def scaled_plan(count: int, dtype: torch.dtype, factors: tuple[bool, bool, bool]) -> LaunchConfig:
    """Return the launch configuration for scaling `count` sums and rounding them to `dtype`.

    factors: whether there is a scale of A, a scale of B, and a factor alpha.
    """
    names = ("HAS_A", "HAS_B", "HAS_ALPHA")
    constants = {**dict(zip(names, factors, strict=True)), "BLOCK": TILE}
    return _launch(triton_elementwise.scaled, -(-count // TILE), (count,), constants, TILE)


@functools.lru_cache(maxsize=1 << 14)
def amax_plan(count: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the launch configuration for the largest finite magnitude of `count` values."""
    programs = -(-count // (TILE * _REPEATS))
    constants = {"BLOCK": TILE, "REPEATS": _REPEATS}
    return _launch(triton_elementwise.finite_amax, programs, (count,), constants, TILE)
