"""Launch the fused quantization kernels on the CPU.

This module chooses the kernel for a tensor, the kernel's constants and the number of threads.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.elements import Cast, ElementFormat
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import (
    numba_bits,
    numba_blocks,
    numba_choice,
    numba_eden,
    numba_elementwise,
    numba_groups,
    numba_macro,
    numba_pairs,
    numba_rotation,
    numba_scales,
    numba_table,
    numba_threads,
    numba_tiles,
    numba_tiling,
    numba_wide,
)
from megatron.fake_quant.fused.memory_order import without_gaps
from megatron.fake_quant.fused.numba_groups import GROUP
from megatron.fake_quant.fused.numba_threads import LEAST
from megatron.fake_quant.fused.tensor_memory import bits_in_memory, empty_like
from megatron.fake_quant.random_bits import WORD
from megatron.fake_quant.rounding import check_rounding
from megatron.fake_quant.rounding_modes import EDEN_GROUP
from megatron.fake_quant.scalings import kernel_roundings
from megatron.fake_quant.scalings.tensor_scale import check_amax_value, factors

_SOURCES = {
    torch.float32: numba_elementwise.FROM_FLOAT32,
    torch.bfloat16: numba_elementwise.FROM_BFLOAT16,
    torch.float16: numba_elementwise.FROM_FLOAT16,
}
_ROUNDINGS = {
    "nearest": numba_elementwise.NEAREST,
    "stochastic": numba_elementwise.STOCHASTIC,
    "hybrid": numba_elementwise.HYBRID,
}
#: bytes of a tensor that a thread reads twice in a row, few enough to stay in the L2 cache
_NEAR = 1 << 19
_NOT_RANDOM = numba_bits.Random(False, np.uint32(0), np.uint32(0))
#: placeholder for the maxima of blocks or groups if the kernel does not read them; never written
_NO_MAXIMA = np.zeros((1, 1, 1), np.int32)

Flat = NDArray[np.integer[Any]]  #: bits of a tensor's values, in memory order


def _amax(src: Flat, given: Tensor | None) -> Tensor:
    """Return the given amax, or else the largest finite magnitude of the values in `src`."""
    if given is not None:
        return given
    parts = numba_threads.run(
        functools.partial(numba_elementwise.finite_amax, src), len(src), LEAST
    )
    return torch.tensor(max(parts), dtype=torch.int32, device="cpu").view(torch.float32)


def _random(seed: int | None) -> numba_bits.Random:
    if seed is None:
        return _NOT_RANDOM
    return numba_bits.Random(True, np.uint32(seed & WORD), np.uint32(seed >> 32))


def _groups(
    src: Flat,
    dst: Flat,
    fmt: Format,
    shape: list[int],
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> None:
    """Quantize the flat array `src` into `dst`, in HiFloat4 groups along `axis` of `shape`."""
    outer, n, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if inner == 1:
        # If each row consists of whole groups, no group crosses the end of a row. The array is then
        # divided into rows of equal length, each at most one tile long.
        width = n if n % GROUP else math.gcd(len(src), numba_groups.TILE)
        matrices = (array.reshape(-1, width) for array in (src, dst))
        work = functools.partial(numba_groups.rows, *matrices)
        numba_threads.run(work, len(src) // width, -(-LEAST // width))
    else:
        tensors = (array.reshape(outer, n, inner) for array in (src, dst))
        work = functools.partial(numba_groups.columns, *tensors)
        numba_threads.run(work, outer * -(-n // GROUP), -(-LEAST // (GROUP * inner)))


class _Plan(NamedTuple):
    """Layout in which the kernels for blocks read tensors of one shape and format."""

    shape: tuple[int, int, int]  #: shape of the arrays that the kernels read, `[outer, n, inner]`
    tiling: numba_blocks.Tiling
    wide: bool  #: True if `numba_wide` computes the blocks unless rounding is stochastic
    items: int  #: number of items of work
    least: int  #: smallest number of items for a thread


@functools.lru_cache(maxsize=4096)
def _plan(fmt: Format, shape: tuple[int, ...], axis: int) -> _Plan:
    """Return how the kernels read a tensor with this shape, in blocks along `axis`."""
    count = math.prod(shape)
    last = axis == len(shape) - 1 or (fmt.height == 1 and math.prod(shape[axis + 1 :]) == 1)
    outer, n, inner = numba_tiling.matrices(fmt, shape, axis, last=last)
    rule = numba_scales.rule_of_format(fmt)
    tiling = numba_tiling.tiling_of(fmt, n, inner, last=last)
    row = math.gcd(count, tiling.columns)
    filled = last and tiling.height == 1 and inner % tiling.width == 0 and not tiling.divided
    if filled and row >= min(inner, tiling.columns) and not rule.grouped:
        # Blocks fill the rows, so the end of a row does not matter, and all tiles can be full.
        n, inner, tiling = count // row, row, tiling._replace(strips=1)
    items = outer * -(-n // tiling.rows) * tiling.strips
    wide = numba_tiling.is_wide(inner, tiling, rule)
    return _Plan((outer, n, inner), tiling, wide, items, -(-LEAST * items // count))


def _blocks(
    src: Flat,
    dst: Flat,
    fmt: Format,
    shape: list[int],
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> None:
    """Quantize the flat array `src` into `dst`, in blocks along `axis` of `shape`.

    Blocks of several rows extend over the last two axes.
    """
    assert isinstance(fmt.element, ElementFormat)
    plan = _plan(fmt, tuple(shape), axis)
    tiling = plan.tiling
    rule = numba_scales.make_rule(fmt, functools.partial(_amax, src, amax))
    tensors = src.reshape(plan.shape), dst.reshape(plan.shape)
    element = numba_bits.element_bits(fmt.element)
    if plan.wide and seed is None:
        work = functools.partial(numba_wide.wide_blocks, *tensors, tiling, element, rule)
        numba_threads.run(work, plan.items, plan.least)
        return
    maxima = functools.partial(numba_tiling.maxima, tensors[0])
    whole = most = _NO_MAXIMA
    if tiling.divided:
        whole = maxima(tiling.height, tiling.width, finite=False)
    in_bands = False
    if fmt.outer_size is not None:
        # The tiles stay the same, so the numbers of items in the plan remain valid.
        groups, tiling = numba_tiling.outer_groups(tensors[0], fmt.outer_size, tiling)
        most, bands = groups.most, plan.shape[0] * groups.most.shape[1]
        in_bands = bands >= numba_tiling.FEW and not tiling.divided
        if not in_bands:
            most = maxima(groups.rows, groups.columns, finite=True)
    arguments = (*tensors, whole, most, tiling, element, rule, _random(seed))
    work = functools.partial(numba_blocks.blocks, *arguments)
    if in_bands:
        _run_in_bands(work, tensors[0], groups, tiling)
    else:
        numba_threads.run(work, plan.items, plan.least)


def _run_in_bands(
    work: numba_threads.Work,
    src: Flat,
    groups: numba_tiling.OuterGroups,
    tiling: numba_blocks.Tiling,
) -> None:
    """Find the maxima of groups with a common outer scale and quantize the groups, band by band.

    A band is a row of groups. A thread takes a few bands at a time, so that they stay in the cache
    after the first pass.
    """
    outer, n, inner = src.shape
    bands = groups.most.shape[1]
    find_maxima = functools.partial(
        numba_blocks.group_maxima,
        src,
        groups.rows,
        groups.columns,
        groups.strips,
        True,
        groups.most,
    )
    step = max(_NEAR // (groups.rows * inner * src.itemsize), 1)

    def first_item(band: int) -> int:
        """Return the first item of `work` that has values of a band, or the number of items."""
        rows = -(-n // tiling.height)
        row: int = band // bands * rows + band % bands * (groups.rows // tiling.height)
        return row * tiling.strips

    def both(start: int, stop: int) -> None:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            find_maxima(first * groups.strips, last * groups.strips)
            work(first_item(first), first_item(last))

    numba_threads.run(both, outer * bands, -(-LEAST // (groups.rows * inner)))


def _tiles(
    src: Flat,
    dst: Flat,
    fmt: Format,
    shape: list[int],
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> None:
    """Quantize the flat array `src` into `dst` by tiles, in blocks along `axis` of `shape`."""
    assert fmt.scaling is not None
    assert fmt.block_size is not None
    outer, n, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    random, finite_amax = _random(seed), functools.partial(_amax, src, amax)
    rule: Any
    if fmt.corrects_scales:
        cut, tiles = numba_tiles.cut(outer, n, inner, EDEN_GROUP)
        kernel = numba_eden.eden
        rule = numba_eden.make_rule(fmt, finite_amax, cut, random)
        random = _random(None)
    else:
        cut, tiles = numba_tiles.cut(outer, n, inner, fmt.block_size)
        kernel, make_rule = _TILE_KERNELS[fmt.scaling.method]
        rule = make_rule(fmt, finite_amax)
    core = functools.partial(kernel, rule)
    work = numba_tiles.quantize(core, src, dst, cut, random)
    numba_threads.run(work, tiles, -(-LEAST * tiles // len(src)))


#: Kernels that work by tiles and the functions that return their constants, by scaling method.
_TILE_KERNELS = {
    "pair_exponents": (numba_pairs.pairs, numba_pairs.make_rule),
    "absmax": (numba_table.table, numba_table.make_rule),
    "element_choice": (numba_choice.choice, numba_choice.make_rule),
    "macro_blocks": (numba_macro.macro, numba_macro.make_rule),
}
#: Functions that quantize to formats with block scales, by scaling method.
_BLOCK_KERNELS = {
    "mx": _blocks,
    "float8": _blocks,
    "float32": _blocks,
    "hifloat4": _groups,
    **dict.fromkeys(_TILE_KERNELS, _tiles),
}


def _elements(
    src: Flat, dst: Flat, fmt: Format, source: int, seed: int | None, amax: Tensor | None
) -> None:
    """Quantize `src` into `dst` value by value, for a format without block scales."""
    if isinstance(fmt.element, Cast):
        _casts(src, dst, fmt.element)
        return
    down, up = map(np.float32, factors(fmt, functools.partial(_amax, src, amax)))
    if fmt.scaling is not None:
        source = numba_elementwise.FROM_FLOAT32
    random = _random(seed)
    if isinstance(fmt.element, ElementFormat):
        element = numba_bits.element_bits(fmt.element)
        work = functools.partial(numba_elementwise.elements, src, dst, down, up, element, random)
    else:
        beyond = numba_elementwise.LARGEST if fmt.element.saturates else numba_bits.INFINITY
        rounding = _ROUNDINGS[fmt.rounding]
        work = functools.partial(
            numba_elementwise.hifloat8, src, dst, down, up, beyond, rounding, source, random
        )
    numba_threads.run(work, len(src), LEAST, backwards=True)


#: Float16 with its range extended to 2^16, the magnitude at which a result becomes Inf.
_FLOAT16 = numba_bits.element_bits(ElementFormat("float16", 5, 10, bias=15, max=65536.0))


def _casts(src: Flat, dst: Flat, element: Cast) -> None:
    """Round each value of `src` to a torch dtype, and write the results to `dst`."""
    kept = element.dtype == torch.bfloat16
    work = functools.partial(numba_elementwise.casts, src, dst, kept, _FLOAT16)
    numba_threads.run(work, len(src), LEAST)


def _readable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that kernels read: float16 becomes float32."""
    return x.float() if x.dtype == torch.float16 else x


