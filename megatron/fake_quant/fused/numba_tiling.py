"""Cut a tensor into matrices, tiles and groups, for the CPU kernel of `BlockScaling` formats."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import numba_blocks, numba_scales, numba_threads
from megatron.fake_quant.fused.numba_columns import TILE
from megatron.fake_quant.fused.numba_wide import CHUNK

#: columns in a tile whose blocks span several rows, few enough that the rows stay in the cache
_COLUMNS = 512
FEW = 16  #: number of rows of blocks in a matrix below which its columns are divided, too
#: rows in a tile if tiles divide blocks, so many that the time to compute scales is negligible
_ROWS = 128

Bits = NDArray[np.integer[Any]]  #: bits of a tensor's values, `[outer, n, inner]`


def matrices(fmt: Format, shape: tuple[int, ...], axis: int, *, last: bool) -> tuple[int, int, int]:
    """Return the shape `[outer, n, inner]` in which the kernel for blocks reads a tensor.

    last: True if blocks run along the last axis in memory.
    """
    if fmt.height > 1:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    if last:
        return 1, math.prod(shape[:axis]), shape[axis]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def tiling_of(fmt: Format, n: int, inner: int, *, last: bool) -> numba_blocks.Tiling:
    """Return the shape of a format's blocks and of tiles in matrices of `n` x `inner` values.

    Blocks that span whole columns are divided if a tile of whole blocks would not stay in the
    cache, because the tile would then be read from memory twice, in parts of rows. Blocks that span
    whole rows are divided if there are too few of them for all threads.

    last: True if blocks run along the last axis in memory.
    """
    assert fmt.block_size is not None
    size = fmt.block_size if fmt.height > 1 else min(fmt.block_size, inner if last else n)
    height, width = (fmt.height, size) if last else (size, fmt.height)
    most = _COLUMNS if height > 1 else TILE
    rows, columns, divided = height, max(most // width, 1) * width, False
    if getattr(fmt.scaling, "search", "none") == "none":
        tall = height == n > 2 * _ROWS and TILE % width == 0
        wide = width == inner > TILE and height == 1 and n < FEW
        rows, columns = _ROWS if tall else rows, TILE if tall or wide else columns
        divided = tall or wide
    # If there are few rows of tiles, divide the columns into strips, so that all threads work.
    strips = 1 if -(-n // rows) >= FEW else -(-inner // columns)
    return numba_blocks.Tiling(height, width, rows, columns, strips, last, divided)


def is_wide(inner: int, tiling: numba_blocks.Tiling, rule: numba_scales.Rule) -> bool:
    """Return whether the kernel for wide blocks supports this tiling and these constants."""
    chunks = all(length % CHUNK == 0 for length in (inner, tiling.width, tiling.columns))
    own = not (tiling.divided or rule.grouped or rule.search)
    return chunks and own and rule.kind != numba_scales.DIVIDED


def maxima(src: Bits, rows: int, columns: int, *, finite: bool) -> NDArray[np.int32]:
    """Return the largest magnitude of each group of values, `[matrices, rows, columns]`.

    A group has `rows` x `columns` values of a matrix of `src`. `columns` divides `TILE`, or is at
    least the number of columns of a matrix. Groups that span a whole axis are divided, so that all
    threads work.

    finite: True if Inf and NaN are ignored.
    """
    outer, n, inner = src.shape
    height = min(rows, _ROWS) if rows >= n else rows
    width = min(columns, TILE) if columns >= inner else columns
    strips = -(-inner // TILE)
    parts = np.zeros((outer, -(-n // height), -(-inner // width)), np.int32)
    work = functools.partial(numba_blocks.group_maxima, src, height, width, strips, finite, parts)
    count = outer * parts.shape[1] * strips
    numba_threads.run(work, count, -(-numba_threads.LEAST * count // src.size))
    if rows >= n:
        parts = parts.max(axis=1, keepdims=True)
    return parts.max(axis=2, keepdims=True) if columns >= inner else parts


class OuterGroups(NamedTuple):
    """Groups of values with a common outer scale."""

    rows: int  #: rows of a group, which is also the height of a band of groups
    columns: int  #: columns of a group
    strips: int  #: number of parts into which a band is cut, for more threads
    most: NDArray[np.int32]  #: array for the groups' maxima, all zeros, `[matrices, rows, columns]`


def outer_groups(
    src: Bits, size: int, tiling: numba_blocks.Tiling
) -> tuple[OuterGroups, numba_blocks.Tiling]:
    """Return the groups of `size` values with a common outer scale, and a tiling for them."""
    outer, n, inner = src.shape
    shift = size.bit_length() - 1
    size = 1 << shift
    rows, columns = (1, min(size, inner)) if tiling.along_rows else (min(size, n), 1)
    strips = 1 if tiling.along_rows else -(-inner // TILE)
    most = np.zeros((outer, -(-n // rows), -(-inner // columns)), np.int32)
    groups = OuterGroups(rows, columns, strips, most)
    if tiling.along_rows:
        return groups, tiling._replace(column_shift=shift)
    return groups, tiling._replace(row_shift=shift)