def _like(result: Tensor, x: Tensor) -> Tensor:
    """Return `result`, or a copy of it, with the dtype and strides of `torch.empty_like(x)`."""
    strides = torch.empty_like(x, device="meta").stride()
    same = result.dtype == x.dtype and result.stride() == strides
    return result if same else empty_like(x).copy_(result)


def rotate(x: Tensor, matrix: Tensor, factor: float, axis: int) -> Tensor:
    """Multiply `x` along `axis` by a block-diagonal matrix and by `factor`; see `hadamard.py`.

    Every block on the matrix's diagonal is `matrix`.
    """
    size = matrix.shape[0]
    dense, order = without_gaps(_readable(x), in_order=False)
    result = empty_like(dense)
    src, dst = bits_in_memory(dense), bits_in_memory(result)
    position = order.index(axis)
    inner = math.prod(dense.shape[dim] for dim in order[position + 1 :])
    shape = (-1, size) if inner == 1 else (-1, size, inner)
    kernel = numba_rotation.rows if inner == 1 else numba_rotation.columns
    arguments = (matrix.contiguous().numpy(), np.float32(factor))
    work = functools.partial(kernel, src.reshape(shape), dst.reshape(shape), *arguments)
    numba_threads.run(work, len(src) // (size * inner), -(-LEAST // (size * inner)))
    return _like(result, x)


def fake_quantize(
    x: Tensor, fmt: Format, layout: BlockLayout, seed: int | None, *, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize `x` with a CPU kernel; see `reference.fake_quantize`.

    Raises:
        ValueError: if there is no CPU kernel for the format's rounding mode.
    """
    check_rounding(fmt.rounding, kernel_roundings(fmt, "cpu"), f"the CPU kernel of {fmt.name}")
    check_amax_value(fmt, amax)
    source, axis, one_row = _SOURCES[x.dtype], layout.axis, fmt.one_block
    if fmt.columns or one_row:
        fmt, axis = fmt.across(), layout.across
    in_order = seed is not None or fmt.height > 1
    dense, order = without_gaps(_readable(x), in_order=in_order)
    result = empty_like(dense)
    src, dst = bits_in_memory(dense), bits_in_memory(result)
    if fmt.block_scale is None:
        _elements(src, dst, fmt, source, seed, amax)
    else:
        shape = [len(src)] if one_row else [dense.shape[dim] for dim in order]
        assert fmt.scaling is not None
        kernel = _tiles if fmt.corrects_scales else _BLOCK_KERNELS[fmt.scaling.method]
        kernel(src, dst, fmt, shape, 0 if one_row else order.index(axis), seed, amax)
    # If `x` was not copied, it has no gaps, and the result has the strides of `empty_like(x)`.
    return result if dense is x else _like(result, x)
